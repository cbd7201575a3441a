"""Bodies of requests: what a hostile one costs the HTTP process, before anything of it is served."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_server import KEYS, Server
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from pymllm_interp.server import protocol
from pymllm_interp.server.http.body import MAX_MARKS, parse
from pymllm_interp.server.http.errors import validation_error
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.request_sizes import CallSizes
from pymllm_interp.wire.specs import capture_of, intervention_of

MANY = 20_000
ERRORS = 200
"""Errors of a body, however long it is."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "w1"}]}
STEER = {"op": "steer", "site": "resid_post.0", "vector": [1.0]}
COMPLETION: list[dict[str, Any]] = [
    {"prompt": [{}] * MANY}, {"prompt": ["w1"] * MANY + [1]}, {"prompt": [1] * MANY + ["w1"]}, {"prompt": [[{}]] * MANY},
    {"stop": [1] * MANY}, {"stop_token_ids": ["x"] * MANY}, {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
    {"interventions": [1] * MANY}, {"capture": [1] * MANY}, {f"x{i}": 1 for i in range(MANY)},
    {"interventions": [{f"x{i}": 1 for i in range(MANY)}] * 2000},
]  # fmt: skip
SPECS: list[tuple[str, dict[str, Any]]] = [
    *(("interventions", STEER | field) for field in (
        {"vector": [{}] * MANY}, {"vector": [[{}] * MANY]}, {"vector": [1.0] * MANY + ["x"]}, {"vector": [[1, 2], [3, "x"]]},
        {"vector": {"layers": {str(i): 1 for i in range(MANY)}}}, {"op": "x" * MANY}, {"op": ["steer"] * MANY},
        {"vector": {"dtype": "float32", "shape": ["x"] * MANY, "data": ""}}, {"positions": [True, 4]}, {"op": "nothing"},
        {"positions": ["x"] * MANY}, {"positions": [True] * MANY + [3]}, {"positions": {"range": ["x"] * MANY}},
        {"positions": {"slice": ["x"] * MANY}}, {"heads": ["x"] * MANY}, {f"x{i}": 1 for i in range(MANY)}, {"x" * MANY: 1},
    )),
    ("interventions", {"op": "knockout", "layer": ["x"] * MANY, "from_": 0, "to": 0}),
    ("interventions", {"op": "setfeature", "sae": "x", "features": dict.fromkeys(map(str, range(MANY)), "x")}),
    ("capture", {"site": "embed", "reduce": {"type": "lens", "tokens": ["x"] * MANY}}),
    ("capture", {"site": "embed", "reduce": {"type": ["lens"] * MANY}}), ("capture", {"site": "x" * MANY}),
]  # fmt: skip
TOKENS: dict[str, Any] = {"prompts": [[1]], "params": [None]}
BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *((protocol.CompletionRequest, {"prompt": "w1"} | body) for body in COMPLETION),
    *((protocol.ChatRequest, CHAT | body) for body in (
        {"messages": [{}] * MANY}, {"tools": [1] * MANY}, {"messages": [{f"x{i}": 1 for i in range(MANY)}]},
        {"messages": [{"role": "user", "content": [1] * MANY}]},
    )),
    *((protocol.TokenRequest, TOKENS | body) for body in (
        {"prompts": [{}] * MANY}, {"prompts": [["x"] * MANY]}, {"params": [1] * MANY}, {"interventions": [1] * MANY},
        {"interventions": [[1] * MANY]}, {"captures": [[1] * MANY]}, {"priority": ["x"] * MANY}, {"names": [1] * MANY},
    )),
    (protocol.LensRequest, {"prompt": [{}] * MANY}),
    (protocol.AbortRequest, {"call": 1, "requests": ["x"] * MANY}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_wrong_body_has_few_errors_and_one_short_message(number: int) -> None:
    model, body = BODIES[number]
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() < ERRORS
    error = validation_error(raised.value.errors())
    assert error.status == 400 and len(error.message) < 500, error.message
    assert error.param or "fields" in error.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": ["a", "b", {}]}, r"prompt: .*Expected `str`, got `object` - at `\$\[2\]`"),
        ({"prompt": [[1, 2], [3, "x"]]}, r"prompt: .*Expected `int`, got `str` - at `\$\[1\]\[1\]`"),
        ({"interventions": [STEER] * 2000}, "interventions: 2000 entries; at most 1024"),
    ],
)  # fmt: skip
def test_the_message_says_where_the_wrong_value_is(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        protocol.CompletionRequest.model_validate({"prompt": "w1"} | given)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(validation_error(raised.value.errors()).message)


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_a_wrong_spec_has_one_short_message(number: int) -> None:
    """The engine process reads what is declared: by its sizes first, then by the objects themselves."""
    field, spec = SPECS[number]
    with pytest.raises(PromptError) as raised:
        CallSizes(1, 128).check([[spec]], field)
        (intervention_of if field == "interventions" else capture_of)(spec, f"{field}[0]")
    assert field in str(raised.value) and len(str(raised.value)) < 600, str(raised.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, r"times \["), (b"[" + b"{}," * 100_000 + b"1]", "times {; at most 65536"),
        (b"[" + b"1," * (1 << 22) + b"1,1]", r"4194305 times ,; at most 4194304"), (b"[" + b'"",' * (1 << 20) + b"1]", 'times "'),
        (b"[" * 5000 + b"]" * 5000, "nested too deeply"),
    ],
)  # fmt: skip
def test_bodies_of_too_many_values_are_not_parsed(body: bytes, message: str) -> None:
    with pytest.raises(HTTPException, match=message) as raised:
        parse(body)
    assert raised.value.status_code == 400


