# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Products of many rows with quantised weights, on tensor cores.

Codes are multiplied by their scales first, and rounded to x's dtype as `dequantize` does. A program has one sum, of a large tile.
Where tiles are fewer than multiprocessors, parts of the inputs are summed apart.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents
from .quantized_blocks import BLOCK_K, Tile, divided
from .quantized_codes import _decoded

MANY_ROWS, STEP = 128, 64
"""More rows than that are many, and columns of codes that are multiplied at a time."""
MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100. A program takes one."""
MANY_TILES = {8: Tile(256, 128, 8, 4), 4: Tile(256, 128, 8, 3)}
"""Bits of a code -> the fastest of 4 for 256 rows of an 8B model on an H100."""


@triton.jit(do_not_specialize=["rows", "steps"])
def _many_rows(
    x, codes, scales, zeros, bias, out, rows, steps,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, MIDDLE: tl.constexpr, SAME: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part has `steps` of STEP columns of the codes. SAME: x's dtype has the scales exactly. HAS_BIAS: without other parts."""
    launch_dependents(PDL)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    known, there = channel < N, row < rows
    where_x, where_c = row.to(tl.int64)[:, None] * K, channel.to(tl.int64)[:, None] * (K // PACKED)
    grid_wait(PDL)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    begin = part * steps * STEP
    stop = tl.minimum(begin + steps * STEP, K // PACKED)
    # Each half of the bytes in a separate loop. With two products in a loop, Triton waits for the first one.
    for half in tl.static_range(PACKED):
        for start in range(begin, stop, STEP):
            column, first = tl.arange(0, STEP)[None, :], start * PACKED + half * STEP
            inside = column < (K // PACKED if (K // PACKED) % STEP == 0 else stop - start)
            code = tl.load(codes + where_c + start + column, mask=known[:, None] & inside, other=0)
            values = tl.load(x + where_x + first + column, mask=there[:, None] & inside, other=0.0)
            if PACKED == 2:
                code = code & 15 if half == 0 else code >> 4
            group = channel * GROUPS + first // GROUP
            zero = tl.load(zeros + group, mask=known, other=0).to(tl.float32)[:, None] if HAS_ZEROS else MIDDLE
            if GROUPS == 1:
                weight = _decoded(code, zero, KIND, values.dtype)
            else:
                scale = tl.load(scales + group, mask=known, other=0.0)[:, None]
                if SAME:
                    weight = _decoded(code, zero, KIND, values.dtype) * scale.to(values.dtype)
                else:
                    weight = (_decoded(code, zero, KIND) * scale.to(tl.float32)).to(values.dtype)
            total = tl.dot(weight, tl.trans(values), total, input_precision="ieee")
    if GROUPS == 1:
        total *= tl.load(scales + channel, mask=known, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[:, None]
    where = (part * rows + row.to(tl.int64)[:, None]) * N + channel[None, :]
    tl.store(out + where, tl.trans(total).to(out.dtype.element_ty), mask=there[:, None] & known[None, :])


many_rows_launch = cache(lambda stages: Launcher(_many_rows, pdl=True, num_stages=stages))


def parts_of_many(tiles: int, width: int) -> tuple[int, int]:
    """(parts, inputs of each) of a product with this many tiles: one wave of programs at most."""
    return divided(width, MULTIPROCESSORS // tiles, BLOCK_K)
