"""Decode steps of requests that capture alike leave the ring together (hooks/captures/egress/copier.py)."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_declared import captured_rows, vector

from pymllm_interp import Capture
from pymllm_interp.captures import Project
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.captures.activations import CaptureError
from pymllm_interp.hooks.captures.egress import copier
from pymllm_interp.hooks.captures.egress import ring as ring_module
from pymllm_interp.hooks.captures.egress.copier import AlikeStep
from pymllm_interp.hooks.captures.egress.ring import CaptureRing, StatesOf
from pymllm_interp.hooks.captures.rows import CapturedRows
from pymllm_interp.kernels.cpu.block_copies import copy_by_torch, load_block_copies

INFO = ModelSpec.of(CONFIGS["llama"](), torch.float32)
SPECS: dict[str, Any] = {
    "whole": lambda: [Capture("resid_post.*")],
    "generated": lambda: [Capture("resid_post.{0,2}", positions="generated"), Capture("embed", positions="generated")],
    "two groups": lambda: [Capture("resid_post.*"), Capture("embed", positions="generated")],
    "narrow": lambda: [Capture("resid_post.1", dtype=torch.bfloat16)],
    "mean": lambda: [Capture("resid_post.*", reduce="mean")],
    "last": lambda: [Capture("attn_out.*", reduce="last")],
    "projected": lambda: [Capture("resid_post.*", reduce=Project(vector(INFO.hidden_size, 3, 2)))],
    "some": lambda: [Capture("resid_post.*", positions=[0, -1])],
}
WAYS = [
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(
            load_block_copies() is copy_by_torch, reason="there is no compiler for block_copies.cpp"
        ),
    ),
    "torch",
]
Own = tuple[CapturedRows, dict[int, torch.Tensor]]


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What copies."""
    found = getattr(request, "param", "compiled")
    if found == "torch":
        monkeypatch.setattr(copier, "load_block_copies", lambda: copy_by_torch)
    return found


def captures_of(specs: list[Capture], prompt_len: int, longest: int) -> CapturedRows:
    return captured_rows(specs, INFO, prompt_len, longest)


def run_step(ring: CaptureRing, parts: list[tuple[Own, int, int]]) -> bool:
    """A pass of (request, first position, positions) each. Whether its rows were alike."""
    ring.lay_out([(captures, first, count) for (captures, _), first, count in parts])
    layout = ring._layout
    sites = sorted({site for (captures, _), *_ in parts for site in captures.layout.by_site})
    for site in sites:
        rows, states, row, token = [], [], 0, 0
        for (captures, own), first, count in parts:
            if site in captures.layout.by_site:
                group = captures.layout.by_site[site][0]
                rows.append(StatesOf(captures, row, token, count, group.probes))
                states.append(own[site][first : first + count])
                row += count
            token += count
        ring.put(site, torch.cat(states), rows)
    ring.send()
    return layout is not None and isinstance(layout.slices, AlikeStep)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("way", "memory"),
    [
        ("torch", "a block"),
        ("torch", "small blocks"),
        ("torch", "no block"),
        ("compiled", "a block"),
        ("compiled", "no block"),
    ],
    indirect=["way"],
)
@pytest.mark.parametrize("kinds", [[kind] for kind in SPECS] + [["whole", "mean"], ["whole", "generated", "some"]])
def test_results_are_the_states_whoever_comes_and_goes(kinds: list[str], memory: str, monkeypatch: Any) -> None:
    rng = random.Random(f"{kinds} {memory}")
    monkeypatch.setattr(ring_module, "SPAN_PART_BYTES", rng.choice([1 << 26, 2000, 10000]))
    if memory == "small blocks":
        monkeypatch.setattr(copier, "MAX_STEPS", 3)
        monkeypatch.setattr(copier, "FEWEST_STEPS", 2)
    elif memory == "no block":
        monkeypatch.setattr(copier, "MAX_BYTES", 0)
    ring = CaptureRing(1 << 22, torch.float32, "cpu", "block")
    ring.open()
    made: list[tuple[Own, int, int]] = []  # with its prompt's length and its last position
    running: list[list[Any]] = []
    alike = 0
    for step in range(60):
        if step % 7 == 0 and len(made) < 12:
            for _ in range(rng.randrange(1, 4)):
                prompt_len = rng.randrange(3, 9)
                longest = prompt_len + rng.randrange(1, 30)
                captures = captures_of(SPECS[rng.choice(kinds)](), prompt_len, longest)
                states = {site: torch.randn(longest, INFO.hidden_size) for site in captures.layout.by_site}
                made.append(((captures, states), prompt_len, longest))
                running.append([made[-1], 0])
        parts = []
        for entry in running:
            (own, prompt_len, _), position = entry
            parts.append((own, position, prompt_len if position == 0 else 1))
            entry[1] += parts[-1][2]
        if parts:
            alike += run_step(ring, parts)
        for entry in running:
            if (
                step > 20 and rng.random() < 0.03 and entry[1] > entry[0][1]
            ):  # preempted: it computes its last tokens again
                entry[1] -= 1
        running = [entry for entry in running if entry[1] < entry[0][2]]
    ring.wait()
    assert not ring.allocator.in_use
    for (captures, states), _, longest in made:
        stop = captures.next_position
        found = captures.result(range(stop))
        assert found
        for site in captures.layout.by_site:
            group, column = captures.layout.by_site[site]
            name = str(group.names[column])
            rows = states[site][found.positions[name]]
            if group.probes is not None:
                rows = rows.float() @ group.probes.T
            elif group.spec.reduce == "mean":
                rows = states[site][:stop].double().mean(0, keepdim=True)
            elif group.spec.reduce is None:
                rows = rows.to(group.spec.dtype or rows.dtype)
            close: dict[str, Any] = (
                {} if group.probes is not None or group.spec.reduce == "mean" else {"rtol": 0, "atol": 0}
            )
            torch.testing.assert_close(found[name], rows.to(found[name].dtype), **close)
        assert stop <= longest
    assert alike > 5 if kinds in (["whole"], ["generated"], ["mean"], ["two groups"]) else True
    ring.close()


