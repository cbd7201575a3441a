"""Text of token ids, over the four kinds of tokenizers: whole, streamed, and cut at stop strings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers_tokenizers import SMILE, TOKENIZERS, save_model, text_after

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.completion import Completion
from pymllm_interp.client.detokenizer import MAX_HELD, Detokenizer, StopStrings, token_text
from pymllm_interp.core.events import FinishedEvent

KINDS = tuple(TOKENIZERS)
FRANCE = "The capital of France is"


def random_ids(kind: str, rng: random.Random, most: int) -> list[int]:
    """Token ids: of all tokens, or mostly of whole and cut characters."""
    tokenizer = TOKENIZERS[kind]()
    if rng.random() < 0.3:
        return rng.choices(range(len(tokenizer)), k=rng.randrange(most + 1))
    found: list[int] = []
    while len(found) < most and rng.random() < 0.9:
        ids = tokenizer(rng.choice((SMILE, "é", "é\n\n", " and", "and", "  a", "你", ".", "\ufffd")))["input_ids"]
        ids = [token for token in ids if rng.random() < 0.95] + [rng.randrange(len(tokenizer))] * (rng.random() < 0.1)
        found += ids[: rng.choice((1, 2, 3, 9, 9, 9))]
    return found[:most]


def random_prompt(kind: str, rng: random.Random, most: int) -> list[int]:
    """Token ids of a text, which may end within a character."""
    words = rng.choices((SMILE, "é", " and", " the", "a", "你", ".", "\n", "  ", "\ufffd"), k=most)
    return TOKENIZERS[kind]()("".join(words))["input_ids"][: rng.randrange(most + 1)]


def followed(tokenizer, prompt: list[int], ids: list[int], params: SamplingParams) -> tuple[str, str, list[int]]:
    """(text, streamed text, token ids): of a request that generates `ids`, until a stop string ends it."""
    stops = StopStrings(tokenizer, params, prompt) if params.stop_strings else None
    completion = Completion("0", 0, params, tokenizer, prompt)
    streamed, length = "", None
    for i, token in enumerate(ids):
        if stops is not None and stops.push(ids[: i + 1], may_stop=True) is not None:
            ids, length = ids[: i + 1], stops.text_length
            break
        if i < len(ids) - 1:  # the last one comes with the end
            streamed += completion.token_piece(token) or ""
    end = FinishedEvent("0", ids, "length" if length is None else "stop", text_length=length)
    streamed += completion.last_piece(end)
    return Completion("0", 0, params, tokenizer, prompt).text(end), streamed, ids


@pytest.mark.parametrize("kind", KINDS)
def test_one_text_for_all_cuts_and_stop_strings(kind: str) -> None:
    rng, tokenizer, cut, stopped = random.Random(1), TOKENIZERS[kind](), 0, 0
    for case in range(120):
        prompt, ids = random_prompt(kind, rng, rng.choice((0, 3, 12, 90))), random_ids(kind, rng, 30)
        params = SamplingParams(max_tokens=None, skip_special_tokens=True)
        text, streamed, _ = followed(tokenizer, prompt, ids, params)
        assert text == streamed == text_after(kind, tokenizer, prompt, ids), (case, prompt, ids)
        cut += text.endswith("\ufffd")
        whole = Detokenizer(tokenizer, True, prompt).push(ids)
        if not whole:
            continue
        start = rng.randrange(len(whole))
        stop = whole[start : start + rng.randint(1, 6)]
        for kept in (False, True):
            asked = SamplingParams(max_tokens=None, stop=stop, include_stop_str_in_output=kept)
            ended, streamed, shorter = followed(tokenizer, prompt, ids, asked)
            assert ended == streamed == text[: text.index(stop) + kept * len(stop)], (case, prompt, ids, stop)
            assert text_after(kind, tokenizer, prompt, shorter).startswith(ended)
            stopped += 1
    assert stopped > 120 and (cut > 5 or kind in ("metaspace", "wordpiece"))


@pytest.mark.parametrize("stop", [["d", "n"], ["n", "d"], ["and", "n", " a"], [" a", "and"]])
def test_of_stop_strings_that_one_token_completes_the_first_in_the_text_ends_it(stop: list[str]) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]()
    stops = StopStrings(tokenizer, SamplingParams(stop=stop), tokenizer(FRANCE)["input_ids"])
    found = stops.push([tokenizer.convert_tokens_to_ids("▁and")], may_stop=True)
    assert (found, stops.text_length) == ((" a", 0) if " a" in stop else ("n", 2))


@pytest.mark.parametrize(
    ("prompt", "own", "text"),
    [
        (b"", 2 * SMILE.encode() + SMILE.encode()[:2], f"{SMILE}{SMILE}\ufffd\ufffd"),
        (b"", "é\n\n".encode() + SMILE.encode()[:1], "é\n\n\ufffd"),
        ("é".encode() + SMILE.encode()[:1], SMILE.encode()[1:] + b"\xf0", f"{SMILE}\ufffd"),
    ],
)
def test_text_before_a_cut_character_is_kept(prompt: bytes, own: bytes, text: str) -> None:
    """Byte fallback: the tokenizer's own decoder makes U+FFFD of all bytes of the run."""
    tokenizer = TOKENIZERS["sentencepiece"]()
    before, ids = ([tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in part] for part in (prompt, own))
    assert followed(tokenizer, before, ids, SamplingParams())[:2] == (text, text)
    assert set(tokenizer.decode([*before, *ids])) == {"\ufffd"}


