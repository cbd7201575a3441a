"""Tokens that are parts of characters: an event for each, and their bytes, texts and offsets as OpenAI has them."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterator

import httpx
import pytest
from helpers_served import served
from helpers_server import KEYS, Server
from helpers_tokenizers import SMILE, YOU, byte_level, save_model
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pymllm_interp.server.routes.openai_format import TextSoFar, token_bytes, token_word


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = save_model("byte-level", tmp_path_factory.mktemp("bytes"))
    with served(folder, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


@pytest.fixture(scope="module")
def api(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["declared"], max_retries=0)


def bias(*texts: str) -> dict[str, float]:
    """Only the tokens of these texts are sampled, each about as often."""
    return {str(token): 90.0 for text in texts for token in byte_level()(text)["input_ids"]}


def arguments(seed: int = 1, **more) -> dict:
    return {
        "model": "bytes0", "max_tokens": 60, "temperature": 8.0, "seed": seed, "logit_bias": bias(SMILE, YOU, "a"), **more
    }  # fmt: skip


@pytest.fixture(scope="module")
def name(api) -> str:
    return api.models.list().data[0].id


def test_single_tokens_have_their_own_bytes():
    tokenizer = byte_level()
    for text in (SMILE, YOU, "a", " ", "é", "\n", "\ufffd"):
        ids = tokenizer(text)["input_ids"]
        assert b"".join(token_bytes(tokenizer, token) for token in ids) == text.encode()
    first, last = tokenizer(SMILE)["input_ids"]
    assert token_word(token_bytes(tokenizer, first)) == "\\xf0\\x9f"
    assert token_word(token_bytes(tokenizer, last), "bytes:") == "bytes:\\x98\\x80"
    assert token_word(b" a\xf0") == " a\\xf0"
    fallback = Tokenizer(models.BPE(vocab={"<0xF0>": 0, "a": 1}, merges=[], byte_fallback=True))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fallback)
    assert (token_bytes(wrapped, 0), token_bytes(wrapped, 1), token_bytes(None, 7)) == (b"\xf0", b"a", b"7")


def test_offsets_count_whole_characters():
    tokenizer = byte_level()
    text = TextSoFar(tokenizer, True, [])
    assert [text.add(token) for token in tokenizer(f"a{SMILE}{YOU}b")["input_ids"]] == [0, 1, 1, 2, 2, 2, 3]


def test_a_completion_of_split_characters(api, name):
    choice = api.completions.create(prompt="ab", logprobs=2, **arguments(model=name)).choices[0]
    check_completion(choice.text, choice.logprobs.tokens, choice.logprobs.text_offset)
    assert {"bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "bytes:\\xe4", "a"} <= set(choice.logprobs.tokens)
    assert SMILE in choice.text


def check_completion(text: str, tokens: list[str], offsets: list[int]) -> None:
    """Each token's bytes, and where it begins: the characters of the text of all tokens before it."""
    assert len(tokens) == len(offsets) == 60
    own = [
        token.removeprefix("bytes:").encode("latin-1").decode("unicode_escape").encode("latin-1")
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    ]
    assert b"".join(own).decode(errors="replace") == text
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    decoder = getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(part)) for part in own]
    assert offsets == [sum(lengths[:i]) for i in range(60)]


def events(server: Server, path: str, body: dict) -> list[dict]:
    with server.client("declared") as client, client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_a_stream_has_an_event_for_each_token(server, api, name):
    body = {"prompt": "ab", "logprobs": 1, "return_token_ids": True, **arguments(model=name)}
    whole = api.completions.create(
        prompt="ab", logprobs=1, extra_body={"return_token_ids": True}, **arguments(model=name)
    )
    found = events(server, "/v1/completions", body)
    assert [event["token_ids"] for event in found] == [[token] for token in whole.choices[0].token_ids]
    assert "".join(event["text"] for event in found) == whole.choices[0].text
    assert any(event["text"] == "" for event in found[:-1])
    logprobs = whole.choices[0].logprobs
    assert [event["logprobs"]["tokens"] for event in found] == [[token] for token in logprobs.tokens]
    assert [event["logprobs"]["text_offset"] for event in found] == [[offset] for offset in logprobs.text_offset]
    assert [event["finish_reason"] for event in found] == [None] * 59 + ["length"]


def test_a_chat_has_the_bytes_of_each_token(server, api, name):
    body = {
        "messages": [{"role": "user", "content": "ab"}],
        "logprobs": True,
        "top_logprobs": 1,
        **arguments(model=name),
    }
    choice = api.chat.completions.create(**body).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 60
    assert bytes(byte for entry in entries for byte in entry.bytes).decode(errors="replace") == choice.message.content
    parts = {entry.token: bytes(entry.bytes) for entry in entries}
    assert parts["\\xf0\\x9f"] == b"\xf0\x9f" and parts["\\xe4"] == b"\xe4" and parts["a"] == b"a"
    found = events(server, "/v1/chat/completions", body)
    assert found[0]["delta"] == {"role": "assistant", "content": ""} and len(found) == 61
    assert "".join(event["delta"]["content"] for event in found) == choice.message.content
    streamed = [entry["bytes"] for event in found[1:] for entry in event["logprobs"]["content"]]
    assert streamed == [entry.bytes for entry in entries]


def test_text_that_a_stop_string_holds_back_has_events(server, api, name):
    """The stop string never comes, and what may begin it is sent once that is known."""
    body = {
        "prompt": "ab",
        "stop": "aaaaaaaa",
        "return_token_ids": True,
        **arguments(model=name, logit_bias=bias("ab")),
    }
    found = events(server, "/v1/completions", body)
    assert [len(event["token_ids"]) for event in found] == [1] * len(found)
    assert any(event["text"] == "" for event in found[:-1]) and any(len(event["text"]) > 1 for event in found)
    whole = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS['declared']}"}, timeout=60
    )
    assert "".join(event["text"] for event in found) == whole.json()["choices"][0]["text"]
