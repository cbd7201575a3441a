# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""LoRA of rows with several adapters in two kernels: `shrink` multiplies by A, `expand` adds the product with B.

A program computes a tile of rows with one adapter (`RowTiles`, core/pass_parts.py). So weights are read once for 16 rows.
The kernels read the tiles on the device: a captured pass serves all mixes of adapters. Unused tiles end at once.

`shrink` divides the input's width into parts, for enough programs to read A at the memory's speed. `expand` adds the parts. Where
`shrink` runs beside the base's product, a third kernel adds them. Else each program of `expand` would read all parts. Block
sizes and parts depend on widths, not on rows. So the sums of a row have one order in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...core.pass_parts import TILE_ROWS, RowTiles
from ..launch import Launcher, grid_wait, launch_dependents, supports_pdl

MAX_PARTS = 8
PART_WIDTH = 512
"""Columns of a part at least."""
SHRINK_RANKS, SHRINK_COLUMNS, SHRINK_WARPS = 32, 128, 4
EXPAND_COLUMNS, EXPAND_WARPS, MAX_STEPS = 64, 4, 4
SUM_BLOCK, SUM_WARPS = 256, 2
MAX_PRODUCTS = 3
FULL_GRID = 528
"""Programs that fill a device: four for each multiprocessor of an H100."""
"""Merged projections of one product at most."""


