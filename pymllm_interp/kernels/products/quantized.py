# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Products with quantised weights, which are dequantised in registers: FP8, integers of 8 and 4 bits, FP4.

`one_row` is for a single row: a program sums some output channels. `few_rows` multiplies tiles on the tensor cores, in the
dtype of x: codes less their zero are exact in it. Scales multiply the float32 sum of a block of inputs, so the weight is
never rounded. Many rows have a separate kernel, in many_rows.py.

If a weight has few tiles, parts of the inputs are summed separately. Sums have one order, and there are no atomic additions.
A row's bits may depend on the number of rows.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents
from .many_rows import MANY_ROWS, MANY_TILES, STEP, many_rows_launch, parts_of_many
from .quantized_blocks import BLOCK_K, Tile, block_of, divided
from .quantized_codes import _decoded

GRIDS = {16: (528, 64), 1 << 30: (200, 128)}
"""Rows, up to which -> programs that fill an H100, and the channels of each. Measured in W4A16 steps of one row and FP8 steps of
32 rows: the other pair takes 9 % longer."""
ROW_CHANNELS, ROW_BLOCK, ROW_WARPS, MAX_ROW_BLOCKS = 4, 1024, 4, 16
DEQUANTIZE_BLOCK = 1024
TILES = {
    "8": {16: (16, 32, 4, 5), 32: (32, 64, 4, 4), 64: (64, 128, 8, 3), 128: (128, 128, 8, 3)},
    "4": {16: (16, 128, 8, 3), 32: (32, 128, 8, 3), 64: (64, 128, 4, 3), 128: (128, 64, 4, 3)},
}
"""Bits of a code -> rows, up to which -> `Tile`. The fastest of 8 to 16 for an 8B model on an H200."""


