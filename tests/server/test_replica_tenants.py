"""Two tenants of a cluster: two fronts with one store, over two replicas. Neither learns or changes anything of the other's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_replicas import replicas_of
from helpers_server import KEYS, SECONDS, Server
from safetensors.torch import save

from pymllm_interp.wire.frames import FRAME_PREFIX, frame_sizes

HIDDEN = 72
OWNER, OTHER = "declared", "other"
STRANGERS = (OTHER, "plain", "code", None)
"""Other tenants, the operator among them, and somebody without a key."""
STEERED = {"prompt": "w1 w2", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "interventions": [
    {"op": "steer", "site": "resid_post.1", "vector": "mine", "scale": 4.0}]}  # fmt: skip
PAGES = ("/", "/docs", "/static/app.js", "/openapi.json", "/status", "/load", "/health", "/version", "/metrics")
OF_KEYS = ("/v1/models", "/v1/interp/capabilities", "/v1/interp/stats", "/v1/interp/vectors", "/v1/interp/tokenizer")


@pytest.fixture(scope="module")
def fronts(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    store = tmp_path_factory.mktemp("store")
    with replicas_of(served_folder, 2, inline_bytes=4000) as replicas:
        yield [replicas.front(name, store=store, shared_store=True) for name in ("first", "second")]


def ask(front: Server, key: str | None, method: str, path: str, **options: Any) -> httpx.Response:
    with front.client(key) as client:
        return client.request(method, path, **options)


def put(front: Server, key: str, value: float, name: str = "mine") -> bytes:
    body = save({"vector": torch.full((HIDDEN,), value)})
    assert ask(front, key, "PUT", f"/v1/interp/vectors/{name}", content=body).status_code == 200
    return body


def test_captured_states_are_their_owners_at_every_front(fronts):
    body = {"prompt": "w1 w2 " * 30, "max_tokens": 1, "capture": ["resid_post.*"]}
    asked = ask(fronts[0], OWNER, "POST", "/v1/completions", json=body).json()
    url = asked["choices"][0]["activations"]["url"]
    for front in fronts:
        for key in STRANGERS:
            for method in ("GET", "DELETE"):
                refused = ask(front, key, method, url)
                assert refused.status_code == (401 if key is None else 404), (key, method, refused.text)
        own = ask(front, OWNER, "GET", url)
        assert own.status_code == 200 and len(own.content) > 4000
    assert ask(fronts[1], OWNER, "DELETE", url).status_code == 200
    assert ask(fronts[0], OWNER, "GET", url).status_code == 404


def test_responses_are_continued_fetched_and_deleted_by_their_owner_only(fronts):
    asked = {"input": "w3 w14 w15", "max_output_tokens": 2}
    kept = ask(fronts[0], OWNER, "POST", "/v1/responses", json=asked).json()["id"]
    for front in fronts:
        for key in STRANGERS:
            expected = 401 if key is None else 404
            for method in ("GET", "DELETE"):
                assert ask(front, key, method, f"/v1/responses/{kept}").status_code == expected
            for stream in (False, True):
                more = asked | {"previous_response_id": kept, "stream": stream}
                refused = ask(front, key, "POST", "/v1/responses", json=more)
                assert refused.status_code == expected and "w14" not in refused.text, refused.text
        more = ask(front, OWNER, "POST", "/v1/responses", json=asked | {"previous_response_id": kept})
        assert more.status_code == 200 and more.json()["usage"]["input_tokens"] > 4
        assert ask(front, OWNER, "GET", f"/v1/responses/{kept}").json()["id"] == kept


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fkeys", "*", "a%00b", "x" * 300, "..%2f..%2fetc%2fpasswd"])
def test_an_id_names_no_other_file_of_the_store(fronts, name):
    for path in ("/v1/interp/activations/", "/v1/responses/"):
        found = ask(fronts[1], OTHER, "GET", path + name)
        assert found.status_code == 404 and "root:" not in found.text


def test_vectors_of_one_name_are_two_on_every_replica(fronts):
    body = put(fronts[0], OWNER, 1.0)
    for front in fronts:
        for key in (OTHER, "code"):
            assert ask(front, key, "GET", "/v1/interp/vectors/mine").status_code == 404
            assert ask(front, key, "DELETE", "/v1/interp/vectors/mine").status_code == 404
            assert ask(front, key, "GET", "/v1/interp/vectors").json()["vectors"] == []
            for salt in "abcdef":
                refused = ask(front, key, "POST", "/v1/completions", json=STEERED | {"cache_salt": salt})
                assert refused.status_code == 400, refused.text
    texts = texts_of(fronts, OWNER)
    put(fronts[1], OTHER, -1.0)
    assert len(texts) == 1 == len(texts_of(fronts, OTHER)) and texts_of(fronts, OTHER) != texts
    assert ask(fronts[1], OTHER, "DELETE", "/v1/interp/vectors/mine").status_code == 200
    assert texts_of(fronts, OWNER) == texts and ask(fronts[1], OWNER, "GET", "/v1/interp/vectors/mine").content == body


def texts_of(fronts: list[Server], key: str) -> set[str]:
    """What a tenant's steered prompt becomes, on both replicas of both fronts."""
    found, used = set(), set()
    for front in fronts:
        for salt in range(8):
            reply = ask(front, key, "POST", "/v1/completions", json=STEERED | {"cache_salt": f"{salt}"})
            assert reply.status_code == 200, reply.text
            found.add(reply.json()["choices"][0]["text"])
            used.add(reply.json()["choices"][0]["receipt"]["replica"])
    assert used == {"r0", "r1"}
    return found