@triton.jit(do_not_specialize=["h_rows"])
def _shrink(
    x, a, order, tiles, h, h_rows,
    IN: tl.constexpr, RANKS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    tile, part = tl.program_id(0), tl.program_id(2)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    grid_wait(PDL)
    if count == 0:
        return
    m = tl.arange(0, ROWS)
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK_R), tl.float32)
    for start in range(part * PART, tl.minimum(part * PART + PART, IN), BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        there = column < tl.minimum(part * PART + PART, IN)
        values = tl.load(x + row[:, None] * IN + column[None, :], mask=(m < count)[:, None] & there[None, :], other=0.0)
        weights = tl.load(a + (slot * RANKS + rank[:, None]) * IN + column[None, :], mask=there[None, :], other=0.0)
        total = tl.dot(values, tl.trans(weights), total, input_precision="ieee")
    tl.store(h + (part * h_rows + row[:, None]) * RANKS + rank[None, :], total, mask=(m < count)[:, None])


@triton.jit(do_not_specialize=["size"])
def _add_parts(h, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(h + part * size + at, mask=at < size, other=0.0)
    tl.store(h + at, total, mask=at < size)


@triton.jit
def _b_block(b, slot, column, stop, rank, OUT: tl.constexpr, RANK: tl.constexpr):
    return tl.load(b + (slot * OUT + column[:, None]) * RANK + rank[None, :], mask=(column < stop)[:, None], other=0.0)


@triton.jit(do_not_specialize=["h_rows"])
def _expand(
    out, h, b, order, tiles, h_rows,
    OUT: tl.constexpr, RANK: tl.constexpr, PRODUCTS: tl.constexpr, PARTS: tl.constexpr,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    # A program has STEPS blocks of columns. They begin anew with each projection.
    own: tl.constexpr = BLOCK * STEPS
    blocks_0: tl.constexpr = (SIZE_0 + own - 1) // own
    blocks_1: tl.constexpr = (SIZE_1 + own - 1) // own
    behind_0, behind_1 = block >= blocks_0, block >= blocks_0 + blocks_1
    product = behind_0.to(tl.int32) + behind_1.to(tl.int32)
    begin = tl.where(behind_1, SIZE_0 + SIZE_1, tl.where(behind_0, SIZE_0, 0))
    stop = tl.where(behind_1, OUT, tl.where(behind_0, SIZE_0 + SIZE_1, SIZE_0))
    stop = tl.where(count > 0, stop, 0)
    block -= tl.where(behind_1, blocks_0 + blocks_1, tl.where(behind_0, blocks_0, 0))
    column = begin + block * own + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANK)
    weights = _b_block(b, slot, column, stop, rank, OUT, RANK)
    grid_wait(PDL)
    if count == 0:
        return
    m = tl.arange(0, ROWS)
    row = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    inside = m < count
    shrunk = tl.zeros((ROWS, RANK), tl.float32)
    for part in range(PARTS):
        where = (part * h_rows + row[:, None]) * (RANK * PRODUCTS) + product * RANK + rank[None, :]
        shrunk += tl.load(h + where, mask=inside[:, None], other=0.0)
    shrunk_half = shrunk.to(b.dtype.element_ty)
    for step in tl.static_range(STEPS):
        delta = tl.dot(shrunk_half, tl.trans(weights), input_precision="ieee")
        where_out = out + row[:, None] * OUT + column[None, :]
        mask = inside[:, None] & (column < stop)[None, :]
        base = tl.load(where_out, mask=mask, other=0.0).to(tl.float32)
        column += BLOCK
        if step + 1 < STEPS:  # before this step's store
            weights = _b_block(b, slot, column, stop, rank, OUT, RANK)
        tl.store(where_out, (base + delta).to(out.dtype.element_ty), mask=mask)


_shrink_launch, _expand_launch = Launcher(_shrink, pdl=True), Launcher(_expand, pdl=True)
_shrink_beside, _add_parts_beside, _expand_after = Launcher(_shrink), Launcher(_add_parts), Launcher(_expand)
"""Launchers for capture on two streams. Their kernels start after all predecessors, and let the next one start early."""


def _parts(in_features: int) -> tuple[int, int]:
    """(parts, columns of each) of the input's width."""
    parts = max(1, min(MAX_PARTS, in_features // PART_WIDTH))
    width = -(-in_features // parts)
    width = -(-width // SHRINK_COLUMNS) * SHRINK_COLUMNS
    return -(-in_features // width), width


def shrunk_memory(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Memory for the result of `shrink`."""
    return torch.empty(_parts(x.shape[1])[0], len(x), a.shape[1], dtype=torch.float32, device=x.device)


def shrink(x: torch.Tensor, a: torch.Tensor, tiles: RowTiles, into: torch.Tensor | None = None) -> torch.Tensor:
    """x A^T of each row in a tile.

    Args:
        x: [rows, in], contiguous.
        a: [slots, ranks, in]; ranks are a multiple of 16.
        into: `shrunk_memory`, if the stream is another than the pass's.

    Returns:
        [parts, rows, ranks] float32: the sum over parts is the product. With `into` there is one part. Rows in no tile are
        undefined.
    """
    rows, in_features = x.shape
    parts, width = _parts(in_features)
    h = shrunk_memory(x, a) if into is None else into
    ranks = SHRINK_RANKS if a.shape[1] % SHRINK_RANKS == 0 else SHRINK_RANKS // 2
    grid = len(tiles.tiles), a.shape[1] // ranks, parts
    constants = in_features, a.shape[1], width, TILE_ROWS, ranks, SHRINK_COLUMNS
    tensors = x, a, tiles.order, tiles.tiles, h
    if into is None:
        _shrink_launch(grid, tensors, (rows,), constants, SHRINK_WARPS)
    else:
        _shrink_beside(grid, tensors, (rows,), (*constants, False), SHRINK_WARPS)
        if parts > 1:
            size = h[0].numel()
            _add_parts_beside((triton.cdiv(size, SUM_BLOCK), 1, 1), (h,), (size,), (parts, SUM_BLOCK), SUM_WARPS)
        h = h[:1]
    return h


def expand(
    out: torch.Tensor, h: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], tiles: RowTiles, joins: bool = False
) -> None:
    """Add h B^T to each row in a tile, in place.

    Args:
        out: [rows, sum of sizes], contiguous.
        h: result of `shrink`, [parts, rows, projections * rank].
        b: [slots, sum of sizes, rank]; the rank is a power of 2.
        sizes: out features of each projection.
        joins: `shrink` ran beside the product.
    """
    if len(sizes) > MAX_PRODUCTS:
        raise ValueError(f"{len(sizes)} merged projections; at most {MAX_PRODUCTS}")
    rows, width = out.shape
    steps = _steps(len(tiles.tiles), width)
    blocks = sum(triton.cdiv(size, EXPAND_COLUMNS * steps) for size in sizes)
    size_0, size_1 = sizes[0], sizes[1] if len(sizes) > 1 else 0
    shape = width, b.shape[2], len(sizes), h.shape[0], size_0, size_1, TILE_ROWS, EXPAND_COLUMNS, steps
    grid, tensors = (len(tiles.tiles), blocks, 1), (out, h, b, tiles.order, tiles.tiles)
    if joins:
        _expand_after(grid, tensors, (rows,), (*shape, supports_pdl(out.get_device())), EXPAND_WARPS)
    else:
        _expand_launch(grid, tensors, (rows,), shape, EXPAND_WARPS)


def _steps(tiles: int, width: int) -> int:
    """Blocks of columns of a program of `expand`: as many as leave enough programs for the device. A program reads `h` once."""
    steps = MAX_STEPS
    while steps > 1 and tiles * width < FULL_GRID * EXPAND_COLUMNS * steps:
        steps //= 2
    return steps
