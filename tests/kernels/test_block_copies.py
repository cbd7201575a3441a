"""Copies of many blocks of memory in one call (kernels/cpu/block_copies.cpp)."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from pymllm_interp.kernels.cpu import block_copies
from pymllm_interp.kernels.cpu.block_copies import CopyBlocks
from pymllm_interp.kernels.cpu.cpu_build import BuildError

compiled = block_copies.load_block_copies()
WAYS = [block_copies.copy_by_torch, *([] if compiled is block_copies.copy_by_torch else [compiled])]
BY_ALL = pytest.mark.parametrize("copy_blocks", WAYS, ids=["torch", "compiled"][: len(WAYS)])


@BY_ALL
@pytest.mark.parametrize("threads", [1, 2, 3, 8, 61])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_copied_and_nothing_else_is(
    threads: int, seed: int, copy_blocks: CopyBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_copies, "PART_BYTES", 1)
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 7, 64, 4096, rng.randrange(1, 30_000)]) for _ in range(rng.randrange(1, 40))]
    gaps = [rng.randrange(0, 100) for _ in sizes]
    source = np.random.default_rng(seed).integers(0, 255, sum(sizes) + sum(gaps) + 1, dtype=np.uint8)
    target, wanted = np.zeros(sum(sizes) + sum(gaps) + 1, np.uint8), np.zeros(sum(sizes) + sum(gaps) + 1, np.uint8)
    places = np.cumsum([0, *(size + gap for size, gap in zip(sizes, gaps, strict=True))])[:-1]
    taken = rng.sample(range(len(sizes)), len(sizes))  # blocks come from other places, in another order
    starts = dict(zip(taken, np.cumsum([0, *(sizes[i] for i in taken)])[:-1].tolist(), strict=True))
    for i, size in enumerate(sizes):
        wanted[places[i] : places[i] + size] = source[starts[i] : starts[i] + size]
    to = target.ctypes.data + places
    copy_blocks(to, source.ctypes.data + np.array([starts[i] for i in range(len(sizes))]), np.array(sizes), threads)
    assert np.array_equal(target, wanted)


@BY_ALL
def test_no_block_is_copied(copy_blocks: CopyBlocks) -> None:
    copy_blocks(np.empty(0), np.empty(0), np.empty(0), 8)


@BY_ALL
def test_threads_may_copy_at_once(copy_blocks: CopyBlocks) -> None:
    function, sources = copy_blocks, [np.full((4, 1 << 20), i, np.uint8) for i in range(4)]
    targets = [np.zeros_like(source) for source in sources]

    def copy(i: int) -> None:
        rows = np.arange(4) << 20
        function(targets[i].ctypes.data + rows, sources[i].ctypes.data + rows, np.full(4, 1 << 20), 4)

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(*pair) for pair in zip(targets, sources, strict=True))


def test_without_a_compiler_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise BuildError("none is installed")

    monkeypatch.setattr(block_copies, "load_library", fails)
    assert block_copies.load_block_copies.__wrapped__() is block_copies.copy_by_torch
