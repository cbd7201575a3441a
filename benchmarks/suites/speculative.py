"""Speculative decoding against plain decoding: the suite "speculative".

Texts are known: a bias on one token makes each request repeat it. The synthetic drafter proposes this token, and errs by chance.
Drafts behind an error are wrong as well, as in vLLM's synthetic acceptance. Draft models and EAGLE heads have random weights.
They run, and the synthetic drafts are proposed in place of theirs.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_letters, ascii_lowercase, digits, punctuation
from typing import Any

from pymllm_interp import LM
from pymllm_interp.bench.common import Prompts, random_prompts
from pymllm_interp.bench.suites import Model, facts
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.core.request import Request
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.core.structured.structured_outputs import StructuredOutputs
from pymllm_interp.engine.grammars.grammar_constraint import GrammarConstraint
from pymllm_interp.runner.interp_model_runner import InterpModelRunner
from pymllm_interp.sampling.bitmasks import empty_bitmask
from pymllm_interp.speculative.ngram import NgramDrafter

Propose = Callable[[Sequence[Request], int], Sequence[Sequence[int]]]
DRAFTS, LARGEST = 3, 32
"""Drafts of a request in a step; the largest batch."""
BIAS = 1e4
CHANCES = {"all right": 1.0, "0.7 right each": 0.7}
NGRAM_TOKENS, MASK_VOCAB = 8_000, 128_000
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
}
TEXT = '{"name": "somebody with a long name", "age": 47, "tags": ["red", "blue", "green", "red"]}'


class Synthetic:
    """Proposes the token that a request repeats, and errs by chance.

    Attributes:
        chance: that a draft is right, where the draft before it is.
        inner: proposes first; None: nothing else does.
        keeps_inner: what `inner` proposes is proposed.
        texts: by prompt, the tokens that are right in place of one that is repeated.
        seconds: of the calls of `inner`.
    """

    num_speculative_tokens = DRAFTS

    def __init__(self) -> None:
        self.chance, self.keeps_inner = 1.0, False
        self.inner: Propose | None = None
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.seconds: list[float] = []
        self._rng = random.Random(0)

    def propose(self, requests: Sequence[Request], k: int) -> Sequence[Sequence[int]]:
        """See `Drafter.propose`."""
        if self.inner is not None:
            started = time.perf_counter()
            found = self.inner(requests, k)
            self.seconds.append(time.perf_counter() - started)
            if self.keeps_inner:
                return found
        return [self._drafts(request, k) for request in requests]

    def _drafts(self, request: Request, k: int) -> list[int]:
        if text := self.texts.get(tuple(request.prompt_token_ids)):
            return text[request.accepted_len : request.accepted_len + k]
        (token,) = request.params.logit_bias or {0: 0.0}
        right = next((i for i in range(k) if self._rng.random() >= self.chance), k)
        return [token] * right + [token + 1] * (k - right)


@dataclass(frozen=True)
class DraftBeside:
    """Have an engine's draft model run, and the synthetic drafts proposed."""

    synthetic: Synthetic

    def run(self, runner: InterpModelRunner) -> None:
        """Put the synthetic drafter around the engine's."""
        drafter = runner.drafter
        assert drafter is not None
        self.synthetic.inner = drafter.propose
        drafter.propose = self.synthetic.propose  # type: ignore[method-assign]


def speculative_suite(model: Model) -> Iterator[dict[str, Any]]:
    """Ratios to plain decoding, by case and batch size; the cost of n-grams and masks. Yields the growing record."""
    batches = tuple(batch for batch in model.settings.batches if batch <= LARGEST)
    model = replace(model, settings=replace(model.settings, batches=batches))
    found: dict[str, Any] = {"drafts": DRAFTS, "ngram_us": ngram_us(), "mask_us": mask_us(), "rows": []}
    synthetic = Synthetic()
    with model.load(speculative=synthetic) as lm:
        found |= facts(lm)
        for name, chance in CHANCES.items():
            synthetic.chance = chance
            for row in _rows(lm, model, f"synthetic, {name}"):
                found["rows"].append(row)
                yield found
        synthetic.inner = None
        found["other_tokens"] = other_tokens(lm, model, synthetic)
        found["schema_ratio"] = schema_ratio(lm, model)
        yield found
        synthetic.inner, synthetic.keeps_inner = NgramDrafter(5, 5).propose, True
        for row in _rows(lm, model, "n-gram, nothing to draft", repeats_token=False):
            found["rows"].append(row)
            yield found
    for method, config in draft_configs(model).items():
        synthetic = Synthetic()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            speculative = {"method": method, "model": folder, "num_speculative_tokens": DRAFTS}
            with model.load(speculative=speculative) as lm:
                lm.backend.run(DraftBeside(synthetic))
                for row in _rows(lm, model, f"{method}, all right", synthetic=synthetic):
                    found["rows"].append(row)
                    yield found


