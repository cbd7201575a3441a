"""Which replica serves a call, whether it runs again, and which order of a vector holds: without processes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pymllm_interp import __version__
from pymllm_interp.server.engines import vector_orders
from pymllm_interp.server.engines.replicas_door import ReplicasDoor, ReplicatedCall
from pymllm_interp.server.engines.roster import (
    BLOCK,
    LOAD_FACTOR,
    LOAD_MARGIN,
    LinkKeys,
    Replica,
    choose,
    key_of,
    least_loaded,
    ranked,
)
from pymllm_interp.server.engines.vector_orders import VectorOrders
from pymllm_interp.server.http.metrics import merged_stats
from pymllm_interp.server.settings import ServeSettings
from pymllm_interp.wire.messages import (
    Accepted,
    CapturedStates,
    DropVector,
    Finished,
    FromEngine,
    PutVector,
    Ready,
    Submit,
    Token,
)

NAMES = [f"r{i}" for i in range(5)]
STEER = {"op": "steer", "site": "resid_post.1", "vector": "v"}


def submit(
    prompt: list[int], owner: str = "me", edits: bytes = b"", salt: str | None = None, ops: list | None = None
) -> Submit:
    given = [ops] if ops else []
    return Submit(1, owner, [prompt], [None], interventions=given, options={"cache_salt": salt}, edits=edits)


def test_prompts_with_a_common_first_block_have_one_key():
    first = list(range(BLOCK))
    key = key_of(submit([*first, 1, 2]))
    assert key == key_of(submit([*first, 3])) != key_of(submit([1, *first]))
    assert key_of(Submit(7, "me", [[*first, 1]], [None], options={"cache_salt": None})) == key  # whatever its number


def test_owner_salt_and_edits_are_in_the_key():
    keys = [
        key_of(submit([1, 2])), key_of(submit([1, 2], owner="you")), key_of(submit([1, 2], salt="s")),
        key_of(submit([1, 2], edits=b"code")), key_of(submit([1, 2], ops=[STEER])),
        key_of(submit([1, 2], ops=[STEER | {"scale": 2.0}])),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


@given(st.binary(min_size=1, max_size=8), st.sampled_from(NAMES))
def test_a_replica_that_goes_moves_only_its_own_keys(key: bytes, gone: str):
    before = ranked(key, NAMES)
    after = ranked(key, [name for name in NAMES if name != gone])
    assert after == [name for name in before if name != gone]


def test_keys_are_spread_evenly():
    counts = Counter(ranked(bytes([i % 256, i // 256]), NAMES)[0] for i in range(5000))
    assert all(850 < counts[name] < 1150 for name in NAMES), counts


@given(st.binary(min_size=1, max_size=8), st.lists(st.integers(0, 50), min_size=2, max_size=5))
def test_the_second_choice_takes_what_the_first_is_too_busy_for(key: bytes, counts: list[int]):
    loads = dict(zip(NAMES, counts, strict=False))
    first, second, *_ = ranked(key, list(loads))
    busier = loads[first] > LOAD_FACTOR * loads[second] + LOAD_MARGIN
    assert choose(key, loads) == (second if busier else first)


def test_one_hot_prompt_loads_two_replicas_evenly():
    loads = {"a": 0, "b": 0, "c": 0}
    for _ in range(300):
        loads[choose(b"hot", loads)] += 1
    used = sorted(loads.values())
    assert used[0] == 0 and used[1] > 0.75 * used[2]


@pytest.mark.parametrize("fronts", [1, 2])
@pytest.mark.parametrize("streams", [8, 16, 32])
def test_shared_beginnings_are_found_nearly_as_often_as_on_one_replica(fronts: int, streams: int):
    """24 beginnings with 8 endings each: the share of requests whose replica had one with their beginning before."""
    shares = []
    for seed in range(10):
        rng = random.Random(seed)
        keys = [rng.randbytes(8) for _ in range(24)] * 8
        rng.shuffle(keys)
        loads = [{"r0": 0, "r1": 0} for _ in range(fronts)]
        running: list[tuple[dict[str, int], str]] = []
        seen, hits = set[tuple[bytes, str]](), 0
        for number, key in enumerate(keys):
            if len(running) == streams:
                ended, name = running.pop(rng.randrange(streams))
                ended[name] -= 1
            own = loads[number % fronts]
            name = choose(key, own)
            own[name] += 1
            running.append((own, name))
            hits += (key, name) in seen
            seen.add((key, name))
        shares.append(hits / (7 * 24))
    assert sum(shares) / len(shares) > 0.92


def test_traces_go_where_least_runs_and_else_where_the_owner_was():
    assert least_loaded("me", {"a": 3, "b": 1, "c": 2}) == "b"
    assert least_loaded("me", dict.fromkeys("abc", 0)) == least_loaded("me", dict.fromkeys("cab", 7))
    assert len({least_loaded(f"owner {i}", dict.fromkeys("abc", 0)) for i in range(50)}) == 3


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_replicas_that_know_the_same_orders_have_the_same_vectors(seed: int):
    """In whatever order, and however often, they came."""
    rng = random.Random(seed)
    orders = [
        PutVector(0, "me", rng.choice("ab"), bytes([rng.randrange(4)]), "safetensors", rng.randrange(6))
        if rng.random() < 0.7
        else DropVector(0, "me", rng.choice("ab"), rng.randrange(6))
        for _ in range(8)
    ]
    found = []
    for _ in range(3):
        known = VectorOrders()
        for order in rng.sample(orders, len(orders)) + rng.choices(orders, k=4):
            assert known.is_news(order) == known.take(order)
        found.append(({name: (v.stamp, v.body) for name, v in known.vectors("me").items()}, len(known.all())))
    assert found[0] == found[1] == found[2]


def test_names_that_were_dropped_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vector_orders, "MOST_DROPPED", most := 16)
    known = VectorOrders()
    for stamp in range(3 * most):
        known.take(DropVector(0, "me", f"v{stamp}", stamp))
    assert most <= len(known.all()) < 2 * most
    late = PutVector(0, "me", f"v{3 * most - 1}", b"", "gguf", 5)
    assert not known.is_news(late)  # it stays dropped


def test_a_replica_of_another_version_or_with_other_weights_is_refused_with_both_named():
    replica = Replica("r1", "tcp://127.0.0.1:1", "key", "0.0.1", "a" * 64)
    assert f"r1 runs pymllm-interp 0.0.1, and this is {__version__}" in replica.differs_from("a" * 64)
    same = dataclasses.replace(replica, version=__version__)
    assert not same.differs_from("a" * 64) and not same.differs_from("")
    assert "r1 has other weights (aaaaaaaa) than the cluster (bbbbbbbb)" in same.differs_from("b" * 64)


def test_counters_are_added():
    one = {"steps": 2, "execution": {"plain": 2}, "prefix_cache": None, "name": "x", "on": True}
    other = {"steps": 3, "execution": {"plain": 1, "modules": 4}, "prefix_cache": {"a": 1}, "name": "y", "on": True}
    assert merged_stats([one]) == one
    added = {"steps": 5, "execution": {"plain": 3, "modules": 4}, "prefix_cache": {"a": 1}, "name": "x", "on": True}
    assert merged_stats([one, other]) == added


ACCEPTED = Accepted(1, [], [])
STATES = CapturedStates(1 << 40, {}, data=b"")


@pytest.mark.parametrize(
    ("again", "edits", "messages"),
    [
        (True, b"", [ACCEPTED]), (False, b"code", [ACCEPTED]), (False, b"", [ACCEPTED, Token(1, 0, 5)]),
        (False, b"", [ACCEPTED, Finished(1, 0, [5], "length", captured=STATES)]),
    ],
)  # fmt: skip
def test_a_call_runs_again_unless_its_client_would_see_it_twice(again: bool, edits: bytes, messages: list[FromEngine]):
    """Large states are on their way to the client while they are written to the front's store."""

    async def found() -> tuple[bool, list[FromEngine]]:
        door = ReplicasDoor(ServeSettings(model={}, server={}, name="m"), LinkKeys.new(), follow=None)  # pyright: ignore
        call = ReplicatedCall(1, 1 << 20, submit([1], edits=edits))
        for message in messages:
            door.deliver(call, message)
        runs = call.may_run_again
        door.deliver(call, ACCEPTED)  # of its second run
        call.put(Token(1, 0, 6))
        shown = [await call.next() for _ in range(2)]
        await door.shutdown()
        return runs, shown

    runs, shown = asyncio.run(found())
    assert runs == again and [type(message) for message in shown] == [Accepted, Token]


def test_a_second_replicas_tokenizer_is_not_written_over_the_one_that_is_read():
    """Links of two replicas open at the same time, and both ask for the files: the front reads them once the first has come."""

    async def found() -> tuple[bytes, object]:
        door = ReplicasDoor(ServeSettings(model={}, server={}, name="m"), LinkKeys.new(), follow=None)  # pyright: ignore
        for name in ("r0", "r1"):
            door._take(Ready(0, {"replica": name, "of": name}, {}), {"tokenizer_config.json": name.encode()})
        content = (door.tokenizer_folder / "tokenizer_config.json").read_bytes()
        await door.shutdown()
        return content, door.info

    assert asyncio.run(found()) == (b"r0", {"of": "r0"})
