"""Operators' orders over two replicas: all carry them out, or none, or an error says which have."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import CONFIGS, random_model
from helpers_replicas import Replicas, replicas_of
from helpers_server import KEYS, Server
from helpers_waits import until

from pymllm_interp import LM, SamplingParams
from pymllm_interp.wire.weights import SentWeights

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SPREAD = 8
"""Prompts of different salts, which both replicas serve."""


@pytest.fixture(scope="module")
def replicas(served_folder: Path) -> Iterator[Replicas]:
    with replicas_of(served_folder, 2) as found:
        yield found


@pytest.fixture(scope="module")
def front(replicas: Replicas) -> Server:
    return replicas.front()


@pytest.fixture(scope="module")
def lm(front: Server) -> Iterator[LM]:
    with LM.connect(front.url, api_key=KEYS["code"]) as found:
        yield found


def tokens_of(lm: LM, of: set[str] | None = None) -> list[int]:
    """Tokens of a prompt, which are the same on all replicas."""
    outs = [lm.generate([[1, 2, 3]], GREEDY, cache_salt=str(i), capture=["embed"])[0] for i in range(SPREAD)]
    assert {out.receipt.replica for out in outs} == (of or {"r0", "r1"})
    (found,) = {tuple(out.token_ids) for out in outs}
    return list(found)


def post(client: httpx.Client, route: str, **body: Any) -> tuple[int, str]:
    found = client.post(f"/{route}", json=body or None)
    return found.status_code, found.text


def begin(client: httpx.Client, weights: dict[str, torch.Tensor]) -> None:
    """An update that is not finished."""
    with SentWeights(weights) as sent:
        assert post(client, "init_weight_transfer_engine", init_info={"backend": "shared_memory"})[0] == 200
        assert post(client, "start_weight_update")[0] == 200
        assert post(client, "update_weights", update_info=sent.info)[0] == 200


def test_all_replicas_get_new_weights(lm: LM, front: Server, served_folder: Path, tmp_path: Path):
    new = random_model(CONFIGS["llama"](), seed=7)
    new.save_pretrained(tmp_path)
    with LM(tmp_path, dtype="float32", device="cpu") as other:
        expected = other.generate([[1, 2, 3]], GREEDY)[0].token_ids
    old = tokens_of(lm)
    first = lm.update_weights(new.named_parameters())
    assert tokens_of(lm) == expected != old
    assert lm.update_weights(str(served_folder)) > first
    assert tokens_of(lm) == old
    with front.client() as client:
        begin(client, dict(new.named_parameters()))
        assert tokens_of(lm) == old
        assert post(client, "finish_weight_update", weight_version="step 7")[0] == 200
        assert client.get("/weight_info").json() == {"weight_version": "step 7"}
        assert tokens_of(lm) == expected
    for wrong, message in (
        ({"nope": torch.zeros(2)}, "1 unknown: nope"),
        ({"model.norm.weight": torch.zeros(2)}, "misshapen"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.update_weights(wrong)
        assert tokens_of(lm) == expected
    lm.update_weights(str(served_folder))
    assert tokens_of(lm) == old


def test_a_pause_and_a_sleep_are_of_all_replicas(lm: LM, front: Server):
    old = tokens_of(lm)
    lm.pause("keep")
    handles = [lm.submit([4, 5], GREEDY, cache_salt=str(i)) for i in range(SPREAD)]
    with front.client() as client:
        until(lambda: client.get("/v1/interp/stats").json()["waiting"] == SPREAD)
        assert lm.is_paused() and not any(handle.done for handle in handles)
        assert client.post("/sleep", params={"mode": "keep"}).status_code == 400
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        lm.resume()
        [handle.result() for handle in handles]
        lm.pause("keep")
        one = lm.submit([4, 5], GREEDY)  # on one of them
        until(lambda: client.get("/v1/interp/stats").json()["waiting"] == 1)
        found = client.post("/sleep", params={"mode": "keep"})
        assert found.status_code == 400 and "1 requests are live" in found.text
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}, "the other one woke again"
        lm.resume()
        one.result()
        assert client.post("/sleep").json() == {"status": "sleeping", "level": 1} and lm.is_sleeping()
        for salt in "abcdef":
            reply = client.post("/v1/completions", json={"prompt": [1, 2], "cache_salt": salt})
            assert reply.status_code == 503 and "the engine sleeps" in reply.text
        assert client.post("/wake_up", params={"tags": ["weights"]}).json()["status"] == "sleeping"
        assert client.post("/wake_up").json()["status"] == "awake"
        assert lm.wake(all_graphs=True), "it is awake, and has all graphs that it can have"
        assert client.post("/pause", params={"mode": "never"}).status_code == 400
    assert not lm.is_sleeping() and not lm.is_paused() and tokens_of(lm) == old


def test_a_replica_that_is_not_there_changes_nothing(lm: LM, front: Server, replicas: Replicas, served_folder: Path):
    """Before the order, or between its calls."""
    old = tokens_of(lm)
    with front.client() as client:
        begin(client, {"model.norm.weight": torch.zeros(72)})
        starts = replicas.starts["r1"]
        replicas.signal("r1", signal.SIGKILL)
        found = post(client, "finish_weight_update")
        while "nothing was done" in found[1]:  # until it runs again, and does not know of the update
            assert found[0] == 503
            time.sleep(0.2)
            found = post(client, "finish_weight_update")
        assert found[0] == 400 and "comes after start_weight_update" in found[1], found
        assert replicas.starts["r1"] > starts and tokens_of(lm, {"r0"}) == old
        lm.update_weights(str(served_folder))  # also of the replica that was started again
        replicas.wait_until_up(front)
        assert tokens_of(lm) == old


@pytest.mark.slow
def test_a_replica_that_starts_again_serves_no_old_weights_and_is_paused_as_the_others(
    lm: LM, front: Server, replicas: Replicas
):
    """Also by a front that has not seen the update."""
    new, other = random_model(CONFIGS["llama"](), seed=7), replicas.front("other")
    lm.update_weights(new.named_parameters())
    expected = tokens_of(lm)
    starts = replicas.starts["r1"]
    replicas.signal("r1", signal.SIGKILL)
    replicas.wait_for(lambda: replicas.starts["r1"] > starts and len(replicas.live) == 2)
    time.sleep(3)
    assert front.metric("replica_up") == other.metric("replica_up") == 1
    with LM.connect(other.url, api_key=KEYS["code"]) as again:
        assert tokens_of(lm, {"r0"}) == tokens_of(again, {"r0"}) == expected
        lm.update_weights(new.named_parameters())
        replicas.wait_until_up(front)
        replicas.wait_until_up(other)
        assert tokens_of(lm) == tokens_of(again) == expected
    lm.pause("keep")
    starts = replicas.starts["r0"]
    replicas.signal("r0", signal.SIGKILL)
    replicas.wait_for(lambda: replicas.starts["r0"] > starts and len(replicas.live) == 2)
    time.sleep(2)
    lm.update_weights(new.named_parameters())
    replicas.wait_until_up(front)
    handles = [lm.submit([4, 5], GREEDY, cache_salt=str(i)) for i in range(SPREAD)]
    time.sleep(1)
    assert lm.is_paused() and not any(handle.done for handle in handles)
    lm.resume()
    [handle.result() for handle in handles]
    assert other.end() == 0