def draft_configs(model: Model) -> dict[str, dict[str, Any]]:
    """config.json of a draft with half the width and layers, and of an EAGLE-3 head. Empty for models with weights."""
    path = Path(model.model) / "config.json"
    if model.load_format != "dummy" or not path.is_file():
        return {}
    config = json.loads(path.read_text())
    heads = max(1, config["num_attention_heads"] // 2)
    smaller = {
        "hidden_size": heads * (config["hidden_size"] // config["num_attention_heads"]),
        "intermediate_size": config["intermediate_size"] // 2,
        "num_hidden_layers": max(1, config["num_hidden_layers"] // 2),
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, config["num_key_value_heads"] // 2),
    }
    head = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": min(32_000, config["vocab_size"])
    }  # fmt: skip
    return {"draft_model": {**config, **smaller}, "eagle3": {**config, **head, "num_hidden_layers": 1}}


def _rows(
    lm: LM, model: Model, case: str, repeats_token: bool = True, synthetic: Synthetic | None = None
) -> Iterator[dict[str, Any]]:
    for batch in model.settings.batches:
        if synthetic is not None:
            synthetic.seconds.clear()
        row = {"case": case, "batch": batch, **measure(lm, model, batch, repeats_token)}
        if synthetic is not None:
            row["draft_ms"] = statistics.median(synthetic.seconds) * 1e3
        yield row


def measure(lm: LM, model: Model, batch: int, repeats_token: bool) -> dict[str, Any]:
    """Tokens a second behind the first token, with drafts and without, in turns."""
    settings = model.settings
    prompts = random_prompts(lm, batch, settings.prompt_tokens)

    def rate(speculate: bool) -> tuple[float, list[RequestOutput]]:
        first, _ = _run(lm, prompts, 1, speculate, repeats_token)
        whole, outs = _run(lm, prompts, settings.new_tokens, speculate, repeats_token)
        return batch * (settings.new_tokens - 1) / max(whole - first, 1e-9), outs

    for speculate in (False, True):
        rate(speculate)
    pairs, counts = [], []
    for _ in range(settings.repeats):
        plain, (with_drafts, outs) = rate(False)[0], rate(True)
        pairs.append((plain, with_drafts))
        counts += [one.drafts for out in outs for one in out.outputs if one.drafts is not None]
    ratios = sorted(drafted / plain for plain, drafted in pairs)
    passes, accepted = sum(c.steps for c in counts), sum(c.accepted for c in counts)
    return {
        "plain_tokens_per_s": statistics.median(plain for plain, _ in pairs),
        "tokens_per_s": statistics.median(drafted for _, drafted in pairs),
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "tokens_a_pass": (passes + accepted) / passes if passes else 1.0,
    }


def other_tokens(lm: LM, model: Model, synthetic: Synthetic) -> dict[str, Any]:
    """How many greedy texts are the same with drafts, and in batches, as one by one. For others, where they part.

    A pass of another shape adds numbers in another order. Texts part where two tokens are about as likely.
    """
    prompts, tokens = random_prompts(lm, 8, model.settings.prompt_tokens), model.settings.new_tokens

    def texts(batch: int, speculate: bool) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, speculate=None if speculate else False
        )
        parts = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        return [out.token_ids for part in parts for out in lm.generate(part, params)]

    wanted = texts(1, False)
    synthetic.texts = {tuple(prompt): text for prompt, text in zip(prompts, wanted, strict=True)}
    found: dict[str, Any] = {"texts": len(prompts), "tokens": tokens, "dtype": str(lm.dtype)[6:]}
    for name, others in (("again", texts(1, False)), ("batch 4", texts(4, False)), ("with drafts", texts(1, True))):
        parted = [
            next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
            for one, other in zip(wanted, others, strict=True)
        ]
        found[name] = {"same": parted.count(None), "first_other": [i for i in parted if i is not None]}
    synthetic.texts = {}
    return found


def schema_ratio(lm: LM, model: Model) -> dict[str, float] | None:
    """Decode steps with a JSON schema in each row, by plain ones. None without xgrammar, a tokenizer or end tokens."""
    if find_spec("xgrammar") is None or lm.tokenizer is None or not lm.backend.defaults.eos_token_ids:
        return None
    prompts, tokens = (
        random_prompts(lm, max(model.settings.batches), model.settings.prompt_tokens),
        model.settings.new_tokens,
    )

    def seconds(schema: bool, count: int) -> float:
        form = StructuredOutputs(json=SCHEMA) if schema else None
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=count, speculate=False, ignore_eos=True, structured_outputs=form
        )
        started = time.perf_counter()
        lm.generate(prompts, params)
        return time.perf_counter() - started

    short = min(8, tokens - 1)

    def step_ms(schema: bool) -> float:
        return (seconds(schema, tokens) - seconds(schema, short)) / (tokens - short) * 1e3

    pairs = [(step_ms(False), step_ms(True)) for _ in range(model.settings.repeats + 1)][1:]
    return {
        "batch": len(prompts),
        "plain_ms": statistics.median(plain for plain, _ in pairs),
        "ms": statistics.median(held for _, held in pairs),
        "ratio": statistics.median(held / plain for plain, held in pairs),
    }


