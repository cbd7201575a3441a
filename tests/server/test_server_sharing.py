"""What clients share: no KV of prompts across keys, and no rights over all of it."""

from __future__ import annotations

import pytest
from helpers_served import served
from helpers_server import KEYS, Server

from pymllm_interp import LM, SamplingParams
from pymllm_interp.server.http.trust import read_keys

PROMPT = "w5 w6 w7 " * 20
ASK = {"prompt": PROMPT, "max_tokens": 1}


def cached(server: Server, key: str, **more) -> int:
    with server.client(key) as client:
        answer = client.post("/v1/completions", json=ASK | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def reset(server: Server) -> None:
    with server.client("code") as client:
        assert client.post("/v1/interp/reset_prefix_cache").status_code == 200


@pytest.mark.parametrize("salt", [None, "declared", "mine"])
def test_a_key_learns_nothing_of_the_prompts_of_another(server: Server, salt):
    reset(server)
    assert cached(server, "declared", cache_salt=salt) == 0
    assert cached(server, "declared", cache_salt=salt) > 0
    for other in (salt, None, "declared", "code"):
        assert cached(server, "other", cache_salt=other) == 0
        reset(server)
        assert cached(server, "declared", cache_salt=salt) == 0


def test_a_salt_of_a_key_is_its_own(server: Server):
    reset(server)
    assert cached(server, "declared", cache_salt="mine") == 0
    assert cached(server, "declared") == 0 == cached(server, "declared", cache_salt="other")
    assert cached(server, "declared", cache_salt="mine") > 0 < cached(server, "declared")


def test_connected_clients_share_by_their_key(server: Server):
    reset(server)
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm, LM.connect(server.url, api_key=KEYS["other"]) as other:
        one = SamplingParams(max_tokens=1)
        assert lm.generate(PROMPT, one)[0].num_cached_tokens == 0
        assert lm.generate(PROMPT, one)[0].num_cached_tokens > 0
        assert other.generate(PROMPT, one)[0].num_cached_tokens == 0


def test_the_cache_of_all_is_reset_by_operators_only(server: Server):
    assert cached(server, "declared") >= 0 and cached(server, "declared") > 0
    for key in ("plain", "declared"):
        with server.client(key) as client:
            refused = client.post("/v1/interp/reset_prefix_cache")
            assert refused.status_code == 403 and f"--operator {key}" in refused.json()["error"]["message"]
            assert client.get("/v1/interp/capabilities").json()["operator"] is False
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm, pytest.raises(Exception, match="--operator declared"):
        lm.reset_prefix_cache()
    assert cached(server, "declared") > 0
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        lm.reset_prefix_cache()
    assert cached(server, "declared") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/interp/generate"])
def test_a_plain_key_does_not_go_before_others(server: Server, path):
    def ask(key: str, priority: int):
        body = (
            {"prompts": [[1]], "params": [{"max_tokens": 1}], "priority": [priority]}
            if "interp" in path
            else ASK | {"priority": priority}
        )
        with server.client(key) as client:
            return client.post(path, json=body)

    refused = ask("plain", -1)
    assert refused.status_code == 403 and "priority=-1" in refused.json()["error"]["message"]
    assert ask("plain", 0).status_code == ask("plain", 7).status_code == ask("declared", -1).status_code == 200


def test_an_operator_is_named_by_its_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("a 12345678 plain\nb 12345679")
    keys = read_keys(file, [], ["a"])
    clients = [keys.client(f"Bearer {secret}") for secret in ("12345678", "12345679")]
    assert [client.operator for client in clients if client] == [True, False]
    with pytest.raises(ValueError, match="--operator c: no such key; there is a, b"):
        read_keys(file, [], ["c"])
    with pytest.raises(ValueError, match="--operator anybody: no such key"):
        read_keys(None, [], ["anybody"])


@pytest.mark.slow
def test_a_cache_is_shared_where_the_operator_wants_that(served_folder, tmp_path):
    with served(served_folder, "--shared-prefix-cache", folder=tmp_path) as server:
        assert cached(server, "declared") == 0 == cached(server, "declared", cache_salt="mine")
        assert cached(server, "other") > 0 < cached(server, "other", cache_salt="mine")
