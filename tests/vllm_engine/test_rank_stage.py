"""The declared stage of a rank without vLLM: its two ways, functions and device tables, over passes that are made up here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from pymllm_interp import Ablate, Capture, Gate, Patch, Scale, Steer
from pymllm_interp.attention.cut_edges import PassCuts, RequestCuts
from pymllm_interp.captures import Project
from pymllm_interp.config import ServerConfig
from pymllm_interp.core import norm_kind
from pymllm_interp.core.model_spec import EMBED_SITE, ModelSpec, final_norm_site, inner_site, input_add
from pymllm_interp.core.step import RequestEnd, RequestHooks
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.hooks.interventions.device_tables import DeviceTables
from pymllm_interp.hooks.interventions.vector_pool import VectorPool
from pymllm_interp.interventions import Generated
from pymllm_interp.vllm_engine.client.core import VllmCore
from pymllm_interp.vllm_engine.settings import WITH_TABLES, limits_of
from pymllm_interp.vllm_engine.worker import batch
from pymllm_interp.vllm_engine.worker.blocks import traces
from pymllm_interp.vllm_engine.worker.blocks.kept_kv import KeptKV
from pymllm_interp.vllm_engine.worker.hooks_of import HooksOf
from pymllm_interp.vllm_engine.worker.split_rows import SplitRows
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
        self.stage = RankStage(CONFIG, SPEC, self.device, 64, rows, TAPS, SplitRows(SPEC, rank=rank), None)  # pyright: ignore
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

    def step(self, parts: list[tuple[str, int, int]], drafts: int = 0, fails: bool = False) -> torch.Tensor:
        """A pass over (request, first position, positions). Returns the stream behind the last layer, and the norm's output.

        Args:
            fails: vLLM's layers ran in a pass with blocks before it, which failed.
        """
        starts = np.cumsum([0, *(count for _, _, count in parts)])
        stage = self.stage
        stage.begin(
            [f"vllm-{name}" for name, _, _ in parts],
            starts,
            np.array([first for _, first, _ in parts]),
            "made up",
            {f"vllm-{name}": [0] * drafts for name, _, _ in parts},
        )
        rows = [(name, first + i) for name, first, count in parts for i in range(count)]
        if fails:
            set_back = stage.taps.counts()
            with stage.taps.within_layers(is_idle=False):
                self._run(rows)
            set_back()
        out = self._run(rows)
        stage.end()
        return out

    def _run(self, rows: list[tuple[str, int]]) -> torch.Tensor:
        stage = self.stage
        stream = torch.stack([_value(name, position, 0) for name, position in rows]).to(self.device)
        stage.taps.state(stream, EMBED_SITE)
        for add in range(1, input_add(LAYERS) + 1):
            delta = torch.stack([_value(name, position, add) for name, position in rows]).to(self.device)
            if self.within is None:
                stage.taps.pair(delta, stream, add)
                stream = stream + delta
            else:
                stage.taps.norm(delta, stream, WEIGHT.to(self.device), 1e-5, self.within, add)
        if self.within is None:
            scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-5)
            normed = stream * scale * WEIGHT.to(self.device)
            stage.taps.state(normed, final_norm_site(LAYERS))
        else:
            normed = delta
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


def inner_pass(rank: Rank, parts: list[tuple[str, int, int]]) -> torch.Tensor:
    """A pass with the taps of an engine with inner sites. Returns its rows of q, k, v and z of all layers, side by side."""
    starts = np.cumsum([0, *(count for _, _, count in parts)])
    ids, first = [f"vllm-{name}" for name, _, _ in parts], np.array([first for _, first, _ in parts])
    rank.stage.begin(ids, starts, first, "made up")
    rows, found, taps = int(starts[-1]), [], rank.stage.taps
    stream = torch.ones(rows, WIDTH)
    taps.state(stream, EMBED_SITE)
    for layer in range(LAYERS):
        q, k, v, z = (inner_site(LAYERS, layer, kind) for kind in ("q", "k", "v", "z"))
        qkv, heads = vector(layer, rows, 2 * WIDTH), vector(9 + layer, rows, WIDTH)
        taps.inner(qkv, [q, k, -1], [WIDTH, WIDTH // 2, WIDTH // 2])
        taps.inner(heads, [z], [WIDTH])
        taps.pair(vector(20 + layer, rows, WIDTH), stream, 2 * layer + 1)
        taps.pair(vector(30 + layer, rows, WIDTH), stream, 2 * layer + 2)
        found += [qkv, heads]
        assert v not in taps.asked
    taps.state(stream, final_norm_site(LAYERS))
    rank.stage.end()
    return torch.cat(found, -1)


def test_inner_sites_by_functions_and_tables_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one tensor, single heads, and vectors wider than a row of the pool. Rows without any keep all bits."""
    spec = replace(SPEC, num_key_value_heads=2)
    hooks = RequestHooks(
        [
            Steer("q.0", vector(1, WIDTH), 2.0), Scale("z.1", 0.0, heads=[0, 2]), Ablate("k.2", vector(2, WIDTH // 2)),
            Steer("k.1", vector(3, 16), heads=[1], positions=slice(1, None, 2)),
        ],
        [Capture("q.*"), Capture("k.1", heads=[1]), Capture("z.2", reduce=Project(vector(4, 2, WIDTH)))], NEW,
    )  # fmt: skip
    monkeypatch.setitem(HOOKS, "inner", hooks)
    monkeypatch.setitem(globals(), "SPEC", spec)
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, inner_sites=("q", "k", "z")))
    monkeypatch.setitem(globals(), "TAPS", TAPS + 3 * LAYERS)
    found = []
    for tables in ("0", "1"):
        monkeypatch.setenv(WITH_TABLES, tables)
        rank = Rank(rows=8)
        for name in ("inner", "plain"):
            rank.add(name)
        rows = [inner_pass(rank, [("inner", 0, 7), ("plain", 0, 5)]), inner_pass(rank, [("inner", 7, PROMPT - 7)])]
        found.append((torch.cat(rows), rank.finish("inner", 1)))
    (rows, result), (other_rows, other) = found
    torch.testing.assert_close(rows, other_rows, atol=1e-5, rtol=1e-5)
    plain = torch.cat(
        [vector(i, 12, width)[7:] for layer in range(LAYERS) for i, width in ((layer, 128), (9 + layer, 64))], -1
    )
    assert torch.equal(rows[7:12], plain) and torch.equal(other_rows[7:12], plain)
    assert (
        not torch.equal(rows[:7, :64], plain[:, :64].new_zeros(7, 64)) and result.error is None and other.error is None
    )
    assert result.declared.captured == other.declared.captured and result.declared.applied == other.declared.applied
    for site, states in result.declared.activations.items():
        torch.testing.assert_close(states, other.declared.activations[site], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.declared.activations["q.0"][:7].flatten(1), rows[:7, :WIDTH])


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


