"""Jobs without blocks: generations, forward passes, sweeps, harvests, and requests that are ended or that disturb others."""

from __future__ import annotations

import contextlib
import random
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from helpers_outputs import sharing_of
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pymllm_interp import Capture, SamplingParams
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.harvest import open_harvest

from .results import Differs, compare, of_activations, of_output, of_receipt
from .world import OF_PROMPTS, OfSAE, World, captures_of_prompts, random_captures, random_ops

WORDS = 90
STEMS = [random.Random(i).sample(range(WORDS), 20) for i in range(3)]
"""Beginnings that prompts share."""
WAIT = 600.0
"""Seconds after which a wait counts as a hang."""


def random_prompt(rng: random.Random, longest: int = 24) -> list[int]:
    """Two tokens at least."""
    tail = [rng.randrange(WORDS) for _ in range(rng.randint(1, 6))]
    return [*rng.choice(STEMS)[: rng.randint(1, longest - len(tail))], *tail]


def random_params(rng: random.Random, longest: int = 14) -> SamplingParams:
    found: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "temperature": rng.choice([0.0, 0.0, 0.8, 1.2])}
    options: dict[str, Any] = {
        "top_p": rng.choice([0.7, 0.95]), "top_k": rng.choice([3, 20]), "min_p": rng.choice([0.05, 0.3]),
        "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.4, "min_tokens": rng.randint(0, 4),
        "stop": [f"w{rng.randrange(WORDS)}" for _ in range(8)], "include_stop_str_in_output": True,
        "stop_token_ids": [rng.randrange(WORDS) for _ in range(6)], "logprobs": rng.choice([0, 2, 5]),
        "prompt_logprobs": rng.choice([0, 2]), "n": 2, "logit_bias": {rng.randrange(WORDS): 3.0},
        "bad_words": [f"w{rng.randrange(WORDS)} w{rng.randrange(WORDS)}"], "allowed_token_ids": list(range(0, WORDS, 3)),
    }  # fmt: skip
    found |= {name: value for name, value in options.items() if rng.random() < 0.15}
    found["min_tokens"] = min(found.get("min_tokens", 0), found["max_tokens"])
    return SamplingParams(**found, seed=rng.randrange(1000))


@dataclass
class Job:
    """Something that a client asks for. `run` does it in any world; `check` compares with what a run by itself returned."""

    fails = ""
    """Name of the error that it is to end with."""

    def run(self, world: World) -> Any:
        raise NotImplementedError

    def run_under_pressure(self, world: World) -> Any:
        return self.run(world)

    def check(self, got: Any, alone: Any) -> None:
        compare(got, alone)
        if not torch.cuda.is_available() and (ours := sharing_of(got)) != (other := sharing_of(alone)):
            raise Differs(f"its tensors share storage as {ours}, alone as {other}")


@dataclass
class Generation(Job):
    """One call with some prompts, alike in interventions and captures."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    ops: list[Any] = field(default_factory=list)
    captures: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(cls, rng: random.Random, model: ModelSpec, **given: Any) -> Self:
        count = rng.choice([1, 1, 2, 3])
        options: dict[str, Any] = {"priority": rng.choice([-1, 0, 0, 1])}
        if rng.random() < 0.2:
            options["cache_salt"] = rng.choice("ab")
        return cls(
            [random_prompt(rng) for _ in range(count)],
            [random_params(rng) for _ in range(count)],
            random_ops(rng, model) if rng.random() < 0.5 else [],
            random_captures(rng, model) if rng.random() < 0.5 else [],
            options,
            **given,
        )

    @classmethod
    def of_sae(cls, rng: random.Random) -> Self:
        """With specs of the SAE that all such jobs share."""
        return cls([random_prompt(rng)], [random_params(rng)], [OfSAE(0, 3.0)], [OfSAE(), Capture("mlp_out.1")])

    @classmethod
    def of_prompts(cls, rng: random.Random, model: ModelSpec) -> Self:
        """Several prompts, with captures of them and nothing generated."""
        prompts = [random_prompt(rng) for _ in range(rng.randint(2, 8))]
        ops = random_ops(rng, model, OF_PROMPTS) if rng.random() < 0.3 else []
        return cls(prompts, [], ops, captures_of_prompts(rng, model))

    def declared(self, world: World) -> dict[str, Any]:
        return {"interventions": world.made(self.ops), "capture": world.made(self.captures), **self.options}

    def run(self, world: World) -> Any:
        return [of_output(out) for out in world.lm.generate(self.prompts, self.params, **self.declared(world))]


@dataclass
class Stream(Generation):
    """A generation that is read token by token."""

    def run(self, world: World) -> Any:
        pieces = list(world.lm.stream(self.prompts[0], self.params[0], **self.declared(world)))
        outs: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            out = outs.setdefault(piece.output_index, {"text": "", "tokens": [], "finish_reason": None})
            out["text"] += piece
            out["tokens"] += piece.token_ids
            out["finish_reason"] = piece.finish_reason
        return sorted(outs.items())


@dataclass
class Drawn(Job):
    """Sampled tokens: each is one that transformers' filters leave, in vLLM's order."""

    prompt: list[int]
    params: SamplingParams

    @classmethod
    def random(cls, rng: random.Random) -> Drawn:
        params = SamplingParams(
            temperature=rng.choice([0.8, 1.5]), top_p=rng.choice([0.6, 0.8, 1.0]), top_k=rng.choice([0, 12]),
            min_p=rng.choice([0.0, 0.02, 0.1]), max_tokens=14, seed=rng.randrange(1000), n=2,
        )  # fmt: skip
        return cls(random_prompt(rng), params)

    def run(self, world: World) -> Any:
        (out,) = world.lm.generate([self.prompt], self.params, capture=[Capture("logits", "all")])
        for one in out.outputs:
            logits = one.activations["logits"][-len(one.token_ids) :]
            kept = self.kept(logits).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            if not kept.all():
                raise Differs(
                    f"token {int(kept.int().argmin())} of {one.token_ids} is one that the filters drop: {self.params}"
                )
        return of_output(out)

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab]: which tokens may be drawn. Bounds are a little wider: sums have roundings."""
        p, near, ids = self.params, 1e-4, torch.zeros(len(logits), 0, dtype=torch.long)
        scores = TemperatureLogitsWarper(p.temperature)(ids, logits.float())
        for used, warper in (
            (p.min_p > 0, lambda: MinPLogitsWarper(p.min_p * (1 - near))),
            (p.top_k > 0, lambda: TopKLogitsWarper(p.top_k)),
            (p.top_p < 1, lambda: TopPLogitsWarper(min(p.top_p + near, 1.0))),
        ):
            scores = warper()(ids, scores) if used else scores
        return scores.isfinite()