def counted_ring(monkeypatch: Any) -> tuple[CaptureRing, list[int]]:
    """An open ring, and an entry for each time that rows of results are looked up."""
    found: list[int] = []
    prepare = CapturedRows.prepare
    monkeypatch.setattr(CapturedRows, "prepare", lambda self, memory: found.append(1) or prepare(self, memory))
    ring = CaptureRing(1 << 20, torch.float32, "cpu", "block")
    ring.open()
    return ring, found


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_rows_of_large_steps_are_found_once_for_many_steps(monkeypatch: Any) -> None:
    monkeypatch.setattr(copier, "MAX_BYTES", 0)
    ring, found = counted_ring(monkeypatch)
    captures = captures_of(SPECS["whole"](), 2, 12)
    own = captures, {site: torch.randn(12, INFO.hidden_size) for site in captures.layout.by_site}
    for first, count in ((0, 2), *((position, 1) for position in range(2, 12))):
        assert run_step(ring, [(own, first, count)]) == (first > 0)
    ring.wait()
    assert len(found) == 2, "for the prompt, and for the steps"
    states = captures.result(range(12))
    for site, (group, column) in captures.layout.by_site.items():
        assert torch.equal(states[str(group.names[column])], own[1][site])
    del states
    assert not ring._copier._places  # results are not held
    ring.close()


@pytest.mark.parametrize("memory", ["a block", "no block"])
def test_rows_of_batches_by_turns_are_found_once(memory: str, monkeypatch: Any) -> None:
    """As on pipeline ranks."""
    if memory == "no block":
        monkeypatch.setattr(copier, "MAX_BYTES", 0)
    ring, found = counted_ring(monkeypatch)
    owns: list[Own] = []
    for _ in range(3):
        captures = captures_of(SPECS["whole"](), 1, 12)
        owns.append((captures, {site: torch.randn(12, INFO.hidden_size) for site in captures.layout.by_site}))
    for position in range(12):
        for own in owns:
            assert run_step(ring, [(own, position, 1)]) == (position > 0)
    ring.wait()
    assert len(found) == 2 * len(owns), "for prompts, and for the steps"
    for captures, states in owns:
        result = captures.result(range(12))
        for site, (group, column) in captures.layout.by_site.items():
            assert torch.equal(result[str(group.names[column])], states[site])
    ring.close()


@pytest.mark.parametrize("elements", [1, 300, 2000])
def test_parts_of_a_large_step_are_freed_one_by_one(elements: int, monkeypatch: Any) -> None:
    """Whole requests, and positions of one; some are not captured. A step that packs is one part."""
    ring = CaptureRing(1 << 20, torch.float32, "cpu", "block")
    ring.open()
    ring.wait()
    left: list[int] = []
    ring.notify_when_freed(lambda: left.append(len(ring.allocator._spans)))
    monkeypatch.setattr(ring_module, "SPAN_PART_BYTES", elements * 4)
    owns: list[Own] = []
    for kind, length in (("whole", 9), ("some", 4), ("generated", 3), ("two groups", 5), ("last", 2), ("whole", 1)):
        captures = captures_of(SPECS[kind](), length, length + 1)
        owns.append((captures, {site: torch.randn(length, INFO.hidden_size) for site in captures.layout.by_site}))
    held = threading.Event()
    ring.after(lambda: bool(held.wait(60)) or None)
    run_step(ring, [(own, 0, own[0].layout.prompt_len) for own in owns])
    ring.allocator.check_integrity()
    spans = list(ring.allocator._spans)
    held.set()
    ring.wait()
    assert left == list(range(len(spans)))[::-1] and not ring.allocator.in_use
    assert all(a[1] == b[0] for a, b in pairwise(spans)) and len(spans) > 1 + (elements < 1000) * 3
    assert all(stop - start < elements + 4 * INFO.num_hidden_layers * INFO.hidden_size for start, stop in spans)
    for captures, states in owns:
        found = captures.result(range(captures.layout.prompt_len))
        for site, (group, column) in captures.layout.by_site.items():
            name = str(group.names[column])
            assert torch.equal(found[name], states[site][found.positions[name]])
    mean = captures_of(SPECS["mean"](), 9, 10)
    held.clear()
    ring.after(lambda: bool(held.wait(60)) or None)
    run_step(ring, [((mean, {site: torch.randn(9, INFO.hidden_size) for site in mean.layout.by_site}), 0, 9)])
    assert len(ring.allocator._spans) == 1
    held.set()
    ring.close()