@triton.jit
def _one_row(
    x, codes, scales, zeros, bias, out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    PAIR: tl.constexpr, HAS_ZEROS: tl.constexpr, MIDDLE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known, width = (row < N)[:, None], K // PACKED
    where = row.to(tl.int64)[:, None] * width
    parts = ()
    for start in tl.static_range(0, K // PACKED, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        parts += (tl.load(codes + where + column, mask=known & (column < width), other=0),)
    grid_wait(PDL)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in tl.static_range(0, K // PACKED, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = column < width
        first = column // PAIR * (2 * PAIR) + column % PAIR if PACKED == 2 else column
        group = row[:, None] * GROUPS + first // GROUP
        zero = tl.load(zeros + group, mask=known & inside, other=0).to(tl.float32) if HAS_ZEROS else MIDDLE
        part = parts[start // BLOCK]
        if PACKED == 2:
            low = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(x + first + PAIR, mask=inside, other=0.0).to(tl.float32)
            product = _decoded(part & 15, zero, KIND) * low + _decoded(part >> 4, zero, KIND) * high
        else:
            product = _decoded(part, zero, KIND) * tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        if GROUPS > 1:
            product *= tl.load(scales + group, mask=known & inside, other=0.0).to(tl.float32)
        total += product
    result = tl.sum(total, axis=1)
    if GROUPS == 1:
        result *= tl.load(scales + row, mask=row < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < N)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, codes, scales, zeros, bias, out, rows,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    PAIR: tl.constexpr, HAS_ZEROS: tl.constexpr, MIDDLE: tl.constexpr, HAS_BIAS: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    known, there = channel < N, row < rows
    where_x, where_c = row.to(tl.int64)[:, None] * K, channel.to(tl.int64)[:, None] * (K // PACKED)
    grid_wait(PDL)
    # The weight is the left factor: on Hopper that one may come from registers.
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    stop = tl.minimum(part * PART + PART, K)
    for start in range(part * PART, stop, BLOCK_K):
        column = start // PACKED + tl.arange(0, BLOCK_K // PACKED)[None, :]
        inside = column < stop // PACKED
        code = tl.load(codes + where_c + column, mask=known[:, None] & inside, other=0)
        group = channel * GROUPS + start // GROUP
        zero = tl.load(zeros + group, mask=known, other=0).to(tl.float32)[:, None] if HAS_ZEROS else MIDDLE
        mask = there[:, None] & inside
        if PACKED == 2:  # a byte has an input of each half of the block
            half = start + tl.arange(0, BLOCK_K // 2)[None, :]
            low = tl.load(x + where_x + half, mask=mask, other=0.0)
            high = tl.load(x + where_x + half + BLOCK_K // 2, mask=mask, other=0.0)
            first, second = _decoded(code & 15, zero, KIND, low.dtype), _decoded(code >> 4, zero, KIND, low.dtype)
            product = tl.dot(first, tl.trans(low), input_precision="ieee")
            product = tl.dot(second, tl.trans(high), product, input_precision="ieee")
        else:
            values = tl.load(x + where_x + column, mask=mask, other=0.0)
            product = tl.dot(_decoded(code, zero, KIND, values.dtype), tl.trans(values), input_precision="ieee")
        if GROUPS > 1:
            product *= tl.load(scales + group, mask=known, other=0.0).to(tl.float32)[:, None]
        total += product
    if GROUPS == 1:
        total *= tl.load(scales + channel, mask=known, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS and PARTS == 1:
        total += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[:, None]
    where = (part * rows + row.to(tl.int64)[:, None]) * N + channel[None, :]
    tl.store(out + where, tl.trans(total).to(out.dtype.element_ty), mask=there[:, None] & known[None, :])


@triton.jit
def _dequantize(
    codes, scales, zeros, out, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
    PACKED: tl.constexpr, PAIR: tl.constexpr, HAS_ZEROS: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < K // PACKED
    code = tl.load(codes + row * (K // PACKED) + column, mask=inside, other=0)
    first = column // PAIR * (2 * PAIR) + column % PAIR if PACKED == 2 else column
    grid_wait(PDL)
    for half in tl.static_range(PACKED):
        place = first + half * PAIR
        group = row * GROUPS + place // GROUP
        zero = tl.load(zeros + group, mask=inside, other=0).to(tl.float32) if HAS_ZEROS else MIDDLE
        own = code if PACKED == 1 else (code >> 4 * half) & 15
        value = _decoded(own, zero, KIND) * tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * K + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _sum_parts(
    parts, bias, out, rows,
    N: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grid_wait(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * N + channel, mask=channel < N, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + channel, total.to(out.dtype.element_ty), mask=channel < N)


_one_row_launch = Launcher(_one_row, pdl=True, enable_fp_fusion=True)
_few_rows_launch = cache(lambda stages: Launcher(_few_rows, pdl=True, num_stages=stages))
_sum_launch = Launcher(_sum_parts, pdl=True)
_dequantize_launch = Launcher(_dequantize, pdl=True, enable_fp_fusion=False)


def tile_of(kind: str, rows: int) -> Tile:
    """The tile for this many rows."""
    tiles = TILES["4" if kind.endswith("4") else "8"]
    return Tile(*tiles[next((size for size in tiles if rows <= size), max(tiles))])


def parts_of(channels: int, width: int, block: int, rows: int) -> tuple[int, int]:
    """(parts, inputs of each) for a weight: enough programs for the device."""
    programs, of_program = next(grid for size, grid in GRIDS.items() if rows <= size)
    return divided(width, -(-programs // -(-channels // of_program)), block)


def product(
    x: torch.Tensor, kind: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bias: torch.Tensor | None,
    group_size: int, pair: int = 1, scale_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x @ weight.T + bias``.

    Args:
        x: [..., in] float16 or bfloat16, contiguous.
        kind, codes, scales, zeros, group_size, pair, scale_dtype: see `QuantizedWeight`. For 4 bits and more than one
            row, `pair` is half of `block_of`.
        bias: [out].

    Returns:
        [..., out], in x's dtype. Sums in float32.
    """
    bits = 4 if kind.endswith("4") else 8
    channels, width, rows = codes.shape[0], x.shape[-1], x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], channels)
    codes = codes if codes.dtype is torch.uint8 else codes.view(torch.uint8)
    middle = float(1 << (bits - 1))
    groups = group_size, scales.shape[1]
    shape = (channels, width, *groups, kind, 8 // bits, pair, zeros is not None, middle, bias is not None)
    weights = x, codes, scales, codes if zeros is None else zeros, scales if bias is None else bias
    # Tensor cores decode 4 bits faster.
    if rows == 1 and bits == 8 and width <= ROW_BLOCK * MAX_ROW_BLOCKS:
        grid = -(-channels // ROW_CHANNELS), 1, 1
        _one_row_launch(grid, (*weights, out), (), (*shape, ROW_CHANNELS, ROW_BLOCK), ROW_WARPS)
        return out
    block = block_of(bits, width, group_size)
    assert block is not None and (bits == 8 or pair == block // 2), "the caller asks has_kernel"
    many = rows > MANY_ROWS and block == BLOCK_K
    tile = MANY_TILES[bits] if many else tile_of(kind, rows)
    tiles = -(-channels // tile.channels), -(-rows // tile.rows)
    if many:
        parts, part = parts_of_many(tiles[0] * tiles[1], width)
    else:
        parts, part = parts_of(channels, width, block, rows)
    found = out if parts == 1 else torch.empty(parts, rows, channels, dtype=torch.float32, device=x.device)
    tensors, grid, of_tile = (*weights, found), (*tiles, parts), (tile.rows, tile.channels)
    if many:
        packed = 8 // bits
        same = (scale_dtype or scales.dtype) is x.dtype
        form = (*shape[:6], zeros is not None, middle, same, bias is not None and parts == 1)
        numbers = rows, part // (packed * STEP)
        many_rows_launch(tile.stages)(grid, tensors, numbers, (*form, *of_tile, STEP), tile.warps)
    else:
        constants = (*shape, part, parts, *of_tile, block)
        _few_rows_launch(tile.stages)(grid, tensors, (rows,), constants, tile.warps)
    if parts > 1:
        tensors = found, weights[4], out
        _sum_launch((rows, -(-channels // 512), 1), tensors, (rows,), (channels, parts, bias is not None, 512), 4)
    return out


def dequantize(
    kind: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, pair: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The weight [out, in] in `dtype`: computed in float32, rounded once. Arguments: see `product`."""
    packed = 2 if kind.endswith("4") else 1
    codes = codes if codes.dtype is torch.uint8 else codes.view(torch.uint8)
    rows, columns = codes.shape
    out = torch.empty(rows, columns * packed, dtype=dtype, device=codes.device)
    middle = 8.0 if packed == 2 else 128.0
    shape = (rows, columns * packed, group_size, scales.shape[1], kind, packed, pair, zeros is not None, middle)
    grid = rows, -(-columns // DEQUANTIZE_BLOCK), 1
    _dequantize_launch(grid, (codes, scales, codes if zeros is None else zeros, out), (), (*shape, DEQUANTIZE_BLOCK), 4)
    return out


@cache
def has_kernel(kind: str, width: int, group_size: int, device: int) -> bool:
    """Whether `product` takes weights of this kind and shape on a CUDA device, by its index."""
    if block_of(4 if kind.endswith("4") else 8, width, group_size) is None:
        return False
    return kind != "fp8" or torch.cuda.get_device_capability(device) >= (8, 9)
