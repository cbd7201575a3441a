"""Structured outputs and tools of a server, with the official client: `response_format`, `.parse`, `structured_outputs`, tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from helpers_server import SECONDS, Server, serving
from helpers_structured import byte_tokenizer, ending_bias, save_model
from openai import OpenAI
from pydantic import BaseModel

from pymllm_interp import LM, SamplingParams, StructuredOutputs

pytest.importorskip("xgrammar")
BIAS = {str(token): bias for token, bias in ending_bias(byte_tokenizer()).items()}
MESSAGES = [{"role": "user", "content": "who?"}]


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: int
    email: str | None = None
    friends: list[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_model(tmp_path_factory.mktemp("bytes"))
    options = ("--served-model-name", "tiny", "--device", "cpu")
    with serving(folder, *options, folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="plain-key-0000", timeout=SECONDS, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(4))
def test_parse_returns_the_clients_own_class(api, seed):
    found = api.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, seed=seed, max_tokens=400, logit_bias=BIAS
    )
    (choice,) = found.choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
    assert choice.receipt["masked_argmax"] > 0


def test_a_stream_has_the_same_text(api):
    arguments = dict(model="tiny", messages=MESSAGES, response_format=Person, seed=1, max_tokens=400, logit_bias=BIAS)
    whole = api.chat.completions.parse(**arguments)
    with api.chat.completions.stream(**arguments) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        last = stream.get_final_completion()
    assert (
        "".join(deltas) == whole.choices[0].message.content
        and last.choices[0].message.parsed == whole.choices[0].message.parsed
    )


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}}, r"-?\d+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "a{3}b*"}}, "a{3}b*"),
        ({"structured_outputs": {"grammar": 'root ::= "q" | "r"'}}, "q|r"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "hi"}}}, "hi"),
    ],
)  # fmt: skip
def test_forms_of_completions_and_chats(api, form, pattern):
    more = {"max_tokens": 200, "seed": 3, "logit_bias": BIAS, "n": 2, "extra_body": form}
    text = api.completions.create(model="tiny", prompt="x", **more)
    chat = api.chat.completions.create(model="tiny", messages=MESSAGES, **more)
    found = [c.text for c in text.choices if c.finish_reason == "stop"]
    found += [c.message.content for c in chat.choices if c.finish_reason == "stop"]
    assert found and all(re.fullmatch(pattern, one, re.DOTALL) for one in found)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "go together"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "two constraints"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "got regex and choice"),
        ({"structured_outputs": {"regex": "(("}}, "Regex parsing error"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "no token can begin"),
        ({"structured_outputs": {"json": {"type": "string", "not": {}}}}, "'not' is not supported"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "disable_any_whitespace"),
        ({"guided_json": {"type": "object"}}, "guided_json: it is not supported: use structured_outputs, with json"),
        ({"guided_regex": "a"}, "guided_regex: it is not supported: use structured_outputs, with regex"),
    ],
)  # fmt: skip
def test_forms_that_cannot_be_are_a_400(api, form, message):
    with pytest.raises(openai.BadRequestError, match=message):
        api.completions.create(model="tiny", prompt="x", extra_body=form)


def test_a_connected_lm_sends_forms(server):
    lm = LM.connect(server.url, api_key="declared-key-0000")
    try:
        for form in (StructuredOutputs(choice=["yes", "no"]), StructuredOutputs(json={"enum": ["yes", "no"]})):
            params = SamplingParams(structured_outputs=form, max_tokens=9, seed=1)
            (found,) = lm.generate(["x"], params, interventions=[])
            assert found.text.strip('"') in ("yes", "no")
            assert found.outputs[0].receipt.masked_argmax > 0
    finally:
        lm.shutdown()