def test_rows_of_drafts_that_were_not_accepted_come_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a request, before a preemption, and at its end, also behind its last token."""
    plain, drafted = Rank(rows=8), Rank(rows=8)
    results = []
    for rank in (plain, drafted):
        for name in ("a", "b"):
            if rank is drafted:
                monkeypatch.setitem(HOOKS, name, replace(HOOKS[name], max_tokens=NEW + 3))
            rank.add(name)
            rank.step([(name, 0, PROMPT)])
    for i in range(NEW - 1):
        plain.step([(name, PROMPT + i, 1) for name in ("a", "b")])
    drafted.step([(name, PROMPT, 3) for name in ("a", "b")], drafts=2)  # none of two is accepted
    for name in ("a", "b"):
        drafted.stage.preempted(f"vllm-{name}", PROMPT + 2)
    drafted.step([(name, 0, PROMPT + 1) for name in ("a", "b")])
    drafted.step([(name, PROMPT + 1, 4) for name in ("a", "b")], drafts=3)  # one of three, and the request ends
    for rank in (plain, drafted):
        results.append({name: rank.finish(name, NEW) for name in ("a", "b")})
    for name in ("a", "b"):
        found, wanted = results[1][name], results[0][name]
        assert found.error is None and found.declared.applied == wanted.declared.applied
        assert found.declared.captured == wanted.declared.captured
        assert list(found.declared.activations) == list(wanted.declared.activations)
        for site, rows in wanted.declared.activations.items():
            torch.testing.assert_close(found.declared.activations[site], rows)


def test_batches_by_turns_are_laid_out_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on pipeline ranks, beside a plain request; then one joins, two come together, and one is preempted."""
    made, finds = [], batch.KeptBatches.add
    monkeypatch.setattr(batch.KeptBatches, "add", lambda self, one: made.append(one.ids) or finds(self, one))
    wanted, results = run(Rank(rows=8), [PROMPT])
    made.clear()
    rank, states, at = Rank(rows=8), {name: list[torch.Tensor]() for name in HOOKS}, dict.fromkeys(HOOKS, 0)
    for name in HOOKS:
        rank.add(name)

    def step(*parts: tuple[str, int]) -> None:
        out = rank.step([(name, at[name], count) for name, count in parts])
        for (name, count), part in zip(parts, out.split([count for _, count in parts]), strict=True):
            states[name].append(part)
            at[name] += count

    for count in (4, 4, 2):
        for name in HOOKS:
            step((name, count))
    assert made == [[f"vllm-{name}"] for name in HOOKS]
    step(("a", 1), ("b", 1))
    step(("c", 1), ("plain", 1))
    assert len(made) == 6
    for _ in range(2):
        step(("a", 1), ("b", 1))
        step(("c", 1))
    assert len(made) == 7
    rank.stage.preempted("vllm-c")
    rank.step([("c", 0, PROMPT + 2)])
    step(("a", 1), ("b", 1))
    step(("c", 1))
    for name, parts in states.items():
        if name != "plain":
            torch.testing.assert_close(torch.cat(parts), wanted[name], atol=1e-5, rtol=1e-5)
            found = rank.finish(name, NEW)
            assert found.error is None and found.steps == {"made up": 7 + (name == "c")}
            assert found.declared.applied == results[name].declared.applied
            assert found.declared.captured == results[name].declared.captured