def _run(
    lm: LM, prompts: Prompts, new_tokens: int, speculate: bool, repeats_token: bool
) -> tuple[float, list[RequestOutput]]:
    """Seconds, and the outputs. Sampled texts repeat no n-gram."""
    how: dict[str, Any] = {"temperature": 0} if repeats_token else {"temperature": 1.0, "seed": 1}
    params = [
        SamplingParams(
            max_tokens=new_tokens, ignore_eos=True, speculate=None if speculate else False,
            logit_bias={5 + 2 * i: BIAS} if repeats_token else None, **how,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    started = time.perf_counter()
    outs = lm.generate(prompts, params)
    return time.perf_counter() - started, outs


# -- on the host ----------------------------------------------------------------------------------


def ngram_us(tokens: int = NGRAM_TOKENS, repeats: int = 200) -> float:
    """Microseconds of the n-gram drafter for a request of so many tokens, one more at each call."""
    rng = random.Random(0)
    request = Request("n-grams", [rng.randrange(1000) for _ in range(tokens)], SamplingParams(), repeats, seed=0)
    drafter, seconds = NgramDrafter(5, 2), []
    for _ in range(repeats):
        started = time.perf_counter()
        drafter.propose([request], DRAFTS)
        seconds.append(time.perf_counter() - started)
        request.output_token_ids.append(rng.randrange(1000))
    return statistics.median(seconds) * 1e6


def mask_us(vocab: int = MASK_VOCAB, repeats: int = 10) -> dict[str, float] | None:
    """Microseconds of a JSON schema's masks, median and longest, over a made-up vocabulary; None without xgrammar."""
    if find_spec("xgrammar") is None:
        return None
    import xgrammar

    signs = ascii_letters + digits + punctuation + " "
    words = ("".join(word) for size in (2, 3, 4) for word in product(ascii_lowercase, repeat=size))
    texts = list(islice(chain(["</s>"], signs, words), vocab))
    info = xgrammar.TokenizerInfo(texts, stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    place, seconds = {text: i for i, text in enumerate(texts)}, []
    allowed = empty_bitmask(1, len(texts))[0]
    within = allowed.clone()
    within[0] -= 1  # without "</s>"
    for _ in range(repeats):
        constraint = GrammarConstraint(compiled, allowed, within, [0], "schema")
        for sign in TEXT:
            row = empty_bitmask(1, len(texts))[0]
            started = time.perf_counter()
            constraint.mask(row)
            seconds.append(time.perf_counter() - started)
            constraint.accept([place[sign]])
    return {"median": statistics.median(seconds) * 1e6, "longest": max(seconds) * 1e6}


def speculative_lines(record: dict[str, Any], aims: dict[str, Any], conditions: str) -> list[str]:
    """The table of the suite, with the aims of `aims.json`."""
    batches = sorted({row["batch"] for row in record["rows"]})
    cells = {(row["case"], row["batch"]): row for row in record["rows"]}
    lines = [
        f"### {record['model']}: speculative, {record['drafts']} drafts", "", conditions, "",
        "| tokens a second, by plain (lowest to highest of the pairs) | " + " | ".join(f"bs {n}" for n in batches) + " |",
        "|---" * (len(batches) + 1) + "|",
    ]  # fmt: skip
    wanted = aims.get("speculative", {})
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        found = [cells.get((case, n)) for n in batches]
        lines.append(f"| {case} | " + " | ".join("-" if row is None else _cell(row) for row in found) + " |")
        if case in wanted:
            least = dict(zip(aims["batches"], wanted[case], strict=False))
            lines.append("| ... aim, at least | " + " | ".join(f"{least.get(n, '-')}" for n in batches) + " |")
    mask = record["mask_us"]
    text = (
        ""
        if mask is None
        else f"; a mask of a JSON schema {mask['median']:.0f} us, the longest {mask['longest']:.0f} us"
    )
    if (held := record.get("schema_ratio")) is not None:
        lines += [
            "",
            f"A step of {held['batch']} rows with a JSON schema each: {held['ms']:.2f} ms, x {held['ratio']:.3f} of plain.",
        ]
    if (other := record.get("other_tokens")) is not None:
        told = ", ".join(f"{name} {other[name]['same']}" for name in ("again", "batch 4", "with drafts"))
        lines += [
            "",
            f"Texts of {other['tokens']} tokens in {other['dtype']} that are the same, of {other['texts']}: {told}.",
        ]
    return [*lines, "", f"n-grams of a request with {NGRAM_TOKENS:,} tokens: {record['ngram_us']:.0f} us{text}."]


def _cell(row: dict[str, Any]) -> str:
    drafting = f", drafts {row['draft_ms']:.2f} ms" if "draft_ms" in row else ""
    return (
        f"{row['tokens_per_s']:,.0f}, x {row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f}), "
        f"{row['tokens_a_pass']:.2f} a pass{drafting}"
    )
