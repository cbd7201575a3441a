"""The declared stage of a rank without vLLM: its two ways, functions and device tables, over passes that are made up here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from pymllm_interp import Ablate, Capture, Gate, Patch, Scale, Steer
from pymllm_interp.captures import Project
from pymllm_interp.config import ServerConfig
from pymllm_interp.core import norm_kind
from pymllm_interp.core.model_spec import EMBED_SITE, ModelSpec, final_norm_site, input_add
from pymllm_interp.core.step import RequestEnd, RequestHooks
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.hooks.interventions.vector_pool import VectorPool
from pymllm_interp.interventions import Generated
from pymllm_interp.vllm_engine.settings import WITH_TABLES, limits_of
from pymllm_interp.vllm_engine.worker.stage import RankStage

LAYERS, WIDTH, PROMPT, NEW = 3, 64, 11, 4
SPEC = ModelSpec.of(
    LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=50, max_position_embeddings=64
    ),
    torch.float32,
)
CONFIG = ServerConfig(capture_ring_bytes=1 << 20, max_intervention_vectors=64, max_capture_bytes=1 << 22)
TAPS = 2 * LAYERS + 2
WEIGHT = torch.linspace(0.5, 1.5, WIDTH)


def vector(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (WIDTH,)), generator=torch.Generator().manual_seed(seed))


HOOKS = {
    "a": RequestHooks([Steer("resid_post.1", vector(1), 2.0), Ablate("attn_out.2", vector(2))], ["resid_post.*"], NEW),
    "b": RequestHooks([], ["mlp_out.1", Capture("resid_mid.*", reduce=Project(vector(3, 2, WIDTH)))], NEW),
    "c": RequestHooks(
        [
            Patch("resid_pre.1", vector(4, 2, WIDTH), positions=[0, -1]),
            Scale("embed", 0.5, positions=Generated(1)),
            Steer("final_norm", vector(5), when=Gate(vector(6), 0.0, site="resid_post.0")),
        ],
        [Capture("final_norm"), Capture("resid_post.2", reduce="mean")],
        NEW,
    ),
    "plain": RequestHooks(),
}


def hooks_of(name: str) -> RequestHooks:
    found = HOOKS[name]
    captures = [Capture(one) if isinstance(one, str) else one for one in found.captures]
    return RequestHooks(found.interventions, captures, found.max_tokens, PROMPT - 1)


class Rank:
    """A stage, and what vLLM and the client do around it."""

    def __init__(self, rows: int, rank: int = 0, device: str = "cpu", within: int | None = None) -> None:
        self.device, self.within = torch.device(device), within
        self.pool = VectorPool(CONFIG.max_intervention_vectors, WIDTH)
        self.stage = RankStage(CONFIG, SPEC, self.device, 64, rows, TAPS, rank, None)  # pyright: ignore
        self.bound: dict[str, Declared] = {}

    def add(self, name: str) -> None:
        hooks = hooks_of(name)
        if not hooks.declares:
            return
        if self.stage.in_tables:
            declared = Declared(BoundHooks.of_request(hooks, PROMPT, SPEC, limits_of(CONFIG, self.device.type), None))
            hooks.vector_rows = self.pool.acquire(declared)
            if self.stage.stage.capture_ring is not None:
                self.stage.stage.capture_ring.open()
        self.stage.add(f"vllm-{name}", name, hooks, PROMPT)

    def step(self, parts: list[tuple[str, int, int]]) -> torch.Tensor:
        """A pass over (request, first position, positions). Returns the stream behind the last layer, and the norm's output."""
        starts = np.cumsum([0, *(count for _, _, count in parts)])
        stage = self.stage
        stage.begin(
            [f"vllm-{name}" for name, _, _ in parts], starts, np.array([first for _, first, _ in parts]), "made up"
        )
        rows = [(name, first + i) for name, first, count in parts for i in range(count)]
        stream = torch.stack([_value(name, position, 0) for name, position in rows]).to(self.device)
        stage.state(stream, EMBED_SITE)
        for add in range(1, input_add(LAYERS) + 1):
            delta = torch.stack([_value(name, position, add) for name, position in rows]).to(self.device)
            if self.within is None:
                stage.pair(delta, stream, add)
                stream = stream + delta
            else:
                stage.norm(delta, stream, WEIGHT.to(self.device), 1e-5, self.within, add)
        if self.within is None:
            scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-5)
            normed = stream * scale * WEIGHT.to(self.device)
            stage.state(normed, final_norm_site(LAYERS))
        else:
            normed = delta
        stage.end()
        return torch.cat([stream, normed], -1).cpu()

    def finish(self, name: str, generated: int) -> Any:
        computed = PROMPT + generated - 1
        end = RequestEnd(name, list(range(PROMPT)), list(range(generated)), computed, computed, 0, RequestHooks())
        (found,) = self.stage.finish([end])
        return found.result(60)


def _value(name: str, position: int, add: int) -> torch.Tensor:
    return vector(hash((name == "a", name == "b", name == "c", position, add)) % 10**6)


