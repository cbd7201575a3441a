"""`/v1/responses` with the official client: texts, events, tools, forms, what is kept, and what is refused."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_type_hints

import httpx
import openai
import pytest
from helpers_served import served
from helpers_server import KEYS, SECONDS, Server, serving
from helpers_structured import byte_tokenizer, ending_bias, save_model
from openai import OpenAI
from openai.types.responses import response_create_params
from pydantic import BaseModel

from pymllm_interp.server.http.errors import ApiError
from pymllm_interp.server.responses.output import OutputItems
from pymllm_interp.server.responses.request import ResponsesRequest
from pymllm_interp.server.responses.store import OVERHEAD, ResponseStore
from pymllm_interp.server.routes.refused_fields import OF_RESPONSES
from pymllm_interp.server.settings import ServeLimits
from pymllm_interp.server.tools.messages import MessageParser

INPUT = "w3 w14 w15"
ENDINGS = ("response.completed", "response.incomplete", "response.failed")


def client_of(server: Server, key: str = "declared") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[key], timeout=SECONDS, max_retries=0)


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def name(api: OpenAI) -> str:
    return api.models.list().data[0].id


def events_of(client: OpenAI, **asked: Any) -> list[Any]:
    """The events of a stream, with their numbers checked."""
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type in ENDINGS and all(event.type not in ENDINGS for event in events[:-1])
    return events


def runs_of(events: list[Any]) -> list[str]:
    """Types of events without the prefix, repeated ones once."""
    types = [event.type.removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(types) if i == 0 or kind != types[i - 1]]


def shown(response: Any) -> list[Any]:
    """What an output says, without its ids."""
    return [
        (item.type, item.status, getattr(item, "name", None), getattr(item, "arguments", None))
        if item.type == "function_call"
        else (item.type, item.status, *(part.text for part in item.content))
        for item in response.output
    ]


# -- texts ---------------------------------------------------------------------------------


def test_a_response_is_the_chats_answer(api, name):
    sampling = {"temperature": 0.7, "top_p": 0.9, "extra_body": {"seed": 3}}
    items = [
        {"role": "developer", "content": "w1"},
        {"role": "user", "content": [{"type": "input_text", "text": "w4"}, {"type": "input_text", "text": " w5"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w6", "annotations": []}]},
        {"role": "user", "content": "w7"},
    ]
    roles = ("system", "system", "user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, ("w9", "w1", "w4 w5", "w6", "w7"), strict=True)]
    found = api.responses.create(model=name, input=items, instructions="w9", max_output_tokens=7, **sampling)
    chat = api.chat.completions.create(model=name, messages=messages, max_completion_tokens=7, **sampling)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens and found.usage.output_tokens == 7
    assert found.usage.total_tokens == chat.usage.total_tokens
    assert (found.object, found.instructions, found.temperature, found.top_p) == ("response", "w9", 0.7, 0.9)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in found.output] == ["incomplete"]


def test_a_stream_has_the_events_of_openai_in_their_order(api, name):
    asked = {"model": name, "input": INPUT, "max_output_tokens": 6, "temperature": 0}
    whole = api.responses.create(**asked)
    events = events_of(api, **asked)
    assert runs_of(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert shown(events[-1].response) == shown(whole)
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == 6
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    end = {"stop": whole.output_text[-2:]}
    (*_, last) = events_of(api, **asked, extra_body=end)
    assert last.type == "response.completed" and last.response.completed_at
    with api.responses.stream(**asked, extra_body=end) as stream:
        deltas = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == deltas[-1] == last.response.output_text
    assert api.responses.create(**asked, extra_body=end).output_text == last.response.output_text


def test_an_empty_text_is_a_message(api, name):
    (*_, last) = events_of(api, model=name, input=INPUT, max_output_tokens=0)
    assert shown(last.response) == [("message", "incomplete", "")]


def test_log_probabilities_are_the_chats(api, name):
    asked = {"model": name, "temperature": 0, "top_logprobs": 2}
    include: Any = ["message.output_text.logprobs"]
    found = api.responses.create(input=INPUT, max_output_tokens=4, include=include, **asked)
    messages: Any = [{"role": "user", "content": INPUT}]
    chat = api.chat.completions.create(messages=messages, max_tokens=4, logprobs=True, **asked).choices[0]
    events = events_of(api, input=INPUT, max_output_tokens=4, include=include, **asked)
    expected = [(one.token, one.logprob, len(one.top_logprobs)) for one in chat.logprobs.content]
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    for logprobs in (found.output[0].content[0].logprobs, streamed):
        assert [(one.token, one.logprob, len(one.top_logprobs)) for one in logprobs] == expected


def test_interventions_captures_and_receipts(api, name, server):
    body = {"interventions": [{"op": "scale", "site": "resid_post.1", "factor": 1.5}], "capture": ["resid_post.2"]}
    asked = {"model": name, "input": INPUT, "max_output_tokens": 4, "temperature": 0}
    found = api.responses.create(**asked, extra_body=body)
    messages: Any = [{"role": "user", "content": INPUT}]
    chat = api.chat.completions.create(model=name, messages=messages, max_tokens=4, temperature=0, extra_body=body)
    (choice,) = chat.choices
    assert found.output_text == choice.message.content
    assert found.receipt["interventions"] == choice.receipt["interventions"]
    assert found.activations["sites"] == choice.activations["sites"] and found.activations["data"]
    streamed = events_of(api, **asked, extra_body=body)[-1].response.activations
    assert streamed["sites"] == found.activations["sites"] and len(streamed["data"]) == len(found.activations["data"])
    assert not hasattr(api.responses.retrieve(found.id), "activations"), "captured states are not kept"
    with client_of(server, "plain") as plain, pytest.raises(openai.PermissionDeniedError):
        plain.responses.create(**asked, extra_body=body)


# -- what is kept --------------------------------------------------------------------------


def test_a_response_is_continued_fetched_and_deleted(api, name, server):
    first = api.responses.create(model=name, input="w4", instructions="w9", max_output_tokens=3, temperature=0)
    asked: Any = {"model": name, "input": "w5", "max_output_tokens": 5, "temperature": 0}
    second = api.responses.create(**asked, previous_response_id=first.id)
    texts = (("user", "w4"), ("assistant", first.output_text), ("user", "w5"))
    messages: Any = [{"role": role, "content": text} for role, text in texts]
    chat = api.chat.completions.create(model=name, messages=messages, max_tokens=5, temperature=0)
    assert second.output_text == chat.choices[0].message.content, "instructions are of one response"
    assert second.usage.input_tokens == chat.usage.prompt_tokens and second.previous_response_id == first.id
    sent = api.responses.create(
        **asked | {"input": [{"role": "user", "content": "w4"}, *first.output, texts_item("w5")]}
    )
    assert sent.output_text == second.output_text, "the client sends the items instead"
    assert api.responses.retrieve(first.id) == first
    with client_of(server, "code") as other:
        for call in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no response"):
                call(first.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            other.responses.create(**asked, previous_response_id=first.id)
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)
    third = api.responses.create(**asked, previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens, "it has the conversation of the deleted one"


def texts_item(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_what_is_not_stored_is_not_kept(api, name, server):
    before = server.metric("responses")
    found = api.responses.create(model=name, input=INPUT, max_output_tokens=2, store=False)
    assert found.store is False
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(found.id)
    assert server.metric("responses") == before


def test_the_store_is_bounded_and_gives_its_memory_back():
    now = [0.0]
    limits = ServeLimits(
        max_responses=50, max_response_bytes_per_key=100_000, max_response_bytes=250_000, response_seconds=10
    )
    store = ResponseStore(limits, lambda: now[0])
    tracemalloc.start()
    try:
        start, most = tracemalloc.get_traced_memory()[0], 0
        for i in range(10_000):
            owner = f"key {i % 7}"
            assert store.keep(owner, f"resp_{i}", bytes(10 + i % 3000), bytes(i % 5000))
            assert store.num_bytes <= 250_000 and store.num_responses <= 7 * 50
            assert store.find(owner, f"resp_{i}")
            most = max(most, tracemalloc.get_traced_memory()[0] - start)
            now[0] += 0.01
        assert most < 500_000
        now[0] += 10
        store.sweep()
        assert store.num_bytes == store.num_responses == 0 and not store._kept and not store._bytes
        assert tracemalloc.get_traced_memory()[0] - start < 20_000
    finally:
        tracemalloc.stop()


def test_a_key_that_keeps_much_pushes_out_its_own_first():
    size = 1000 + OVERHEAD
    limits = ServeLimits(max_responses=3, max_response_bytes_per_key=4 * size, max_response_bytes=4 * size)
    store = ResponseStore(limits)
    store.keep("small", "a", bytes(1000), b"")
    for i in range(9):
        assert store.keep("large", f"{i}", bytes(500), bytes(500))
    assert store.find("small", "a") and store.find("large", "6") and store.num_responses == 4
    with pytest.raises(ApiError, match="no response '5'"):
        store.find("large", "5")
    assert store.keep("other", "b", bytes(1000), b"") and store.find("small", "a"), "the largest holder's go first"
    assert not store.keep("large", "x", bytes(4 * size), b"")
    store.drop("small", "a")
    with pytest.raises(ApiError):
        store.drop("small", "a")


# -- forms, tools and reasoning ----------------------------------------------------------------


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: int


TOOLS: Any = [
    {
        "type": "function",
        "name": "add",
        "description": "of a test",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]},
    }
]
BIAS = {str(token): bias for token, bias in ending_bias(byte_tokenizer()).items()}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with formats of calls and reasoning, small stores, and no room for captured states."""
    pytest.importorskip("xgrammar")
    folder: Path = save_model(tmp_path_factory.mktemp("bytes"))
    options = [
        "--served-model-name",
        "tiny",
        "--device",
        "cpu",
        "--tool-call-parser",
        "hermes",
        "--reasoning-parser",
        "qwen3",
    ]
    options += ["--max-response-bytes-per-key", "40000", "--inline-bytes", "1", "--max-store-bytes-per-key", "1"]
    with served(folder, *options, folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def tools(tool_server: Server) -> Iterator[OpenAI]:
    with client_of(tool_server) as client:
        yield client


def asked(seed: int, bias: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    body = {"seed": seed, "logit_bias": BIAS | (bias or {}), **more.pop("extra_body", {})}
    return {"model": "tiny", "input": "who?", "max_output_tokens": 300, "extra_body": body} | more


def token(text: str) -> str:
    return str(byte_tokenizer().get_vocab()[text])


NO_THOUGHT = {token("<"): -60.0}


def test_parse_returns_the_clients_own_class(tools):
    found = tools.responses.parse(**asked(1, NO_THOUGHT), text_format=Person)
    assert found.status == "completed" and isinstance(found.output_parsed, Person)
    assert found.receipt["masked_argmax"] > 0 and found.text.format.type == "json_schema"
    with tools.responses.stream(**asked(1, NO_THOUGHT), text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed
    form: Any = {"format": {"type": "json_object"}}
    text = tools.responses.create(**asked(2, NO_THOUGHT), text=form)
    assert text.status == "incomplete" or isinstance(json.loads(text.output_text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}], ids=["required", "named"])
def test_calls_come_are_streamed_and_answered(tools, choice):
    more = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    found = tools.responses.create(**asked(2, NO_THOUGHT, **more))
    (call,) = found.output
    assert (call.type, call.name, call.status, found.status) == ("function_call", "add", "completed", "completed")
    assert json.loads(call.arguments)["n"] in (1, 2, 3) and call.call_id
    events = events_of(tools, **asked(2, NO_THOUGHT, **more))
    assert runs_of(events) == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert shown(events[-1].response) == shown(found)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1 and "".join(deltas) == call.arguments
    with tools.responses.stream(**asked(2, NO_THOUGHT, **more)) as stream:
        assert shown(stream.get_final_response()) == shown(found)

    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    turn: Any = asked(3, tools=TOOLS, tool_choice="none", max_output_tokens=9)
    after = tools.responses.create(**turn | {"input": [answer], "previous_response_id": found.id})
    sent = tools.responses.create(**turn | {"input": [texts_item("who?"), call, answer]})
    function = {"name": "add", "arguments": call.arguments}
    messages: Any = [
        texts_item("who?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "4"},
    ]
    chat_tools: Any = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
    chat = tools.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=chat_tools,
        tool_choice="none",
        max_tokens=9,
        extra_body=turn["extra_body"],
    )
    assert after.output_text == sent.output_text == chat.choices[0].message.content
    assert after.usage.input_tokens == sent.usage.input_tokens == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="no function_call with the call_id 'call_9'"):
        tools.responses.create(**turn | {"input": [answer | {"call_id": "call_9"}], "previous_response_id": found.id})


def test_a_call_may_have_any_name(tools):
    """What the model writes is no error: the name of no tool, and one with half of a surrogate pair, which is no call."""
    form = {"regex": '<tool_call>\\{"name": "\\\\ud800a{200}", "arguments": \\{"n": 1\\}\\}</tool_call>'}
    more: Any = asked(1, {token("h"): -60.0}, extra_body={"structured_outputs": form})
    (item,) = tools.responses.create(**more, tools=TOOLS).output
    assert item.type == "message" and item.content[0].text.startswith('<tool_call>{"name": "\\ud800aaa')
    form["regex"] = form["regex"].replace("\\\\ud800", "z")
    found = tools.responses.create(**more, tools=TOOLS)
    assert shown(found) == [("function_call", "completed", "z" + "a" * 200, '{"n": 1}')]
    assert tools.responses.retrieve(found.id).output == found.output
    chat_tools: Any = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
    chat = tools.chat.completions.create(
        model="tiny", messages=[texts_item("who?")], tools=chat_tools, max_tokens=300, extra_body=more["extra_body"]
    )
    assert chat.choices[0].message.tool_calls[0].function.name == found.output[0].name
    answer: Any = {"type": "function_call_output", "call_id": found.output[0].call_id, "output": "4"}
    after = tools.responses.create(
        **asked(1, max_output_tokens=1) | {"input": [answer], "previous_response_id": found.id}
    )
    assert (after.status, after.usage.output_tokens) == ("incomplete", 1)


def test_reasoning_is_an_item(tools):
    think: Any = asked(1, {token("<"): 60.0}, text={"format": {"type": "json_object"}}, max_output_tokens=30)
    found, events = tools.responses.create(**think), events_of(tools, **think)
    (item,) = found.output
    assert (item.type, item.status, found.status) == ("reasoning", "incomplete", "incomplete")
    assert item.content[0].text and 0 < found.usage.output_tokens_details.reasoning_tokens <= 30
    assert runs_of(events)[2:-1] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    assert shown(events[-1].response) == shown(found)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_items_stand_in_the_order_of_the_text(size):
    """Reasoning, a text and two calls, however the text is cut."""
    text = "<think>why</think>so<tool_call>\n" + '{"name": "add", "arguments": {"n": 1}}\n</tool_call>\n' * 1
    text += '<tool_call>{"name": "add", "arguments": {"n": 2}}</tool_call>'
    for several in (True, False):
        parser = MessageParser("hermes", ["add"], "qwen3", False, several)
        output, events = OutputItems(parser.call_id), []
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            events += output.push(parser.parts(piece, ended=start + size >= len(text)))
        events += output.end(complete=True)
        found = [(item["type"], item.get("arguments") or item["content"][0]["text"]) for item in output.items]
        calls = [("function_call", '{"n": 1}'), ("function_call", '{"n": 2}')][: 2 if several else 1]
        assert found == [("reasoning", "why"), ("message", "so"), *calls]
        assert {item["status"] for item in output.items} == {"completed"}
        assert len({item["call_id"] for item in output.items[2:]}) == len(calls)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == len(found)
        assert kinds.count("content_part.added") == kinds.count("content_part.done") == 2
        assert [e["output_index"] for e in events] == sorted(e["output_index"] for e in events)


def test_a_failure_ends_the_stream_with_an_event(tools):
    more = asked(1, extra_body={"capture": ["resid_post.*"]}, max_output_tokens=4)
    last = events_of(tools, **more)[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert (
        last.response.error.code == "rate_limit_exceeded" and "max_store_bytes_per_key" in last.response.error.message
    )
    with pytest.raises(openai.NotFoundError):
        tools.responses.retrieve(last.response.id)
    with pytest.raises(openai.RateLimitError, match="max_store_bytes_per_key"):
        tools.responses.create(**more)


def test_a_stream_that_nobody_reads_to_its_end_is_not_kept(tools, tool_server):
    before = tool_server.metric("responses")
    with tools.responses.create(
        **asked(1, extra_body={"ignore_eos": True}, max_output_tokens=900), stream=True
    ) as stream:
        next(iter(stream))
    tool_server.wait_until_idle()
    assert tool_server.metric("responses") == before


def test_a_response_that_is_too_large_to_keep_says_so(tools):
    large: Any = [TOOLS[0] | {"description": "x" * 40_000}]
    found = tools.responses.create(**asked(1, max_output_tokens=1), tools=large, tool_choice="none")
    assert found.store is False and "max_response_bytes_per_key" in found.warnings[0]
    assert tools.responses.create(**asked(1, max_output_tokens=1)).store is True


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"background": True}, "background: a response is made while its client waits"),
        ({"conversation": "conv_1"}, "conversation: .*previous_response_id"),
        ({"truncation": "auto"}, "truncation: .*truncate_prompt_tokens"),
        ({"prompt": {"id": "p"}}, "prompt: .*instructions"),
        ({"reasoning": {"effort": "high"}}, "reasoning: .*chat_template_kwargs"),
        ({"max_tokens": 3}, "use max_output_tokens"),
        ({"messages": []}, "messages: use input"),
        ({"n": 2}, "n: a response is one"),
        ({"response_format": {"type": "json_object"}}, "response_format: use text, with format"),
        ({"max_tool_calls": 1}, "built-in tools"),
        ({"include": ["reasoning.encrypted_content"]}, "include: 'reasoning.encrypted_content' is not served"),
        ({"top_logprobs": 2}, "top_logprobs needs include"),
        ({"tools": [{"type": "web_search"}]}, "tools: 'web_search' is not served"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice: 'file_search' is not served"),
        ({"tool_choice": "required"}, "tool_choice: the request has no tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "needs name and schema"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0: items are not kept by id"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call' are not served"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "the model reads text only"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "'input_file' are not served"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "no function_call with the call_id 'c'"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "it has no message"),
        ({"input": [{"role": "king", "content": "x"}]}, "role"),
        ({"previous_response_id": "resp_1"}, "no response 'resp_1' of this key"),
        ({"nonsense": 1}, "unknown field"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(api, name, fields, message):
    kind = openai.NotFoundError if "previous_response_id" in fields else openai.BadRequestError
    with pytest.raises(kind, match=message):
        api.responses.create(**{"model": name, "input": INPUT, "extra_body": fields})


def test_queries_are_refused(api, name, server):
    found = api.responses.create(model=name, input=INPUT, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="fetched as a whole"):
        api.responses.retrieve(found.id, stream=True)


def test_all_neutral_values_pass(api, name):
    neutral = {field: value for field, refused in OF_RESPONSES.items() for value in (None, *refused.neutral)}
    sent = {field: value for field, value in neutral.items() if field not in ResponsesRequest.model_fields}
    assert len(sent) > 50
    half = len(sent) // 2  # an object has at most 64 fields
    for fields in (dict(list(sent.items())[:half]), dict(list(sent.items())[half:])):
        found = api.responses.create(model=name, input=INPUT, max_output_tokens=1, extra_body=fields)
        assert found.status == "incomplete"


def test_every_field_of_the_openai_client_is_known():
    names = get_type_hints(response_create_params.ResponseCreateParamsStreaming)
    assert names and not names.keys() - ResponsesRequest.model_fields.keys() - OF_RESPONSES.keys()


def test_the_document_has_the_routes(server):
    paths = httpx.get(f"{server.url}/openapi.json", timeout=SECONDS).json()["paths"]
    assert paths["/v1/responses"].keys() == {"post"}
    assert paths["/v1/responses/{response_id}"].keys() == {"get", "delete"}


@pytest.mark.slow
def test_memory_is_where_it_started_after_ten_thousand_requests(tmp_path):
    """The HTTP process, whose store forgets old responses."""

    def resident(server: Server) -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    options = ("--served-model-name", "tiny", "--device", "cpu", "--max-responses", "20", "--response-seconds", "5")
    body = {"input": "who?", "max_output_tokens": 1, "metadata": {f"{i}": "x" * 500 for i in range(16)}}
    with serving(save_model(tmp_path), *options, folder=tmp_path) as running, running.client("plain") as client:
        sizes = []
        for _ in range(10):
            for _ in range(1000):
                assert client.post("/v1/responses", json=body).status_code == 200
            sizes.append(resident(running))
        assert running.metric("responses") == 20
        assert sizes[-1] - sizes[0] < 8 << 10, sizes  # kB; each response has 10
        deadline = time.monotonic() + SECONDS
        while running.metric("responses") and time.monotonic() < deadline:
            time.sleep(0.2)
        assert running.metric("response_bytes") == 0


def test_parts_of_a_message_are_joined_as_those_of_chats():
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("w4", "w5")]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "w6"}, {"type": "refusal", "refusal": "w7"}]},
    ]
    body = ResponsesRequest.model_validate({"input": given})
    assert body.messages([]) == [{"role": "user", "content": "w4\nw5"}, {"role": "assistant", "content": "w6\nw7"}]