def test_long_texts_are_parsed() -> None:
    body = {"prompt": "Some text, with commas, and {brackets}. " * 10_000, "data": "A" * (1 << 22)}
    assert parse(json.dumps(body).encode()) == body and set(MAX_MARKS) == {b"{", b"[", b'"', b","}
    for wrong in (b"{", b"[NaN]", b'{"a": "\xff"}', b'"\\ud800"'):
        with pytest.raises(json.JSONDecodeError):
            parse(wrong)


def test_a_request_is_admitted_before_its_prompts_are_read(server: Server) -> None:
    """A text that cannot fit is refused by name; with too many prompts, or while too many run, it is not looked at."""
    long = {"prompt": "w1 " * 100_000, "max_tokens": 1}
    with server.client("other") as client:
        for path, body, what in (
            ("/v1/completions", long, "the prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long["prompt"]}]}, "messages"),
        ):
            error = client.post(path, json=body).json()["error"]
            assert f"{what} has 3000" in error["message"] and "the 128 tokens of the context" in error["message"], error
        many = client.post("/v1/completions", json=long | {"prompt": [long["prompt"]] * 3, "n": 1000})
        assert many.status_code == 400 and "max_prompts" in many.text
        tokens = client.post("/v1/completions", json={"prompt": [1] * 100_000, "max_tokens": 1})
        assert tokens.status_code == 400 and "100000 tokens" in tokens.text and "max_model_len" in tokens.text
        kept = client.post("/v1/completions", json=long | {"truncate_prompt_tokens": 3, "return_token_ids": True})
        assert kept.status_code == 200 and kept.json()["choices"][0]["prompt_token_ids"] == [1, 1, 1], kept.text
        running = {"prompt": "w1", "n": 256, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=running) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()  # kept: the stream ends with it
            next(lines)
            late = client.post("/v1/completions", json=long)
            assert late.status_code == 429, late.text
    server.wait_until_idle()


def test_hostile_bodies_are_answered_in_openais_shape(server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEYS['declared']}", "Content-Type": "application/json"}
    with server.client(None, headers=headers) as client:
        for body in (
            json.dumps({"prompt": [{}] * 300_000}), "[" * 100_000, json.dumps({"prompt": "w1", "user": [[]] * 100_000}),
            json.dumps({"prompt": "w1", "interventions": [STEER | {"positions": {"range": [0, 10**18]}}]}),
        ):  # fmt: skip
            answer = client.post("/v1/completions", content=body)
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"} and len(answer.text) < 2000
        assert client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200
    server.wait_until_idle()