@pytest.mark.parametrize("rows", [8, 1])
def test_rows_that_are_computed_again_count_once(way: str, rows: int) -> None:
    """Preempted while it has a row of the tables, and while it has none; twice, the second time in the prompt."""
    wanted, found = Rank(rows=8), Rank(rows=rows)
    for rank in (wanted, found):
        for name in ("a", "c"):
            rank.add(name)
    for first, count in ((0, PROMPT), *((PROMPT + i, 1) for i in range(NEW - 1))):
        wanted.step([("c", first, count)])
    for first, count in ((0, 4), (4, PROMPT - 4), (PROMPT, 1)):
        found.step([("c", first, count)])
    found.step([("a", 0, PROMPT)])  # with one row, "c" has none then
    found.stage.preempted("vllm-c")
    found.step([("c", 0, 7)])
    found.stage.preempted("vllm-c")
    for first, count in ((0, 9), (9, 3), (PROMPT + 1, 1), (PROMPT + 2, 1)):
        found.step([("c", first, count)])
    (one, other) = (rank.finish("c", NEW) for rank in (found, wanted))
    fires = other.declared.applied[-1].gate_fires
    assert fires is not None and 0 < fires < PROMPT + NEW - 1
    assert one.error is None and one.declared.applied == other.declared.applied
    assert one.preemptions == 2 and one.steps == {"made up": 8}