@dataclass
class Forward(Generation):
    """Passes without generation."""

    def run(self, world: World) -> Any:
        return [
            {"logits": out.logits, "activations": of_activations(out.activations), "receipt": of_receipt(out.receipt)}
            for out in world.lm.forward(self.prompts, **self.declared(world))
        ]


@dataclass
class Sweep(Generation):
    """One prompt under several interventions."""

    def run(self, world: World) -> Any:
        runs = [None, *world.made(self.ops)]
        return [
            of_output(o)
            for o in world.lm.sweep(self.prompts[0], runs, self.params[0], capture=world.made(self.captures))
        ]


@dataclass
class PatchSweep(Job):
    """A patched run for each layer and position."""

    base: list[int]
    source: list[int]
    site: str
    how: str

    @classmethod
    def random(cls, rng: random.Random) -> PatchSweep:
        base = random_prompt(rng, 8)
        source = [rng.randrange(WORDS), *base[1:]]
        return cls(base, source, rng.choice(["resid_post", "mlp_out", "attn_out"]), rng.choice(["auto", "requests"]))

    def run(self, world: World) -> Any:
        found = world.lm.patch_sweep(
            self.base, self.source, site=self.site, metric=[3, 5], how=self.how, progress=False
        )
        return {"values": found.values, "base": torch.tensor(found.base), "source": torch.tensor(found.source)}


@dataclass
class Harvest(Generation):
    """States of documents, written to a folder."""

    def run(self, world: World) -> Any:
        with tempfile.TemporaryDirectory(dir=world.folder) as folder:
            result = world.lm.harvest(
                iter(self.prompts), capture=world.made(self.captures), interventions=world.made(self.ops), out=folder,
                shard_bytes=1 << 14, progress=False,
            )  # fmt: skip
            found = open_harvest(folder)
            return {
                "rows": result.rows, "skipped": result.skipped,
                "sites": {
                    site: {
                        "rows": found[site][:], "documents": found.document_ids(site), "positions": found.positions(site),
                        "token_ids": found.token_ids(site),
                    }
                    for site in found.sites
                },
            }  # fmt: skip


@dataclass
class Ended(Generation):
    """A request that is cancelled, or runs into its time limit: what it has is the beginning of its solo run."""

    delay: float | None = None
    """Seconds until it is cancelled; None: by the time limit."""

    @classmethod
    def random(cls, rng: random.Random, model: ModelSpec, **given: Any) -> Self:
        found = super().random(rng, model, delay=rng.choice([None, 0.0, 0.01, 0.05]))
        return replace(found, captures=[Capture("resid_post.*")] if found.captures else [])

    def run(self, world: World) -> Any:
        handle = world.lm.submit(self.prompts[0], self.params[0], **self.declared(world))
        return of_output(handle.result(WAIT))

    def run_under_pressure(self, world: World) -> Any:
        limit = {"timeout": 0.02} if self.delay is None else {}
        handle = world.lm.submit(self.prompts[0], self.params[0], **self.declared(world), **limit)
        if self.delay is not None:
            with contextlib.suppress(TimeoutError):
                handle.wait(self.delay)
            handle.cancel()
        return of_output(handle.result(WAIT))

    def check(self, got: Any, alone: Any) -> None:
        for one, whole in zip(got["completions"], alone["completions"], strict=True):
            if one["finish_reason"] not in ("abort", "timeout"):
                compare(one, whole)
                continue
            compare(one["tokens"], whole["tokens"][: len(one["tokens"])], "tokens")
            for site, found in one["activations"].items():
                for name, rows in found.items():
                    compare(rows, whole["activations"][site][name][: len(rows)].clone(), f"{site}.{name}")


@dataclass
class Called(Generation):
    """A request with a callback that raises."""

    def run(self, world: World) -> Any:
        handle = world.lm.submit(self.prompts[0], self.params[0], **self.declared(world))
        handle.add_done_callback(raise_system_exit)
        return of_output(handle.result(WAIT))


def raise_system_exit(*_: Any) -> None:
    raise SystemExit("planned")
