"""Texts of a server over a SentencePiece tokenizer, as Llama 2's: those of `LM`, streamed or not, and their parts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_served import served
from helpers_server import KEYS, Server
from helpers_tokenizers import SMILE, save_model, text_after

from pymllm_interp import LM, SamplingParams

FRANCE = "The capital of France is"
WORDS = f"é{SMILE}\n and a"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("sentencepiece", tmp_path_factory.mktemp("sentencepiece") / "model")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(folder, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


@pytest.fixture(scope="module")
def lm(folder: Path) -> Iterator[LM]:
    with LM(folder, dtype="float32", device="cpu", kv_cache_tokens=4096) as found:
        yield found


def asked(lm: LM, seed: int) -> dict[str, Any]:
    """Random tokens: of some words and characters, or of all."""
    ids = lm.tokenizer(WORDS, add_special_tokens=False)["input_ids"]
    bias = dict.fromkeys(ids, 40.0) if seed % 3 else None
    return {"max_tokens": 20, "temperature": 9.0, "seed": seed, "logit_bias": bias}


def answer(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.client("declared") as client:
        found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def streamed(server: Server, path: str, body: dict[str, Any]) -> str:
    with server.client("declared") as client, client.stream("POST", path, json=body | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_one_text_by_all_ways(server: Server, lm: LM) -> None:
    rng = random.Random(4)
    with LM.connect(server.url, api_key=KEYS["declared"]) as remote:
        for seed in range(2):
            words = rng.choices((SMILE, "é", " and", "a", "\n", "你"), k=5)
            prompt = lm.tokenizer("".join(words))["input_ids"][: rng.randrange(1, 9)]
            given = asked(lm, seed)
            (own,) = lm.generate([prompt], SamplingParams(**given))
            assert own.text == text_after("sentencepiece", lm.tokenizer, prompt, own.token_ids)
            seen = own.text.rstrip("\ufffd")
            for stop in (None, seen[len(seen) // 2 :][:3] or "never"):
                text = own.text if stop is None else own.text.partition(stop)[0]
                params, body = SamplingParams(**given, stop=stop), {"prompt": prompt, "stop": stop, **given}
                assert lm.generate([prompt], params)[0].text == text
                assert remote.generate([prompt], params)[0].text == text == "".join(remote.stream(prompt, params))
                assert remote.submit(prompt, params).result().text == text
                assert answer(server, "/v1/completions", body)["text"] == text
                assert streamed(server, "/v1/completions", body) == text


def test_a_chat_has_one_text(server: Server, lm: LM) -> None:
    messages = [{"role": "user", "content": WORDS}]
    for seed in range(2):
        (own,) = lm.chat(messages, SamplingParams(**asked(lm, seed)))
        body = {"messages": messages, **asked(lm, seed)}
        assert answer(server, "/v1/chat/completions", body)["message"]["content"] == own.text
        assert streamed(server, "/v1/chat/completions", body) == own.text


def test_the_space_behind_the_prompt(server: Server, lm: LM) -> None:
    only = {str(lm.tokenizer.convert_tokens_to_ids("▁and")): 99.0}
    body = {"prompt": FRANCE, "max_tokens": 2, "temperature": 0, "logit_bias": only, "logprobs": 1}
    found = answer(server, "/v1/completions", body)
    assert (found["text"], found["logprobs"]["tokens"]) == (" and and", [" and", " and"])
    assert found["logprobs"]["text_offset"] == [0, 4]
    echoed = answer(server, "/v1/completions", body | {"echo": True})
    assert echoed["text"] == f"{FRANCE} and and"
    assert echoed["logprobs"]["text_offset"][-2:] == [len(FRANCE), len(FRANCE) + 4]
    stopped = answer(server, "/v1/completions", body | {"stop": [" and"]})
    assert (stopped["text"], stopped["stop_reason"]) == ("", " and")
    chat = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": FRANCE}],
        "continue_final_message": True, "max_tokens": 1, "temperature": 0, "logit_bias": only, "logprobs": True,
    }  # fmt: skip
    continued = answer(server, "/v1/chat/completions", chat)
    assert continued["message"]["content"] == " and"
    (entry,) = continued["logprobs"]["content"]
    assert (entry["token"], bytes(entry["bytes"])) == (" and", b" and")


def test_top_logprobs_have_a_key_for_each_token(server: Server, lm: LM) -> None:
    """`a` and `<0x61>` have one text: it is the generated token's, else the likelier one's."""
    vocab, texts = lm.tokenizer.get_vocab(), ("a", "n", "T", "\n")
    twins = {text: (vocab[f"<0x{ord(text):02X}>"], vocab[text]) for text in texts}
    bias = dict.fromkeys([vocab["▁Fran"], *(token for pair in twins.values() for token in pair)], 60.0)
    given = {"max_tokens": 60, "temperature": 2.0, "seed": 1, "logit_bias": bias}
    (own,) = lm.generate([FRANCE], SamplingParams(**given, logprobs=64))
    found = answer(server, "/v1/completions", {"prompt": FRANCE, "logprobs": 64, **given})["logprobs"]
    renamed = 0
    values = zip(own.token_ids, own.logprobs, found["top_logprobs"], found["token_logprobs"], strict=True)
    for token, entry, top, value in values:
        assert len(top) == len(entry)
        assert top[entry[token].decoded_token] == value == pytest.approx(entry[token].logprob, abs=1e-4)
        for pair in twins.values():
            here = [t for t in pair if t in entry]
            if len(here) == 2:
                first = token if token in here else min(here, key=lambda t: entry[t].rank)
                (other,) = {*here} - {first}
                assert top[entry[first].decoded_token] == pytest.approx(entry[first].logprob, abs=1e-4)
                assert top[f"token_id:{other}"] == pytest.approx(entry[other].logprob, abs=1e-4)
                renamed += token == first and entry[other].rank < entry[first].rank
    assert renamed


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": "é"}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], None),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}], [TOOL]),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], []),
        ([{"role": "user", "content": "a", "tool_calls": None}, {"role": "assistant", "tool_calls": []}], None),
    ],
)
def test_a_conversation_is_the_local_one(server: Server, lm: LM, messages: list[Any], tools: list[Any] | None) -> None:
    (own,) = lm.chat(messages, SamplingParams(max_tokens=1), tools=tools)
    body = {"messages": messages, "tools": tools}
    with server.client("declared") as client:
        assert client.post("/tokenize", json=body).json()["tokens"] == own.prompt_token_ids
