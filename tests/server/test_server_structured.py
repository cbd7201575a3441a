"""Structured outputs and tools of a server, with the official client: `response_format`, `.parse`, `structured_outputs`, tools."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from helpers_served import served
from helpers_server import SECONDS, Server
from helpers_structured import byte_tokenizer, ending_bias, save_model
from openai import OpenAI
from pydantic import BaseModel

from pymllm_interp import LM, SamplingParams
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.engine.grammars import grammars
from pymllm_interp.sampling import StructuredOutputs
from pymllm_interp.server.process.engine_server import SUBMITTERS, EngineServer
from pymllm_interp.server.process.outbox import Outbox
from pymllm_interp.server.process.served_model import ServedModel
from pymllm_interp.wire import messages as m

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
    with served(folder, *options, folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="plain-key-0000", timeout=SECONDS, max_retries=0) as client:
        yield client


def test_parse_returns_the_clients_own_class(api):
    found = api.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, seed=1, max_tokens=400, logit_bias=BIAS
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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"min_tokens": 9}, r"structured_outputs \(choice\) forbids token \d+: min_tokens=9 may forbid all tokens"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids may forbid"),
    ],
)  # fmt: skip
def test_a_choice_that_other_parameters_forbid_is_a_400(api, more, message):
    form = {"structured_outputs": {"choice": ["yes", "no"]}, **more}
    for stream in (False, True):
        with pytest.raises(openai.APIError, match=message) as caught:
            found = api.completions.create(model="tiny", prompt="x", max_tokens=20, stream=stream, extra_body=form)
            list(found)
        assert caught.value.body["code"] == "constraint_failed"  # pyright: ignore
        assert stream or isinstance(caught.value, openai.BadRequestError)


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


# -- tools -----------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "of a test",
            "parameters": {"type": "object", "properties": {key: schema}, "required": [key]},
        },
    }
    for name, key, schema in (
        ("get_weather", "unit", {"enum": ["C", "F"]}),
        ("add", "n", {"type": "integer", "minimum": 0, "maximum": 99}),
    )
]
EXPECTED = {"get_weather": {"unit"}, "add": {"n"}}
ADD: Any = {"type": "function", "function": {"name": "add"}}
FORMATS = ["hermes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3_json", "mistral", "openai"))]


@pytest.fixture(scope="module", params=FORMATS)
def tools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A server with a format of tool calls."""
    folder = save_model(tmp_path_factory.mktemp("bytes"))
    options = ("--served-model-name", "tiny", "--device", "cpu", "--tool-call-parser", request.param)
    with (
        served(folder, *options, folder=folder) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="plain-key-0000", timeout=SECONDS, max_retries=0) as client,
    ):
        yield client


def arguments(seed: int, **more) -> dict:
    return dict(model="tiny", messages=MESSAGES, tools=TOOLS, seed=seed, max_tokens=500, logit_bias=BIAS) | more


@pytest.mark.parametrize(
    ("choice", "several"),
    [
        ("required", True), (ADD, False), pytest.param("required", False, marks=pytest.mark.slow),
        pytest.param(ADD, True, marks=pytest.mark.slow),
    ],
    ids=["required-several", "named-one", "required-one", "named-several"],
)  # fmt: skip
def test_required_calls_come_and_have_valid_arguments(tools, choice, several):
    counts = []
    for seed in range(2):
        asked = arguments(seed, tool_choice=choice, parallel_tool_calls=several)
        (choice_,) = tools.chat.completions.create(**asked).choices
        if choice_.finish_reason == "length":
            continue
        assert choice_.finish_reason == "tool_calls" and not choice_.message.content
        for call in choice_.message.tool_calls:
            assert call.type == "function" and call.id
            assert json.loads(call.function.arguments).keys() == EXPECTED[call.function.name]
            assert choice == "required" or call.function.name == "add"
        counts.append(len(choice_.message.tool_calls))
        with tools.chat.completions.stream(**asked) as stream:
            events = list(stream)
            last = stream.get_final_completion().choices[0]
        assert last.finish_reason == "tool_calls"
        assert [(c.function.name, c.function.arguments) for c in last.message.tool_calls] == [
            (c.function.name, c.function.arguments) for c in choice_.message.tool_calls
        ]
        assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 1, "as they come"
    assert counts and (several or set(counts) == {1})


def test_a_text_without_calls_is_content(tools):
    asked = arguments(1, max_tokens=20, tool_choice="auto", temperature=0)
    (choice,) = tools.chat.completions.create(**asked).choices
    plain = tools.chat.completions.create(**arguments(1, max_tokens=20, tool_choice="none", temperature=0))
    assert choice.message.tool_calls is None and isinstance(choice.message.content, str)
    assert plain.choices[0].message.tool_calls is None