@pytest.fixture(params=["functions", "tables"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WITH_TABLES, "1" if request.param == "tables" else "0")
        yield request.param


def run(rank: Rank, chunks: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All requests at once, their prompts in chunks, then tokens one by one. Returns states by request, and results."""
    names = list(HOOKS)
    for name in names:
        rank.add(name)
    states: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    first = 0
    for count in [*chunks, *[1] * (NEW - 1)]:
        out = rank.step([(name, first, count) for name in names])
        for name, part in zip(names, out.split(count), strict=True):
            states[name].append(part)
        first += count
    results = {name: rank.finish(name, NEW) for name in names if HOOKS[name].declares}
    for name in names:
        rank.stage.remove(f"vllm-{name}")
    return {name: torch.cat(parts) for name, parts in states.items()}, results


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [[PROMPT], [4, 4, 3], [1, 9, 1]])
def test_functions_and_tables_do_the_same(chunks: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for tables in ("0", "1"):
        monkeypatch.setenv(WITH_TABLES, tables)
        found.append(run(Rank(rows=8, device=device if tables == "1" else "cpu"), chunks))
    (states, results), (other_states, other_results) = found
    for name, rows in states.items():
        torch.testing.assert_close(rows, other_states[name], atol=1e-5, rtol=1e-5)
    for name, result in results.items():
        other = other_results[name]
        assert result.error is None and other.error is None
        assert result.declared.applied == other.declared.applied and result.declared.captured == other.declared.captured
        assert list(result.declared.activations) == list(other.declared.activations)
        for site, rows in result.declared.activations.items():
            torch.testing.assert_close(rows, other.declared.activations[site], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_in_the_place_of_the_norms_the_same_is_done(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITH_TABLES, "1")
    (states, results), (other_states, other_results) = (
        run(Rank(rows=8, device=device, within=within), [4, 7]) for within in (None, norm_kind.RMS)
    )
    for name, rows in states.items():
        torch.testing.assert_close(rows, other_states[name], atol=1e-5, rtol=1e-5)
    for name, result in results.items():
        other = other_results[name]
        assert result.error is None and other.error is None  # each tap has met each row
        for site, rows in result.declared.activations.items():
            torch.testing.assert_close(rows, other.declared.activations[site], atol=1e-5, rtol=1e-5)


def test_rows_of_nobody_keep_all_bits(way: str) -> None:
    rank = Rank(rows=8)
    states, _ = run(rank, [5, 6])
    alone = Rank(rows=8)
    untouched = torch.cat(
        [alone.step([("plain", first, count)]) for first, count in ((0, 5), (5, 6), (11, 1), (12, 1), (13, 1))]
    )
    assert torch.equal(states["plain"], untouched)


def test_a_steered_state_is_the_state_and_the_vector(way: str) -> None:
    rank = Rank(rows=8)
    _, results = run(rank, [PROMPT])
    captured = results["a"].declared.activations["resid_post.1"]
    wanted = []
    for position in range(PROMPT + NEW - 1):
        wanted.append(sum(_value("a", position, add) for add in range(5)) + 2.0 * vector(1))
    torch.testing.assert_close(captured, torch.stack(wanted), atol=1e-5, rtol=1e-5)


def test_rows_of_a_table_go_around(way: str) -> None:
    """Fewer rows than requests that vLLM knows: those that wait give theirs up, and come back with what was counted."""
    rank = Rank(rows=2)
    wanted, results = run(Rank(rows=8), [PROMPT])
    for name in ("a", "b", "c"):
        rank.add(name)
    states: dict[str, list[torch.Tensor]] = {name: [] for name in ("a", "b", "c")}
    for first, count in ((0, PROMPT), *((PROMPT + i, 1) for i in range(NEW - 1))):
        for pair in (("a", "b"), ("c",)):
            out = rank.step([(name, first, count) for name in pair])
            for name, part in zip(pair, out.split(count), strict=True):
                states[name].append(part)
    for name, parts in states.items():
        torch.testing.assert_close(torch.cat(parts), wanted[name], atol=1e-5, rtol=1e-5)
        result = rank.finish(name, NEW)
        assert result.error is None, result.error
        for site, rows in result.declared.activations.items():
            torch.testing.assert_close(rows, results[name].declared.activations[site], atol=1e-5, rtol=1e-5)


def test_code_without_the_op_is_told(way: str) -> None:
    rank = Rank(rows=8)
    rank.add("a")
    rank.stage.begin(["vllm-a"], np.array([0, PROMPT]), np.array([0]), "made up")
    rank.stage.end()  # no tap was called
    assert "met 0 of" in rank.finish("a", 1).error


def test_a_second_rank_steers_and_captures_nothing(way: str) -> None:
    first, second = (run_without_results(Rank(rows=8, rank=rank)) for rank in (0, 1))
    for name, rows in first.items():
        assert torch.equal(rows, second[name])


def run_without_results(rank: Rank) -> dict[str, torch.Tensor]:
    for name in HOOKS:
        rank.add(name)
    out = rank.step([(name, 0, PROMPT) for name in HOOKS])
    return dict(zip(HOOKS, out.split(PROMPT), strict=True))


def test_a_step_that_waits_for_the_ring_does_not_stop_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind results that are completed on the copier's thread is a span, and a step waits for it."""
    monkeypatch.setenv(WITH_TABLES, "1")
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, capture_ring_bytes=PROMPT * LAYERS * WIDTH * 4 * 6 // 5))
    rank = Rank(rows=8)
    rank.add("a")
    rank.step([("a", 0, PROMPT)])
    ring = rank.stage.stage.capture_ring
    assert ring is not None
    ring.wait()
    HOOKS["again"] = HOOKS["a"]
    try:
        rank.add("again")
        gate = threading.Event()
        ring.after(lambda: bool(gate.wait(60)) or None)
        end = RequestEnd("a", [0] * PROMPT, [0], PROMPT, PROMPT, 0, RequestHooks())
        (found,) = rank.stage.finish([end])
        rank.step([("again", 0, PROMPT - 1)])  # its span is behind the results
        waiting = threading.Thread(target=rank.step, args=([("again", PROMPT - 1, NEW)],), daemon=True)
        waiting.start()
        threading.Timer(0.5, gate.set).start()
        assert found.result(60).error is None
        waiting.join(60)
        assert not waiting.is_alive()
    finally:
        del HOOKS["again"]