def test_no_tenant_sees_by_cached_tokens_what_another_asked(fronts):
    body = {"prompt": "w7 w8 w9 " * 20, "max_tokens": 1, "cache_salt": "shared"}

    def cached(front: Server, key: str) -> int:
        usage = ask(front, key, "POST", "/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(fronts[0], OWNER) == 0 < cached(fronts[1], OWNER)
    assert cached(fronts[0], OTHER) == 0 == cached(fronts[1], "code")


def test_a_call_is_ended_by_its_owner_only(fronts):
    """Numbers of calls are small, and told to their owners."""
    params = {"max_tokens": 120, "ignore_eos": True}
    body = {"prompts": [[1, 2, 3]] * 4, "params": [params]}
    for key, reasons in ((OTHER, {"length"}), (OWNER, {"abort", "length"})):
        with fronts[0].client(OWNER) as client, client.stream("POST", "/v1/interp/generate", json=body) as stream:
            parts = stream.iter_raw(1)
            head = b"".join(next(parts) for _ in range(FRAME_PREFIX))
            call = json.loads(b"".join(next(parts) for _ in range(frame_sizes(head)[0])))["call"]
            for front in fronts:
                for number in (call, call + 1, call - 1, -call, 0):
                    assert ask(front, key, "POST", "/v1/interp/abort", json={"call": number}).status_code < 500
            rest = b"".join(parts)
        ends = set(re.findall(r'"finish_reason":"(\w+)"', rest.decode("latin-1")))
        assert ends and ends <= reasons and (key != OTHER or ends == {"length"}), ends


def test_adapters_and_the_cache_of_all_are_for_operators(fronts):
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}),
        ("/v1/interp/reset_prefix_cache", {}),
    ):
        for key in (OWNER, OTHER, "plain"):
            assert ask(fronts[0], key, "POST", path, json=body).status_code == 403


def test_pages_and_metrics_name_no_tenant_and_nothing_of_theirs(fronts):
    put(fronts[0], OWNER, 1.0, "zebra-7")
    steered = ask(
        fronts[0], OWNER, "POST", "/v1/completions", json=STEERED | {"prompt": "w88 w87 w86", "cache_salt": "pepper"},
        headers={"X-Request-Id": "my-own-id"},
    ).json()  # fmt: skip
    kept = ask(fronts[0], OWNER, "POST", "/v1/responses", json={"input": "w88", "max_output_tokens": 1}).json()["id"]
    secrets = {
        *KEYS.values(), steered["id"], kept, kept.removeprefix("resp_"), "my-own-id", "pepper", "w88 w87", "zebra-7",
        steered["choices"][0]["text"],
    }  # fmt: skip
    for front in fronts:
        answers = {path: ask(front, None, "GET", path) for path in PAGES}
        answers |= {f"{path} of {key}": ask(front, key, "GET", path) for path in OF_KEYS for key in (OTHER, "plain")}
        for path, answer in answers.items():
            shown = answer.text + repr(answer.headers)
            found = {word for word in secrets if word in shown}
            assert not found and answer.status_code in (200, 403), (path, answer.status_code, found)
        labels = re.findall(r'(\w+)="([^"]*)"', httpx.get(f"{front.url}/metrics", timeout=SECONDS).text)
        assert labels and not {value for _, value in labels} & {OWNER, "anybody", "strangers"}
        for key in (OTHER, "plain"):
            assert ask(front, key, "GET", "/v1/interp/capabilities").json()["client"] == key