@pytest.mark.parametrize("scope", ["token", "prompt"])
def test_a_pass_that_fails_counts_nothing(scope: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(vector(6), 0.0, site="resid_post.0", scope=scope)
    monkeypatch.setitem(HOOKS, "c", RequestHooks([Steer("mlp_out.2", vector(5), when=gate)], [], NEW))
    found = []
    for fails in (False, True):
        rank = Rank(rows=8)
        rank.add("c")
        for first, count in ((0, 4), (4, PROMPT - 4), (PROMPT, 1)):
            rank.step([("c", first, count)], fails=fails)
        found.append(rank.finish("c", 2))
    assert found[0].error is None and found[1].error is None
    assert found[0].declared.applied == found[1].declared.applied
    assert 0 < (found[0].declared.applied[0].gate_fires or 0) < PROMPT + 1 or scope == "prompt"


def test_steps_behind_the_last_token_are_not_counted(way: str) -> None:
    """vLLM schedules a step before it knows that a token ends the generation. Only one of the two requests has such a step."""
    rank = Rank(4)
    for name in "ab":
        rank.add(name)
    rank.step([("a", 0, PROMPT - 1)])  # a last chunk of one token
    rank.step([("a", PROMPT - 1, 1), ("b", 0, PROMPT)])
    for i in range(NEW - 1):
        rank.step([("a", PROMPT + i, 1), ("b", PROMPT + i, 1)])
    assert rank.finish("a", NEW).steps == {"made up": 1 + NEW}
    assert rank.finish("b", NEW - 1).steps == {"made up": NEW - 1}


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


def test_ranks_without_results_read_no_counts_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read them waits for the passes that were launched, at the end of each request with a gate."""
    monkeypatch.setenv(WITH_TABLES, "1")
    found, read = [], DeviceTables.read_gates
    monkeypatch.setattr(DeviceTables, "read_gates", lambda *args: found.append(1) or read(*args))
    for number in (0, 1):
        rank = Rank(rows=1, rank=number)
        for _ in range(2):  # the second one gets the row of the first
            rank.add("c")
            rank.step([("c", 0, PROMPT)])
            if not number:
                rank.finish("c", 1)
            rank.stage.remove("vllm-c")
        assert not rank.stage.stage._in_tables and not rank.stage.stage._live
        assert len(found) == 2, "for each result of rank 0"


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


def test_kept_keys_and_values_grow_and_one_without_memory_leaves_the_pass() -> None:
    kept = KeptKV(SPEC, torch.device("cpu"))
    shape = SPEC.num_key_value_heads, SPEC.head_dim
    k, v = torch.randn(2, 700, *shape)
    for start, stop in ((0, 3), (3, 300), (300, 301), (301, 700)):
        cuts = PassCuts(
            [RequestCuts(0, 0, start, stop - start, [], {}), RequestCuts(1, stop - start, 0, 1 << 50, [], {})]
        )
        rows = [("a", 0, start, stop - start), ("b", stop - start, 0, 1 << 50)]
        assert kept.begin(cuts, rows, lambda _: 1 << 60) == ["b"] and [one.index for one in cuts.requests] == [0]
        kept.add(1, k[start:stop], v[start:stop])
        for found, wanted in zip(kept.get_kv(1), (k, v), strict=True):
            assert torch.equal(found, wanted[:stop])
    kept.forget("a")
    assert not kept._kept


def test_steps_after_the_last_cut_edge_are_plain_again() -> None:
    own, nothing = HooksOf.__new__(HooksOf), SimpleNamespace(remove=lambda _: None, forget=lambda _: None)
    cuts = {"a"}
    own.stage = cast(
        Any, SimpleNamespace(remove=cuts.discard, cuts=lambda one: one in cuts, reads_all_logits=lambda _: False)
    )
    own.traces = cast(Any, SimpleNamespace(remove=lambda _: None, knows_any=False, whole=(), begin=lambda *_: None))
    own._kept, own._cut_ids, own._cutting = cast(Any, nothing), {"a"}, True
    own.drafts = {}
    own.begin_blocks(["a", "b"], [1, 1], [3, 4])
    own.take(SimpleNamespace(
        scheduled_spec_decode_tokens={}, finished_req_ids={"a"}, preempted_req_ids=None, scheduled_new_reqs=[]
    ), len)  # fmt: skip
    assert own.has_modules  # the next step tells so
    own.begin_blocks(["b"], [1], [5])
    assert not own.has_modules


def test_a_tree_that_cannot_be_made_is_refused_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pass would meet a rank without one, and end the engine."""

    def refused(*_: Any) -> Any:
        raise NotImplementedError("no counterpart")

    monkeypatch.setattr(traces, "BlockTree", refused)
    group: Any = SimpleNamespace(world_size=1, rank_in_group=0)
    own = traces.RankTraces(None, None, SPEC, torch.device("cpu"), lambda: group, CONFIG, lambda: None, None)  # pyright: ignore
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="no counterpart"):
            own.open(b"")


def test_ranks_are_killed_though_vllms_shutdown_fails() -> None:
    core: Any = VllmCore.__new__(VllmCore)
    core._loop, core.links, core.attached, called = asyncio.new_event_loop(), [], False, list[str]()
    core._thread = threading.Thread(target=core._run, daemon=True)
    core._thread.start()

    def shutdown() -> None:
        raise LookupError("a process has ended meanwhile")

    core.llm = SimpleNamespace(shutdown=shutdown)
    core._watch = SimpleNamespace(close=lambda: called.append("closed"), kill=lambda: called.append("killed"))
    core.close()
    assert called == ["closed", "killed"] and core._loop.is_closed()
