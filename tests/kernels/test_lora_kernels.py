"""Triton's kernels for LoRA against plain torch: compiled on CUDA, interpreted elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.core.pass_parts import AdapterRows, RowTiles, max_tiles, tiles_of
from pymllm_interp.kernels.products import lora
from pymllm_interp.kernels.products.lora import expand, shrink, shrunk_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SLOTS = 3


def tiles_for(slots: list[int]) -> RowTiles:
    """The tiles of a decode pass, with unused ones, as `InputBuffers` lays them out."""
    rows = AdapterRows.of(np.array(slots), np.ones(len(slots), dtype=np.int64))
    order, tiles = tiles_of(() if rows is None else rows.spans)
    whole = np.zeros((max_tiles(len(slots), SLOTS), 3), dtype=np.int32)
    whole[: len(tiles)] = tiles
    padded = np.full(len(slots), 10**6, dtype=np.int32)  # what no tile names is not read
    padded[: len(order)] = order
    return RowTiles(torch.from_numpy(padded).to(DEVICE), torch.from_numpy(whole).to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("slots", "width", "sizes", "rank"),
    [
        ([0], 64, [48], 16),
        ([1, -1, 0, 1, -1], 40, [30, 10, 10], 16),
        ([2] * 17 + [0] * 16 + [-1] + [1], 72, [64, 65], 32),
        ([-1, -1], 64, [16], 16),
        ([0, 2], 1100, [130, 64, 64], 64),
    ],
)
def test_each_row_gets_the_delta_of_its_adapter(
    slots: list[int], width: int, sizes: list[int], rank: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(width)
    x = torch.randn(len(slots), width, generator=draw).to(DEVICE, dtype)
    a = (torch.randn(SLOTS, rank * len(sizes), width, generator=draw) / width**0.5).to(DEVICE, dtype)
    b = torch.randn(SLOTS, sum(sizes), rank, generator=draw).to(DEVICE, dtype)
    base = torch.randn(len(slots), sum(sizes), generator=draw).to(DEVICE, dtype)
    out, tiles = base.clone(), tiles_for(slots)
    expand(out, shrink(x, a, tiles), b, sizes, tiles)
    expected = base.clone().float()
    for row, slot in enumerate(slots):
        for part, (size, own) in enumerate(zip(sizes, expected[row].split(sizes), strict=True)):
            if slot >= 0:
                h = x[row].float() @ a[slot, part * rank : (part + 1) * rank].float().T
                own += h @ b[slot, sum(sizes[:part]) :][:size].float().T
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
    torch.testing.assert_close(out.float(), expected, **close)
    untouched = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(out[untouched], base[untouched])


def test_zeros_change_no_bit_and_a_row_is_the_same_in_any_tile() -> None:
    draw = torch.Generator().manual_seed(0)
    x, base = torch.randn(20, 96, generator=draw).to(DEVICE), torch.randn(20, 80, generator=draw).to(DEVICE)
    a, b = torch.randn(SLOTS, 16, 96, generator=draw).to(DEVICE), torch.randn(SLOTS, 80, 16, generator=draw).to(DEVICE)
    b[1] = 0
    results = []
    for slots in ([0] * 20, [1] * 20, [0, 1] * 10):
        out, tiles = base.clone(), tiles_for(slots)
        expand(out, shrink(x, a, tiles), b, [80], tiles)
        results.append(out)
    assert torch.equal(results[1], base) and torch.equal(results[2][1::2], base[1::2])
    if DEVICE == "cuda":  # the interpreter's products are NumPy's
        assert torch.equal(results[2][::2], results[0][::2])
    torch.testing.assert_close(results[2][::2], results[0][::2], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("steps", [2, 4])
def test_programs_of_several_blocks_change_no_bit(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = [3 * 64 * steps + 10, 64, 70]
    x, a = torch.randn(18, 96, generator=draw).to(DEVICE), torch.randn(SLOTS, 48, 96, generator=draw).to(DEVICE)
    b, base = (torch.randn(*shape, generator=draw).to(DEVICE) for shape in ((SLOTS, sum(sizes), 16), (18, sum(sizes))))
    tiles = tiles_for([0] * 3 + [-1] + [2] * 14)
    expected = base.clone()
    expand(expected, shrink(x, a, tiles), b, sizes, tiles)
    monkeypatch.setattr(lora, "_steps", lambda tiles, width: steps)
    expand(base, shrink(x, a, tiles), b, sizes, tiles)
    assert torch.equal(base, expected)


def test_a_shrink_beside_the_product_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(2)
    x, a = torch.randn(5, 1100, generator=draw).to(DEVICE), torch.randn(SLOTS, 32, 1100, generator=draw).to(DEVICE)
    b, base = torch.randn(SLOTS, 80, 16, generator=draw).to(DEVICE), torch.randn(5, 80, generator=draw).to(DEVICE)
    tiles, found = tiles_for([0, 1, 2, 1, 0]), base.clone()
    expand(base, shrink(x, a, tiles), b, [40, 40], tiles)
    h = shrink(x, a, tiles, shrunk_memory(x, a))
    assert len(h) == 1 < len(shrink(x, a, tiles))
    expand(found, h, b, [40, 40], tiles, joins=True)
    assert torch.equal(found, base)


def test_few_programs_have_one_block_each() -> None:
    assert lora._steps(1, 4096) == 1 and lora._steps(20, 28672) == lora.MAX_STEPS