def test_a_character_that_begins_in_the_prompt() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    first, last = tokenizer(SMILE)["input_ids"]
    (letter,) = tokenizer("a")["input_ids"]
    for prompt, ids, text in (
        ([letter, first], [last, letter], f"{SMILE}a"), ([letter, first], [letter], "a"),
        (tokenizer("a\ufffd")["input_ids"], [letter], "a"), ([letter, first], [], ""),
    ):  # fmt: skip
        assert followed(tokenizer, prompt, ids, SamplingParams())[:2] == (text, text)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_bytes_that_never_become_a_character_are_not_held_for_ever(kind: str) -> None:
    """A stream sends them, and a step decodes a bounded number of tokens."""
    tokenizer = TOKENIZERS[kind]()
    byte = tokenizer.get_vocab()["Ā" if kind == "byte-level" else "<0xFF>"]
    if kind == "byte-level":
        byte = tokenizer.convert_tokens_to_ids("ÿ")
    longest = 0

    class Counting:
        def decode(self, ids: list[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids, **options)

    found = Detokenizer(Counting(), True)
    pieces = [found.push([byte]) for _ in range(300)]
    assert "".join(pieces) + found.end() == "\ufffd" * 300 and sum(map(bool, pieces)) >= 300 // MAX_HELD - 1
    special = Detokenizer(Counting(), True, tokenizer("a")["input_ids"])
    assert {special.push([tokenizer.eos_token_id]) for _ in range(300)} == {""}
    assert longest <= 2 * MAX_HELD


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_single_tokens_join_to_the_text(kind: str) -> None:
    """Each has the space before it, which decoders leave out at the beginning of a text."""
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer("the capital of france is and" if kind == "wordpiece" else f"{FRANCE} and a")["input_ids"]
    text = tokenizer.decode(ids)
    assert "".join(token_text(tokenizer, token) for token in ids).removeprefix(" ") == text
    texts = [token_text(tokenizer, token) for token in range(len(tokenizer))]
    if kind == "sentencepiece":
        vocab = tokenizer.get_vocab()
        assert (texts[vocab["▁Fran"]], texts[vocab["Fran"]], texts[vocab["<0x0A>"]]) == (" Fran", "Fran", "\n")


@pytest.fixture(scope="module")
def lm_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LM]]:
    made: dict[str, LM] = {}

    def lm(kind: str) -> LM:
        if kind not in made:
            folder: Path = save_model(kind, tmp_path_factory.mktemp("kind") / kind)
            made[kind] = LM(folder, dtype="float32", device="cpu", max_model_len=128, kv_cache_tokens=4096)
        return made[kind]

    yield lm
    for one in made.values():
        one.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_calls_and_streams_of_an_engine_have_one_text(kind: str, lm_for: Callable[[str], LM]) -> None:
    lm, rng = lm_for(kind), random.Random(2)
    prompts, params = [], []
    for seed in range(6):
        parts = lm.tokenizer(f"é{SMILE}\n and a. the", add_special_tokens=False)["input_ids"]
        bias = dict.fromkeys(parts, 40.0) if seed % 3 else None
        prompts.append(random_prompt(kind, rng, 12) or [0])
        params.append(SamplingParams(max_tokens=20, temperature=9.0, seed=seed, logit_bias=bias))
    outs = lm.generate(prompts, params)
    stopping = []
    for prompt, param, out in zip(prompts, params, outs, strict=True):
        ids = out.token_ids[: -1 if out.finish_reason == "stop" else None]
        assert out.text == text_after(kind, lm.tokenizer, prompt, ids)
        assert "".join(lm.stream(prompt, param)) == out.text == lm.submit(prompt, param).result().text
        seen = out.text.rstrip("\ufffd")
        stop = seen[len(seen) // 2 :][:3] or "never"
        stopping.append(
            SamplingParams(max_tokens=20, temperature=9.0, seed=param.seed, logit_bias=param.logit_bias, stop=stop)
        )
    for prompt, param, out, whole in zip(prompts, stopping, lm.generate(prompts, stopping), outs, strict=True):
        (stop,) = param.stop_strings
        assert out.text == whole.text.partition(stop)[0] == "".join(lm.stream(prompt, param))


def test_the_first_space_of_a_completion(lm_for: Callable[[str], LM]) -> None:
    """Llama 2's decoder strips it, and the text behind the prompt has it."""
    lm = lm_for("sentencepiece")
    bias = {lm.tokenizer.convert_tokens_to_ids("▁and"): 99.0}
    (out,) = lm.generate([FRANCE], SamplingParams(max_tokens=2, temperature=0, logit_bias=bias, logprobs=1))
    assert (
        out.text
        == " and and"
        == "".join(lm.stream(FRANCE, SamplingParams(max_tokens=2, temperature=0, logit_bias=bias)))
    )
    assert out.prompt + out.text == lm.tokenizer.decode([*out.prompt_token_ids, *out.token_ids])
    assert [entry[token].decoded_token for token, entry in zip(out.token_ids, out.logprobs, strict=True)] == [
        " and"
    ] * 2
    stopped = SamplingParams(max_tokens=5, temperature=0, logit_bias=bias, stop=[" and"])
    (ended,) = lm.generate([FRANCE], stopped)
    assert (ended.text, len(ended.token_ids), ended.outputs[0].stop_reason) == ("", 1, " and")
    open_ended = [{"role": "user", "content": "a"}, {"role": "assistant", "content": FRANCE}]
    (continued,) = lm.chat(
        open_ended, SamplingParams(max_tokens=1, temperature=0, logit_bias=bias), add_generation_prompt=False,
        continue_final_message=True,
    )  # fmt: skip
    assert continued.text == " and"
