"""OpenAI's API over HTTP, through its official client, beside the same requests in this process."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import time
from contextlib import suppress

import httpx
import openai
import pytest
import torch
from helpers_server import CLOSE, KEYS, SECONDS
from openai import OpenAI

from pymllm_interp import LM, Capture, SamplingParams, Scale, Steer
from pymllm_interp.hooks.captures.activations import Activations
from pymllm_interp.server.routes import openai_routes

PROMPT = "w3 w14 w15 w9"


@pytest.fixture(scope="module")
def lm(lm_of) -> LM:
    return lm_of("llama")


@pytest.fixture(scope="module")
def api(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["declared"], max_retries=0)


def test_a_completion_is_the_local_one(api, lm):
    params = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "logprobs": 3}
    found = api.completions.create(
        model=api.models.list().data[0].id, prompt=PROMPT, n=3,
        extra_body={"return_token_ids": True, "top_k": 20, "min_p": 0.01}, **params,
    )  # fmt: skip
    (local,) = lm.generate([PROMPT], SamplingParams(n=3, top_k=20, min_p=0.01, **params))
    assert [choice.text for choice in found.choices] == [one.text for one in local.outputs]
    assert [choice.token_ids for choice in found.choices] == [one.token_ids for one in local.outputs]
    assert len({choice.text for choice in found.choices}) > 1
    for choice, one in zip(found.choices, local.outputs, strict=True):
        assert choice.finish_reason == one.finish_reason == "length"
        own = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(own, abs=1e-5)
        assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs)
    assert found.choices[0].prompt_token_ids == local.prompt_token_ids
    assert found.usage.prompt_tokens == 4 and found.usage.completion_tokens == 36


def test_a_stream_adds_up_to_the_whole(api):
    arguments = {
        "model": "demo",
        "prompt": [PROMPT, "w1"],
        "max_tokens": 9,
        "temperature": 1.0,
        "seed": 7,
        "n": 2,
        "logprobs": 1,
    }
    arguments["model"] = api.models.list().data[0].id
    whole = api.completions.create(**arguments)
    texts, logprobs, reasons, usage = ["", "", "", ""], [[], [], [], []], [None] * 4, None
    for chunk in api.completions.create(stream=True, stream_options={"include_usage": True}, **arguments):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length"] * 4
    for i, choice in enumerate(whole.choices):
        assert logprobs[i] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    assert usage.completion_tokens == whole.usage.completion_tokens == 36


def test_stop_strings_and_token_ids_and_vllms_fields(api, lm):
    ids = lm.token_ids(PROMPT)
    free = lm.generate([ids], SamplingParams(temperature=0, max_tokens=8))[0]
    stop = lm.tokenizer.decode([free.token_ids[3]])
    name = api.models.list().data[0].id
    found = api.completions.create(model=name, prompt=ids, temperature=0, max_tokens=8, stop=[stop])
    (local,) = lm.generate([ids], SamplingParams(temperature=0, max_tokens=8, stop=[stop]))
    assert found.choices[0].text == local.text and found.choices[0].finish_reason == "stop"
    assert found.choices[0].stop_reason == stop
    extra = {
        "repetition_penalty": 1.3, "ignore_eos": True, "min_tokens": 2, "prompt_logprobs": 1, "stop_token_ids": [free.token_ids[5]]
    }  # fmt: skip
    found = api.completions.create(model=name, prompt=ids, temperature=0, max_tokens=8, extra_body=extra)
    (local,) = lm.generate([ids], SamplingParams(temperature=0, max_tokens=8, **extra))
    assert found.choices[0].text == local.text
    served = found.choices[0].prompt_logprobs
    assert served[0] is None and len(served) == 4
    for entry, own in zip(served[1:], local.prompt_logprobs[1:], strict=True):
        assert {int(token): value["logprob"] for token, value in entry.items()} == pytest.approx(
            {token: value.logprob for token, value in own.items()}, abs=1e-5
        )


def test_echo_with_logprobs_scores_a_prompt_as_harnesses_do(api, lm):
    name = api.models.list().data[0].id
    found = api.completions.create(model=name, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).choices[0]
    (local,) = lm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=1))
    own = [
        entry[token].logprob for token, entry in zip(local.prompt_token_ids[1:], local.prompt_logprobs[1:], strict=True)
    ]
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-5)
    assert found.text == PROMPT


def test_a_chat_is_the_local_one_and_streams(api, served_folder):
    name = api.models.list().data[0].id
    messages = [{"role": "user", "content": "w4 w5"}, {"role": "user", "content": [{"type": "text", "text": "w6"}]}]
    arguments = {
        "model": name,
        "messages": messages,
        "max_completion_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = api.chat.completions.create(**arguments)
    plain = api.completions.create(model=name, prompt="w4 w5 w6 w1", max_tokens=6, temperature=0)
    assert whole.choices[0].message.content == plain.choices[0].text
    assert whole.choices[0].message.role == "assistant"
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 6 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)
    text = "".join(c.choices[0].delta.content or "" for c in api.chat.completions.create(stream=True, **arguments))
    assert text == whole.choices[0].message.content


def test_a_chats_prompt_stands_beside_its_choices(api, lm):
    """As in vLLM, whose clients read it there. A completion has it in its choices."""
    arguments = {
        "model": api.models.list().data[0].id, "messages": [{"role": "user", "content": "w4 w5"}], "max_tokens": 2, "n": 2,
        "extra_body": {"return_token_ids": True, "prompt_logprobs": 1},
    }  # fmt: skip
    found = api.chat.completions.create(**arguments)
    (local,) = lm.generate(["w4 w5 w1"], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert found.prompt_token_ids == local.prompt_token_ids and len(found.choices[0].token_ids) == 2
    for own, entry in zip(local.prompt_logprobs[1:], found.prompt_logprobs[1:], strict=True):
        assert {int(t): e["rank"] for t, e in entry.items()} == {t: e.rank for t, e in own.items()}
    assert not any(
        hasattr(choice, name) for choice in found.choices for name in ("prompt_token_ids", "prompt_logprobs")
    )
    first, *_ = api.chat.completions.create(**arguments, stream=True)
    assert first.prompt_token_ids == local.prompt_token_ids


def test_interventions_and_captures_act_as_the_objects_do(api, server, lm):
    torch.manual_seed(3)
    vector = torch.randn(72)
    name = api.models.list().data[0].id
    raw = base64.b64encode(vector.numpy().tobytes()).decode()
    steer = {
        "op": "steer",
        "site": "resid_post.1",
        "vector": {"dtype": "float32", "shape": [72], "data": raw},
        "scale": 2,
    }
    extra = {
        "interventions": [steer | {"positions": "generated"}],
        "capture": ["resid_post.2", {"site": "z.1", "positions": -1}],
    }
    found = api.completions.create(model=name, prompt=PROMPT, max_tokens=6, temperature=0, extra_body=extra)
    (local,) = lm.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=6),
        interventions=[Steer("resid_post.1", vector, 2, positions="generated")],
        capture=["resid_post.2", Capture("z.1", positions=-1)],
    )  # fmt: skip
    choice = found.choices[0]
    assert choice.text == local.text
    states = Activations.from_bytes(base64.b64decode(choice.activations["data"]))
    for site in ("resid_post.2", "z.1"):
        torch.testing.assert_close(states[site], local.activations[site], atol=CLOSE, rtol=CLOSE)
        assert torch.equal(states.positions[site], local.activations.positions[site])
        assert torch.equal(states.token_ids[site], local.activations.token_ids[site])
    receipt = choice.receipt
    assert receipt["interventions"][0]["generated_rows"] == local.receipt.interventions[0].generated_rows
    assert receipt["spec"] == local.receipt.spec and receipt["model"] == local.receipt.model


def test_large_captures_are_fetched_and_belong_to_their_key(api, server):
    name = api.models.list().data[0].id
    arguments = {"model": name, "prompt": "w1 w2 " * 40, "max_tokens": 2, "temperature": 0}
    whole = api.completions.create(extra_body={"capture": ["resid_post.*"]}, **arguments).choices[0].activations
    assert "data" not in whole and whole["bytes"] > 20000
    with server.client("declared") as client, server.client("other") as other:
        assert other.get(whole["url"]).status_code == 404
        data = client.get(whole["url"]).content
        assert len(data) == whole["bytes"]
        assert Activations.from_bytes(data)["resid_post.2"].shape == (81, 72)
        assert client.delete(whole["url"]).status_code == 200 and client.get(whole["url"]).status_code == 404
    assert server.metric("store_bytes") == 0


def test_named_vectors_are_stored_listed_fetched_and_private(api, server, lm, tmp_path):
    from safetensors.torch import save

    torch.manual_seed(4)
    vector = torch.randn(72)
    body = save({"vector": vector})
    name = api.models.list().data[0].id
    extra = {"interventions": [{"op": "steer", "site": "resid_post.1", "vector": "sea", "scale": 3}]}
    arguments = {"model": name, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "extra_body": extra}
    with server.client("declared") as client, server.client("other") as other:
        assert client.put("/v1/interp/vectors/sea", content=body).json() == {"name": "sea", "shape": [72]}
        assert client.get("/v1/interp/vectors/sea").content == body
        assert [v["name"] for v in client.get("/v1/interp/vectors").json()["vectors"]] == ["sea"]
        assert other.get("/v1/interp/vectors/sea").status_code == 404
        (local,) = lm.generate(
            [PROMPT], SamplingParams(temperature=0, max_tokens=6), interventions=[Steer("resid_post.1", vector, 3)]
        )
        assert api.completions.create(**arguments).choices[0].text == local.text
        assert client.put("/v1/interp/vectors/bad", content=b"no safetensors").status_code == 400
        assert client.put("/v1/interp/vectors/wide", content=save({"v": torch.randn(7)})).status_code == 400
        client.delete("/v1/interp/vectors/sea")
        with pytest.raises(openai.BadRequestError, match="no vector 'sea'"):
            api.completions.create(**arguments)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"interventions": [{"op": "stear", "site": "x"}]}, "op is 'stear'; did you mean 'steer'"),
        ({"interventions": [{"op": "Steer", "site": "x"}]}, "did you mean 'steer'"),
        ({"interventions": [{"type": "steer", "site": "x"}]}, "op is None; expected one of ablate, "),
        ({"intervention": []}, "intervention: unknown field; did you mean interventions"),
        ({"lora": "mine"}, "lora: unknown field; an adapter's name is a model's"),
        ({"max_new_tokens": 4}, "max_new_tokens: unknown field; here it is max_tokens"),
        ({"interventions": [{"op": "scale", "site": "resid_post.99", "factor": 2}]}, "resid_post"),
        ({"interventions": [{"op": "scale", "site": "resid_post.1", "factor": 2, "position": 1}]}, "has no field 'position'"),
        ({"capture": ["residue.1"]}, "residue"),
        ({"max_tokens": 100000}, "max_model_len|context"),
        ({"guided_json": {}}, "use structured_outputs, with json"),
        ({"nonsense": 1}, "nonsense: unknown field; /docs lists"),
        ({"prompt": []}, "empty|token"),
        ({"prompt": [1000]}, "vocabulary"),
        ({"n": 5000}, "max_prompts"),
        ({"prompt": [-(2**63) - 1]}, "64 bits"),
        ({"top_k": 10**30}, "64 bits"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_400_that_names_it(server, fields, words):
    with server.client("declared") as client:
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(words, error["message"]), error["message"]


def test_unknown_models_and_paths_are_404(api, server):
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        api.completions.create(model="gpt-9", prompt="w1")
    with server.client() as client:
        assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"


def test_bodies_and_methods_that_do_not_fit_are_named(server):
    with server.client("declared") as client:
        cut = client.post("/v1/completions", content=b'{"prompt": "w1"', headers={"Content-Type": "application/json"})
        assert cut.status_code == 400 and cut.json()["error"]["param"] is None
        assert cut.json()["error"]["message"] == "the body is not JSON: Input data was truncated"
        read = client.get("/v1/completions")
        assert read.status_code == 405 and read.json()["error"]["message"] == "/v1/completions takes POST, not GET"


def test_the_asynchronous_client_works_in_a_process_that_has_this_package(server, lm):
    async def ask(name: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEYS["plain"]) as client:
            stream = await client.completions.create(
                model=name, prompt=PROMPT, max_tokens=5, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    with server.client() as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
    assert asyncio.run(ask(name)) == lm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=5))[0].text


def test_request_ids_of_clients_are_sent_back_and_logged_and_name_nothing(server):
    with server.client() as client:
        answer = client.post(
            "/v1/completions", json={"prompt": "w1", "max_tokens": 1}, headers={"X-Request-Id": "mine-17"}
        )
        assert answer.headers["x-request-id"] == "mine-17" and "mine" not in answer.json()["id"]
        other = client.get("/v1/models", headers={"X-Request-Id": "two\tparts"}).headers["x-request-id"]
        assert len(other) == 32
    deadline, found = time.monotonic() + SECONDS, []
    while not found and time.monotonic() < deadline:  # the line is written after the answer
        time.sleep(0.02)
        entries = [json.loads(line) for line in list(server.log) if line.startswith("{")]
        found = [entry for entry in entries if entry.get("client_request_id") == "mine-17"]
    (entry,) = found
    assert answer.json()["id"] == f"cmpl-{entry['request_id']}"
    assert entry["client"] == "code" and entry["status"] == 200 and entry["generated_tokens"] == 1
    assert not any(key in line for key in KEYS.values() for line in list(server.log))


def test_many_clients_at_once_get_what_each_gets_alone(api, lm):
    name = api.models.list().data[0].id
    prompts = [f"w{i} w{i + 1} w{2 * i % 90}" for i in range(24)]
    expected = [out.text for out in lm.generate(prompts, [SamplingParams(seed=i, max_tokens=10) for i in range(24)])]
    found = [""] * len(prompts)

    def ask(i: int) -> None:
        stream = api.completions.create(model=name, prompt=prompts[i], seed=i, max_tokens=10, stream=True)
        found[i] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_client_that_goes_away_frees_everything(server, tmp_path):
    """Beside a trace that makes each step slow: the requests' 100 steps would take 20 s."""
    slow, begun = tmp_path / "slow", threading.Event()
    slow.touch()
    path = str(slow)

    def trace() -> None:
        with LM.connect(server.url, api_key=KEYS["code"]) as lm:
            noted = lambda step, saved: begun.set()  # noqa: E731
            with lm.generate(PROMPT, max_new_tokens=100, ignore_eos=True, on_step=noted) as tracer:
                for _ in tracer.iter[:]:
                    __import__("time").sleep(0.2 * __import__("os").path.exists(path))
                    total = lm.model.layers[0].output.sum().save()  # noqa: F841

    thread = threading.Thread(target=trace)
    thread.start()
    assert begun.wait(SECONDS)
    body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "n": 8}
    for stream in (True, False):
        steps, accepted = server.metric("steps_total"), threading.Event()
        with server.client() as client, suppress(httpx.TimeoutException):
            limits = httpx.Timeout(SECONDS, read=SECONDS if stream else 1)
            with client.stream("POST", "/v1/completions", json=body | {"stream": stream}, timeout=limits) as response:
                next(response.iter_raw())
                accepted.set()
        assert accepted.is_set() == stream  # the other one has sent nothing yet
        while server.metric("num_requests_running") + server.metric("num_requests_waiting") > 1:  # the trace
            time.sleep(0.05)
        assert server.metric("steps_total") - steps < 100
    slow.unlink()
    thread.join()
    server.wait_until_idle()
    assert server.metric("kv_tokens_free") == server.metric("kv_tokens")


