"""Results of a rank on their way to the client, at sizes at which the client maps them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_processes import pidfds
from transformers import LlamaConfig

from pymllm_interp import Capture
from pymllm_interp.captures import Project
from pymllm_interp.config import ServerConfig
from pymllm_interp.core.events import EngineSleepingError
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.core.request import Request
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.core.step import RequestEnd, RequestHooks
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.captures.activations import Activations, CaptureError, lost
from pymllm_interp.hooks.captures.egress.result_memory import rounded
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.hooks.interventions.vector_pool import VectorPool
from pymllm_interp.utils.stage_times import StageTimes
from pymllm_interp.vllm_engine.client import engine as client_engine
from pymllm_interp.vllm_engine.client.engine import VllmRequestEngine
from pymllm_interp.vllm_engine.client.ranks.rank_watch import RankWatch
from pymllm_interp.vllm_engine.client.results_link import ResultsLink
from pymllm_interp.vllm_engine.results import AskedRows, SharedResults, TensorBlock, host_name, pid_space, read_block
from pymllm_interp.vllm_engine.settings import WITH_TABLES, limits_of
from pymllm_interp.vllm_engine.worker.egress import result_arena
from pymllm_interp.vllm_engine.worker.egress.egress import Egress
from pymllm_interp.vllm_engine.worker.egress.result_arena import ResultArena
from pymllm_interp.vllm_engine.worker.split_rows import SplitRows
from pymllm_interp.vllm_engine.worker.stage import RankStage

LAYERS, WIDTH, PROMPT, NEW = 4, 2048, 30, 34
SPEC = ModelSpec.of(
    LlamaConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=50), torch.float32
)


def arrived(found: Activations, arena: ResultArena | None) -> tuple[Activations, int]:
    """What the client reads, and the bytes that were copied."""
    block = TensorBlock(arena)
    shared = SharedResults(arena and (arena.name, arena.size), lambda: None)
    pickled = block.dumped(found)
    return read_block(pickled, block.sent() if block.size else None, shared), block.size


def columns(memory: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, ...]:
    return memory.split(widths, 1)


@pytest.mark.parametrize("way", ["arena", "bytes"])
def test_captured_sites_arrive_as_they_are(way: str) -> None:
    """Alike sites side by side, others, reduced ones, sites with heads, gaps between sites, and empty ones."""
    arena = ResultArena(1 << 26, 1 << 26) if way == "arena" else None
    memory = torch.randn(40, 3 * WIDTH + 5 * 96)
    if arena is not None:
        memory = arena.empty(tuple(memory.shape), torch.float32).copy_(memory)
    at, tokens, last = torch.arange(40), torch.arange(40) + 7, torch.tensor([39])
    one, two, three, *small = columns(memory, [WIDTH] * 3 + [96] * 5)
    sent = Activations(LAYERS)
    sent.add("resid_post.0", one, at, tokens)
    sent.add("resid_post.1", two, at, tokens)
    sent.add("resid_post.2", three, at, tokens)
    sent.add("z.0", small[0].unflatten(1, (4, 24)), at, tokens)
    sent.add("mlp_out.0", small[1], at, tokens)
    sent.add("mlp_out.1", small[3], at, tokens)  # a gap before it
    sent.add("mlp_out.2", small[4], at, tokens + 1)
    sent.add("attn_out.0", torch.randn(1, 9), last, last)
    sent.add("attn_out.1", torch.randn(40, 3), at, tokens, {"indexes": torch.arange(120).view(40, 3)})
    sent.add("attn_out.2", torch.empty(0, 9), last[:0], last[:0])
    found, copied = arrived(sent, arena)
    assert list(found) == list(sent) and found.layers("mlp_out") == [0, 1, 2]
    for site in sent:
        assert torch.equal(found.as_arrived(site), sent.as_arrived(site)), site
        assert torch.equal(found.positions[site], sent.positions[site]), site
        assert torch.equal(found.token_ids[site], sent.token_ids[site]), site
    assert list(found.indexes) == ["attn_out.1"] and not found.counts
    assert torch.equal(found.indexes["attn_out.1"], sent.indexes["attn_out.1"])
    if arena is not None:
        assert copied < 8000  # not the states
        found.as_arrived("resid_post.2")[3, 5] = 7.0
        assert memory[3, 2 * WIDTH + 5] == 7.0
        read = found["resid_post.2"]
        read[3, 5] = 8.0  # the caller's own
        assert memory[3, 2 * WIDTH + 5] == 7.0


def test_lost_states_arrive_as_an_error() -> None:
    found, _ = arrived(lost(CaptureError("the ring was full")), None)
    with pytest.raises(CaptureError, match="the ring was full"):
        found["resid_post.0"]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankStage, ResultsLink]]:
    """A rank with tables on a CPU, and a client of it."""
    monkeypatch.setenv(WITH_TABLES, "1")
    config = ServerConfig(capture_ring_bytes=1 << 22, max_capture_bytes=1 << 26, capture_kept_bytes=1 << 28)
    stage = RankStage(config, SPEC, torch.device("cpu"), 256, 8, 0, SplitRows(SPEC), None)  # pyright: ignore
    egress = Egress(b"key", stage.finish, stage.rows, stage.arena)
    link = ResultsLink(egress.address, b"key", lambda function, *given: function(*given))
    yield stage, link
    link.close()
    egress.close()
    stage.close()


def outcome_of(link: ResultsLink, name: str, computed: int, streamed: int | None = None) -> Any:
    got: Future[Any] = Future()
    end = RequestEnd(
        name, [0] * PROMPT, [0] * (computed - PROMPT + 1), computed, computed, 0, RequestHooks(), num_streamed=streamed
    )
    link.ask(end, got.set_result)
    return got.result(60)


def rows_of(link: ResultsLink, name: str, start: int, stop: int) -> Any:
    got: Future[Any] = Future()
    link.ask(AskedRows(name, start, [0] * (stop - start)), got.set_result)
    return got.result(60)


def test_no_message_waits_for_another_to_be_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems delay acknowledgements by 40 ms."""
    ends: list[Any] = []
    accept = Listener.accept
    monkeypatch.setattr(Listener, "accept", lambda self: ends.append(found := accept(self)) or found)
    egress = Egress(b"key", lambda _: [], lambda _: Future(), ResultArena(0, 1 << 20))
    link = ResultsLink(egress.address, b"key", lambda function, *given: function(*given))
    for connection in (*ends, link._connection):
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert len(ends) == 1
    link.close()
    egress.close()