def test_a_conversation_with_calls_renders(tools):
    """OpenAI's second turn: content null, arguments as text, and the tool's answer."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": 3}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    more = {"extra_body": {"return_token_ids": True}}
    found = tools.chat.completions.create(**arguments(1, messages=messages, max_tokens=3), **more)
    text = byte_tokenizer().decode(found.prompt_token_ids)
    assert (
        '<tool_call>{"arguments": {"n": 3}, "name": "add"}' in text or '{"name": "add", "arguments": {"n": 3}}' in text
    )
    assert "None" not in text
    call["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="are not JSON"):
        tools.chat.completions.create(**arguments(1, messages=messages))


def test_choices_that_cannot_be_are_a_400(tools, api):
    named = {"type": "function", "function": {"name": "nothing"}}
    for client, more, message in (
        (tools, {"tool_choice": named}, "there is no tool 'nothing'"),
        (tools, {"tool_choice": "required", "tools": []}, "the request has no tools"),
        (tools, {"tool_choice": "required", "response_format": {"type": "json_object"}}, "two constraints"),
        (tools, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        (api, {"tool_choice": "required"}, "--tool-call-parser"),
        (api, {"parallel_tool_calls": False}, "--tool-call-parser"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**arguments(1, **more))


def chat_model(client: OpenAI) -> Any:
    """LangChain's chat model over the client's server."""
    langchain_openai = pytest.importorskip("langchain_openai")
    bias = {int(token): value for token, value in BIAS.items()}
    return langchain_openai.ChatOpenAI(
        model="tiny", base_url=str(client.base_url), api_key=client.api_key, seed=1, max_tokens=500, logit_bias=bias,
        max_retries=0,
    )  # fmt: skip


def test_langchain_with_structured_output(api):
    found = chat_model(api).with_structured_output(Person, method="json_schema").invoke("who?")
    assert isinstance(found, Person)


def test_langchain_calls_tools(tools):
    class Add(BaseModel):
        """Add a number."""

        n: Literal[1, 2, 3]

    model = chat_model(tools)
    assert isinstance(model.with_structured_output(Add, method="function_calling").invoke("add"), Add)
    (call,) = model.bind_tools([Add], tool_choice="Add", parallel_tool_calls=False).invoke("add").tool_calls
    assert call["name"] == "Add" and call["args"]["n"] in (1, 2, 3)


@pytest.mark.slow
def test_reasoning_is_split_off(tmp_path):
    options = ("--served-model-name", "tiny", "--device", "cpu", "--reasoning-parser", "deepseek_r1")
    asked = dict(model="tiny", messages=MESSAGES, seed=1, max_tokens=20)
    with (
        served(save_model(tmp_path), *options, folder=tmp_path) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="plain-key-0000", timeout=SECONDS, max_retries=0) as client,
    ):
        (choice,) = client.chat.completions.create(**asked).choices
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert choice.message.content == "" and choice.message.reasoning, "its text has no </think>"
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == choice.message.reasoning


# -- the engine process ------------------------------------------------------------------


@pytest.mark.local
def test_only_the_requests_of_a_grammar_wait_for_it(tmp_path, monkeypatch):
    """More grammars than there are submitting threads are compiled: a plain call passes them, and an abort reaches them."""
    release, compiled = threading.Event(), grammars._compiled

    def slow(compiler: Any, spec: StructuredOutputs) -> Any:
        assert release.wait(SECONDS)
        return compiled(compiler, spec)

    monkeypatch.setattr(grammars, "_compiled", slow)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", SECONDS)
    config = ModelConfig(model=str(save_model(tmp_path)), dtype="float32")
    served = ServedModel(config, ServerConfig(device="cpu", kv_cache_tokens=2048))
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outbox = Outbox(lambda found: [sent.put(one) for one in found], tmp_path, 1 << 20)
    server = EngineServer(served, outbox)
    try:
        waiting = SUBMITTERS + 2
        for call in range(waiting):
            server.handle(m.Submit(call, "", [[3]], [{"structured_outputs": {"regex": f"a{{{call + 1}}}"}}]))
        server.handle(m.Submit(99, "", [[3]], [{"max_tokens": 2}]))
        assert [sent.get(timeout=SECONDS).call for _ in range(2)] == [99, 99]
        server.handle(m.Abort(0))
        release.set()
        ends = [one for _ in range(2 * waiting) if isinstance(one := sent.get(timeout=SECONDS), m.Finished)]
        assert {end.call: end.finish_reason for end in ends} == {0: "abort"} | dict.fromkeys(range(1, waiting), "stop")
    finally:
        release.set()
        server.close()
        served.engine.shutdown()
        outbox.close()