def test_health_metrics_capabilities_and_documents(server):
    with server.client("declared") as client:
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        found = client.get("/v1/interp/capabilities").json()
        assert found["trust"] == "declared" and found["num_layers"] == 3 and "steer" in found["ops"]
        assert found["tasks"] == ["generate", "embed", "token_embed", "score"]
        assert found["sites"]["z"]["shape"] == [9, 8] and found["limits"]["inline_bytes"] == 20000
        document = httpx.get(f"{server.url}/openapi.json").json()
        assert {"Steer", "Ablate", "Clamp", "Scale", "Patch", "Knockout", "Gate"} <= document["components"][
            "schemas"
        ].keys()
    assert server.metric("steps_total") > 0 and server.metric("generation_tokens_total") > 0
    assert server.metric("block_seconds_total") >= 0


def test_the_scale_op_by_its_object_and_by_http_has_one_schema():
    from pymllm_interp.hooks.interventions.op import Op
    from pymllm_interp.wire import specs
    from pymllm_interp.wire.schema import OP_MODELS

    classes = [cls for found in Op.__subclasses__() for cls in (found.__subclasses__() or [found])]
    builtin = {cls.__name__.lower() for cls in classes if cls.__module__.startswith("pymllm_interp.")}
    # A Gate makes the first one, a lowered block the second, a Monitor the third.
    assert (builtin | {"knockout", "monitor", "patchkv"}) - {"gateread", "rowedit", "scoreread"} == set(OP_MODELS)
    op = Scale("z.1", 0.5, heads=[1, 2], positions=[True, False, True])
    assert specs.intervention_of(json.loads(json.dumps(specs.to_json(op)))) == op


@pytest.mark.parametrize("text", ["w1", "a\u2028b", "\x85é\U0001f600", 'quote " and \n'])
def test_an_event_of_a_stream_is_one_line_of_ascii(text: str) -> None:
    """Clients that split texts into lines end one at U+2028 and U+0085, too."""
    event = openai_routes._data({"choices": [{"text": text, "logprobs": None, "index": 0}], "value": 1.5})
    assert event.isascii() and len(event.decode().splitlines()) == 2
    infinite = openai_routes._data({"text": text, "logprob": float("-inf"), "score": float("nan")})
    assert json.loads(infinite.removeprefix(b"data: "), parse_constant=pytest.fail) == {
        "text": text, "logprob": None, "score": None,
    }  # fmt: skip
    assert json.loads(event.removeprefix(b"data: ")) == {
        "choices": [{"text": text, "logprobs": None, "index": 0}], "value": 1.5,
    }  # fmt: skip