def test_strangers_keep_no_client_waiting() -> None:
    egress = Egress(b"key", lambda ends: [Future() for _ in ends], lambda _: Future(), ResultArena(0, 1 << 20))
    with socket.create_connection(egress.address):  # and never answers
        with pytest.raises(AuthenticationError):
            Client(egress.address, authkey=b"another key")
        for _ in range(50):  # one client after the other, whose files have the same number
            ResultsLink(egress.address, b"key", lambda function, *given: function(*given)).close()
    egress.close()


def test_a_requests_states_are_copied_once(
    rank: tuple[RankStage, ResultsLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the host ring to the memory that the client maps; the next request gets that memory."""
    stage, link = rank
    times = StageTimes(True)
    monkeypatch.setattr(result_arena, "TIMES", times)
    pool, limits = VectorPool(16, WIDTH), limits_of(ServerConfig(), "cpu")
    ring = stage.stage.capture_ring
    assert ring is not None
    ring.open()
    taken, wanted = [], -(-rounded(LAYERS * (PROMPT + NEW - 1) * WIDTH * 4) // 4096) * 4096
    for turn in range(3):
        captures = [Capture("resid_post.*"), Capture("mlp_out.1", reduce=Project(torch.randn(2, WIDTH)))]
        hooks = RequestHooks([], captures, NEW, PROMPT - 1)
        hooks.vector_rows = pool.acquire(Declared(BoundHooks.of_request(hooks, PROMPT, SPEC, limits, None)))
        stage.add(f"vllm-{turn}", f"own-{turn}", hooks, PROMPT)
        first, computed = 0, PROMPT + NEW - 1
        for count in (PROMPT, *[1] * (NEW - 1)):
            stage.begin([f"vllm-{turn}"], np.array([0, count]), np.array([first]), "made up")
            ring.memory.normal_(generator=torch.Generator().manual_seed(turn))
            stage.end()
            first += count
        result = outcome_of(link, f"own-{turn}", computed)
        assert result.declared.activations.error is None
        states = result.declared.activations.stack("resid_post")
        assert states.shape == (LAYERS, computed, WIDTH) and len(states.unique()) > 1000
        stage.remove(f"vllm-{turn}")
        del result, states
        outcome_of(link, "nobody", PROMPT)  # with what was freed
        taken.append({name: int(own["bytes"]) for name, own in times.taken().items() if "bytes" in own})
        assert (stage.arena.kept, stage.arena.live) == (wanted, 0)
    fresh, kept = ({f"results: {kind} block": wanted} for kind in ("fresh", "kept"))
    assert taken == [fresh, kept, kept]  # not once more in a message


def test_rows_of_a_running_request_are_copies_of_its_result(rank: tuple[RankStage, ResultsLink]) -> None:
    """Their memory stays the rank's, which writes on and gives it away once, with the result."""
    stage, link = rank
    pool, limits = VectorPool(16, WIDTH), limits_of(ServerConfig(), "cpu")
    ring = stage.stage.capture_ring
    assert ring is not None
    ring.open()
    captures = [
        Capture("resid_post.1", stream=True),
        Capture("mlp_out.1", stream=True, reduce="mean"),
        Capture("embed"),
    ]
    hooks = RequestHooks([], captures, NEW, PROMPT - 1)
    hooks.vector_rows = pool.acquire(Declared(BoundHooks.of_request(hooks, PROMPT, SPEC, limits, None)))
    stage.add("vllm-a", "a", hooks, PROMPT)
    parts, first = [], 0
    for count in (PROMPT, 1, 1):
        stage.begin(["vllm-a"], np.array([0, count]), np.array([first]), "made up")
        ring.memory.normal_(generator=torch.Generator().manual_seed(first))
        stage.end()
        if first + count < PROMPT + 2:  # the last ones come with the result
            parts += [part for rows in rows_of(link, "a", first, first + count) for part in rows.parts()]
        first += count
    assert not stage.arena.take_back() and rows_of(link, "nobody", 0, 3) is None
    result = outcome_of(link, "a", PROMPT + 2, PROMPT + 1).declared
    parts += [part for rows in result.rows for part in rows.parts()]
    assert [list(part) for part in parts] == [["resid_post.1"]] * 3 + [["mlp_out.1"]]
    for site in ("resid_post.1", "mlp_out.1"):
        own = [part[site] for part in parts if site in part]
        assert torch.equal(torch.cat(own), result.activations[site])
    assert rows_of(link, "a", 0, 3) is None


# -- processes of ranks ---------------------------------------------------------------------


def test_the_end_of_ranks_leaves_the_memory_of_their_users_process() -> None:
    """The one rank of an engine is a child of the user's process, whose segments of shared memory are its own."""
    reduced = [f"{name}-tp:0-[0-1]-cpushm_0" for name in (f"vllm_dist_{os.getpid()}", os.getpid())]  # by ranks on CPUs
    script = (
        "import sys; from multiprocessing.shared_memory import SharedMemory as S; s = S(create=True, size=64); "
        "t = [S(name, create=True, size=64) for name in sys.argv[1:]]; print(s.name, flush=True); sys.stdin.read()"
    )
    before = pidfds()
    mine = SharedMemory(create=True, size=64)
    command = [sys.executable, "-c", script, *reduced]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    theirs = [Path("/dev/shm") / name for name in (rank.stdout.readline().strip(), *reduced)]
    try:

        async def watched() -> RankWatch:
            own = {"host": host_name(), "pid": rank.pid, "pid_space": pid_space()}
            other = own | {
                "pid": os.getpid(),
                "pid_space": "pid:[1]",
            }  # this number is another process's in a container
            made = RankWatch([own, other], [], lambda what: None)
            made.close()
            return made

        assert all(file.exists() for file in theirs)
        asyncio.run(watched()).release()
        assert pidfds() == before and rank.poll() is None and all(file.exists() for file in theirs)
        asyncio.run(watched()).kill()
        assert rank.wait(10) == -9 and not [file for file in theirs if file.exists()] and pidfds() == before
        SharedMemory(mine.name).close()
    finally:
        rank.kill()
        mine.close()
        mine.unlink()


def test_no_request_enters_an_engine_that_falls_asleep_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep refuses new requests, and then sees that none is live: one in between would run without memory."""
    engine: Any = VllmRequestEngine.__new__(VllmRequestEngine)
    engine.lock, engine._closing, engine._live = threading.Lock(), None, {}
    engine.core = SimpleNamespace(soon=lambda *_: None)
    made = client_engine.Live

    def live(*args: Any) -> Any:
        engine.why_closed = EngineSleepingError("the engine sleeps")
        assert not engine._live
        return made(*args)

    monkeypatch.setattr(client_engine, "Live", live)
    with pytest.raises(EngineSleepingError):
        engine.submit_all([([Request("1", [1], SamplingParams(), 1, 0)], SimpleNamespace())])
    assert not engine._live
