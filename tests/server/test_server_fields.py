"""Fields of requests: which are used, which pass without effect, and which are refused by name."""

from __future__ import annotations

import json
import re
from typing import get_type_hints

import httpx
import pytest
from helpers_paths import ROOT
from helpers_server import KEYS
from openai import BadRequestError, OpenAI
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from pymllm_interp import LM, SamplingParams
from pymllm_interp.server.protocol import ChatRequest, CompletionRequest, StreamOptions
from pymllm_interp.server.routes.refused_fields import REFUSED

PROMPT = "w3 w14 w15 w9"
MESSAGES = [{"role": "user", "content": "w4 w5"}]
FIELDS = ROOT / "docs" / "reference" / "http.md"


@pytest.fixture(scope="module")
def api(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["declared"], max_retries=0)


@pytest.fixture(scope="module")
def post(server):
    with server.client("declared") as client:

        def send(**body) -> httpx.Response:
            path = "chat/completions" if "messages" in body else "completions"
            return client.post(f"/v1/{path}", json=({"prompt": PROMPT} if "messages" not in body else {}) | body)

        yield send


def message_of(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def chunks_of(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_continuous_usage_is_in_every_chunk(api):
    name = api.models.list().data[0].id
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = api.completions.create(
        model=name, prompt=[PROMPT, "w1"], n=2, max_tokens=5, temperature=1, seed=3, stream=True, stream_options=options
    )
    made, read = [0] * 4, [4, 4, 1, 1]
    for chunk in stream:
        if not chunk.choices:
            assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (5, 20)
            break
        (choice,) = chunk.choices
        made[choice.index] += 1
        assert chunk.usage.completion_tokens == made[choice.index]
        assert chunk.usage.prompt_tokens == read[choice.index]
        assert chunk.usage.total_tokens == read[choice.index] + made[choice.index]
    assert made == [5] * 4
    chat = list(
        api.chat.completions.create(
            model=name, messages=MESSAGES, max_completion_tokens=3, temperature=0, stream=True,
            stream_options={"continuous_usage_stats": True},
        )
    )  # fmt: skip
    assert [chunk.usage.completion_tokens for chunk in chat] == [0, 1, 2, 3, 3]


def test_include_usage_alone_leaves_the_others_null(post):
    chunks = chunks_of(post(max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["usage"]["completion_tokens"] == 3 and chunks[-1]["choices"] == []
    assert all("usage" not in chunk for chunk in chunks_of(post(max_tokens=3, stream=True, stream_options={})))


def test_stream_options_are_those_of_a_stream(post, api):
    with pytest.raises(BadRequestError, match="stream_options needs stream=true"):
        api.completions.create(model="demo", prompt=PROMPT, stream_options={"include_usage": True})
    assert "continuous_usage_stats needs include_usage" in message_of(
        post(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True})
    )
    assert "include_obfuscation" in message_of(post(stream=True, stream_options={"include_obfuscation": True}))
    assert post(max_tokens=1, stream_options=None).status_code == 200


NEUTRAL = [
    *[(name, None) for name in REFUSED],
    *[(name, value) for name, refused in REFUSED.items() for value in refused.neutral],
]


@pytest.mark.parametrize("body", [{}, {"messages": MESSAGES}], ids=["completion", "chat"])
def test_all_neutral_values_pass_at_once(post, body):
    """Clients send whole sets of defaults."""
    for fields in (dict(NEUTRAL), dict.fromkeys(REFUSED)):
        response = post(**body, **fields, max_tokens=1)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=lambda value: str(value)[:40])
def test_each_neutral_value_passes(name, value):
    CompletionRequest.model_validate({"prompt": "w1", name: value})
    ChatRequest.model_validate({"messages": MESSAGES, name: value})


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_with_what_serves_instead(name):
    for given in ({"prompt": "w1"}, {"messages": MESSAGES}):
        kind = CompletionRequest if "prompt" in given else ChatRequest
        if name in kind.model_fields:  # a completion's prompt_embeds
            continue
        for value in ("another", 7, True if REFUSED[name].neutral != (True,) else False, {"type": "other"}):
            with pytest.raises(ValueError, match=re.escape(f"{name}: {REFUSED[name].reason}")):
                kind.model_validate(given | {name: value})


def test_refusals_reach_the_client(post):
    assert message_of(post(best_of=2)) == f"best_of: {REFUSED['best_of'].reason}"
    assert (
        message_of(post(guided_json={"type": "object"}))
        == "guided_json: it is not supported: use structured_outputs, with json"
    )
    assert "parallel_tool_calls" in message_of(post(messages=MESSAGES, parallel_tool_calls=False))
    assert "nonsense" in message_of(post(nonsense=None))
    neutral = {"logit_bias": {}, "tool_choice": "none", "parallel_tool_calls": True}
    assert post(messages=MESSAGES, max_tokens=1, **neutral).status_code == 200


def test_bookkeeping_has_the_types_of_openai(post):
    good = {
        "store": False, "metadata": {"run": "7"}, "user": "ada", "service_tier": "auto", "safety_identifier": "a",
        "prompt_cache_key": "b", "prompt_cache_retention": "24h",
    }  # fmt: skip
    assert post(max_tokens=1, **good).status_code == 200
    bad = {
        "store": "yes", "metadata": {"run": 7}, "user": 5, "service_tier": "best", "safety_identifier": [],
        "prompt_cache_key": {}, "prompt_cache_retention": "1h",
    }  # fmt: skip
    for name, value in bad.items():
        assert name in message_of(post(max_tokens=1, **{name: value}))
    assert "metadata" in message_of(post(metadata={str(i): "" for i in range(17)}))


def test_a_template_variable_that_nothing_reads_is_refused(post):
    body = {"messages": MESSAGES, "max_tokens": 1}
    assert "chat_template_kwargs names 'enable_thinking'" in message_of(
        post(**body, chat_template_kwargs={"enable_thinking": False})
    )
    assert post(**body, chat_template_kwargs={}).status_code == 200
    assert post(**body, chat_template_kwargs={"add_generation_prompt": True}).status_code == 400  # given twice


def test_a_route_without_fields_refuses_them(server):
    with server.client("code") as client:
        path = "/v1/interp/reset_prefix_cache"
        assert client.post(path).status_code == client.post(path, json={}).status_code == 200
        assert "reset_running_requests" in message_of(client.post(path, json={"reset_running_requests": True}))


def test_token_sets_are_those_of_local_calls(server, post, lm_of):
    fields = {"allowed_token_ids": [5, 6, 7], "bad_words": ["w5 w6"], "truncate_prompt_tokens": 2}
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "n": 2, **fields}
    (local,) = lm_of("llama").generate([PROMPT], SamplingParams(**params))
    found = post(**params, return_token_ids=True, echo=True).json()
    assert [choice["token_ids"] for choice in found["choices"]] == [one.token_ids for one in local.outputs]
    assert found["usage"]["prompt_tokens"] == 2 and found["choices"][0]["prompt_token_ids"] == [15, 9]
    assert found["choices"][0]["text"].startswith("w15w9w")
    chat = post(messages=MESSAGES, **(params | {"truncate_prompt_tokens": 1})).json()
    assert chat["usage"]["prompt_tokens"] == 1
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        (remote,) = lm.generate([PROMPT], SamplingParams(**params))
    assert [one.token_ids for one in remote.outputs] == [one.token_ids for one in local.outputs]
    assert remote.prompt_token_ids == local.prompt_token_ids == [15, 9]
    assert "vocabulary ends at 96" in message_of(post(allowed_token_ids=[97]))
    assert "at least one token id" in message_of(post(allowed_token_ids=[]))
    assert "not only spaces" in message_of(post(bad_words=[" "]))
    assert "truncate_prompt_tokens" in message_of(post(truncate_prompt_tokens=0))


# -- the documented table ---------------------------------------------------------------------


def documented() -> dict[str, set[str]]:
    """Heading of the table's row -> the fields that it names."""
    section = FIELDS.read_text().split("## Fields of a request\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (used|without effect|refused)[^|]*\|(.*)\|$", section, re.M)
    assert len(rows) == 3
    return {kind: set(re.findall(r"`(\w+)`", names)) for kind, names in rows}


def test_the_table_of_fields_is_complete():
    table, ours = documented(), {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert table["refused"] == set(REFUSED) - ours
    assert table["used"] | table["without effect"] == ours
    assert not table["used"] & table["without effect"]


@pytest.mark.parametrize(
    ("params", "request_class"),
    [(completion_create_params, CompletionRequest), (chat_create_params, ChatRequest)],
    ids=["completion", "chat"],
)
def test_every_field_of_the_openai_client_is_known(params, request_class):
    names = get_type_hints(params.CompletionCreateParamsStreaming)
    assert names and not names.keys() - request_class.model_fields.keys() - REFUSED.keys()


def test_every_sampling_parameter_can_be_sent():
    code = {"constraint"}  # an object with methods has no JSON form
    assert set(SamplingParams.__dataclass_fields__) - code <= set(CompletionRequest.model_fields)
    assert code <= REFUSED.keys()
    assert set(StreamOptions.model_fields) == {"include_usage", "continuous_usage_stats", "include_obfuscation"}