@pytest.mark.parametrize("memory", ["a block", "no block"])
def test_steps_of_the_same_requests_may_go_back_or_ahead(memory: str, monkeypatch: Any) -> None:
    """Rows of a held step are where its positions are, whichever step of the same requests came before."""
    if memory == "no block":
        monkeypatch.setattr(copier, "MAX_BYTES", 0)
    ring = CaptureRing(1 << 20, torch.float32, "cpu", "block")
    ring.open()
    owns: list[Own] = []
    for _ in range(2):
        captures = captures_of(SPECS["whole"](), 2, 12)
        owns.append((captures, {site: torch.randn(12, INFO.hidden_size) for site in captures.layout.by_site}))
    captures, states = owns[1]
    run_step(ring, [(own, 0, 2) for own in owns])
    for firsts in ((2, 2), (3, 3), (4, 3), (5, 4), (8, 7), (9, 8)):
        if firsts == (4, 3):  # its last position is taken back, and comes again with other states
            captures.settle(3)
            for own in states.values():
                own[3:] = torch.randn(9, INFO.hidden_size)
        assert run_step(ring, [(own, first, 1) for own, first in zip(owns, firsts, strict=True)])
    ring.wait()
    for (captures, states), sent in zip(owns, ([*range(6), 8, 9], [*range(5), 7, 8]), strict=True):
        found = captures.result(range(sent[-1] + 1))
        for site, (group, column) in captures.layout.by_site.items():
            assert torch.equal(found[str(group.names[column])][sent], states[site][sent])
    ring.close()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_block_of_one_step_holds_no_results_after_a_request_ends() -> None:
    ring = CaptureRing(1 << 20, torch.float32, "cpu", "block")
    ring.open()
    captures = captures_of(SPECS["whole"](), 1, 4)
    run_step(ring, [((captures, {site: torch.randn(4, INFO.hidden_size) for site in captures.layout.by_site}), 1, 1)])
    ring.wait()
    assert not ring._copier._places
    ring.close()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_request_without_memory_loses_its_own_states_only(monkeypatch: Any) -> None:
    ring = CaptureRing(1 << 20, torch.float32, "cpu", "block")
    ring.open()
    owns: list[Own] = []
    for _ in range(3):
        captures = captures_of(SPECS["whole"](), 2, 8)
        owns.append((captures, {site: torch.randn(8, INFO.hidden_size) for site in captures.layout.by_site}))

    def fails(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(owns[1][0], "prepare", fails)
    for first, count in ((0, 2), *((position, 1) for position in range(2, 8))):
        run_step(ring, [(own, first, count) for own in owns])
    ring.wait()
    assert not ring.allocator.in_use
    for captures, states in (owns[0], owns[2]):
        found = captures.result(range(8))
        for site, (group, column) in captures.layout.by_site.items():
            assert torch.equal(found[str(group.names[column])], states[site])
    with pytest.raises(CaptureError, match="no memory"):
        owns[1][0].result(range(8))["resid_post.0"]
    ring.close()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_states_in_a_block_are_there_when_the_ring_is_closed() -> None:
    ring = CaptureRing(1 << 20, torch.float32, "cpu", "block")
    ring.open()
    captures = captures_of(SPECS["whole"](), 1, 4)
    own = captures, {site: torch.randn(4, INFO.hidden_size) for site in captures.layout.by_site}
    for position in range(3):
        run_step(ring, [(own, position, 1)])
    ring.close()
    found = captures.result(range(3))
    for site, (group, column) in captures.layout.by_site.items():
        assert torch.equal(found[str(group.names[column])], own[1][site][:3])


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_copy_that_fails_costs_its_requests_and_the_ring_serves_the_next(way: str, monkeypatch: Any) -> None:
    """It fails when a request ends, on the thread that all requests' results wait for."""
    ring = CaptureRing(1 << 20, torch.float32, "cpu", "block")
    ring.open()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    ring.wait()  # the thread has what it copies with
    for works in (False, True):
        captures = captures_of(SPECS["whole"](), 1, 4)
        own = captures, {site: torch.randn(4, INFO.hidden_size) for site in captures.layout.by_site}
        with monkeypatch.context() as patch:
            if not works and way == "torch":
                patch.setattr(torch, "_foreach_copy_", fails)
            elif not works:
                patch.setattr(ring._copier, "_copy", fails)
            for position in range(1, 4):
                captures.next_position = position
                run_step(ring, [(own, position, 1)])
            ring.wait()
        assert not ring.allocator.in_use
        if works:
            captures.mark_copied(4)
            assert len(captures.result(range(4))["resid_post.0"]) == 4
        else:
            with pytest.raises(CaptureError, match="no memory"):
                captures.result(range(4))["resid_post.0"]
    ring.close()
