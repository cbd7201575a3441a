# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""A matrix product with bits that do not depend on the number of rows: for batch-invariant mode.

A program computes a tile of the output over all of K, step by step. No other program adds to it. The weight is the first operand of
the tensor cores, which take 64 of its rows by one instruction. So in each tiling an output is a sum of products of 16 channels
after the other. Few rows of x need little padding.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents, shared_memory
from . import library


class ProductTiling(NamedTuple):
    """Rows of the weight and rows of x of a tile, depth of a step, warps, and stages. See benchmarks/batch_invariant_gpu.py."""

    channels: int
    rows: int
    depth: int
    warps: int
    stages: int


FEW = tuple(ProductTiling(64, rows, 128, 4, 8) for rows in (16, 32))
"""Tilings of few rows, by them, for a weight with at most a tile for each multiprocessor; four stages otherwise."""
MANY = ProductTiling(128, 256, 64, 8, 3), ProductTiling(128, 128, 64, 8, 6), ProductTiling(128, 64, 128, 4, 4)
"""Tilings of more rows, from the largest."""
TILES, ENOUGH, SHALLOW = 132, 90, 1 << 21
"""Most tiles of a weight of which each has a multiprocessor. Tiles that keep a device busy. Channels of x in all tiles, below which
the largest tiling has a fourth stage."""
WIDE = ProductTiling(64, 16, 32, 4, 2)
"""Tiling in float32."""
GROUP = 8
"""Tiles of x in a row over one block of the weight: both stay in the L2 cache."""


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, N: tl.constexpr, K: tl.constexpr, N_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    BIASED: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    blocks: tl.constexpr = (N + CHANNELS - 1) // CHANNELS
    tiles = (rows + ROWS - 1) // ROWS
    program = tl.program_id(0)
    first = program // (GROUPED * blocks) * GROUPED
    together = tl.minimum(tiles - first, GROUPED)
    tile = first + program % (GROUPED * blocks) % together
    block = program % (GROUPED * blocks) // together
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    row = tile * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    known = channel[:, None] < N
    w_at = weight + channel.to(tl.int64)[:, None] * N_STRIDE + depth[None, :] * K_STRIDE
    x_at = x + row.to(tl.int64)[:, None] * K + depth[None, :]
    real = row[:, None] < rows
    sums = tl.zeros((CHANNELS, ROWS), tl.float32)
    grid_wait(PDL)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            w = tl.load(w_at, mask=known, other=0.0)
            own = tl.load(x_at, mask=real, other=0.0)
        else:
            here = start + depth[None, :] < K
            w = tl.load(w_at, mask=known & here, other=0.0)
            own = tl.load(x_at, mask=real & here, other=0.0)
        sums = tl.dot(w, tl.trans(own), sums, input_precision="ieee")
        w_at += DEPTH * K_STRIDE
        x_at += DEPTH
    if BIASED:
        sums += tl.load(bias + channel, mask=channel < N, other=0.0).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[:, None] * N + channel[None, :]
    tl.store(target, tl.trans(sums).to(out.dtype.element_ty), mask=real & (channel[None, :] < N))


_launch = cache(lambda stages: Launcher(_product, pdl=True, num_stages=stages))


def tiling_of(rows: int, n: int, k: int, dtype: torch.dtype) -> ProductTiling:
    """Tiling for a product of x [rows, k] and a weight [n, k]. It changes times, and no bit in half precision."""
    if dtype.itemsize > 2:
        return WIDE
    if found := next((tiling for tiling in FEW if rows <= tiling.rows), None):
        return found if triton.cdiv(n, found.channels) <= TILES else found._replace(stages=4)
    for tiling in MANY:
        tiles = triton.cdiv(n, tiling.channels) * triton.cdiv(rows, tiling.rows)
        if tiles >= ENOUGH:
            return tiling._replace(stages=4) if tiling is MANY[0] and tiles * k < SHALLOW else tiling
    return MANY[-1]


def _algorithm_of(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Any:
    """cuBLASLt's algorithm with the bits of this file's kernel; None: the kernel itself."""
    if len(x) <= FEW[-1].rows or not x.is_cuda or not x.dtype.itemsize == out.dtype.itemsize == 2:
        return None
    n, k = weight.shape
    aligned = not (n % 8 or k % 8 or (x.data_ptr() | weight.data_ptr()) % 16)
    if out.dtype is not x.dtype or not aligned or not weight.is_contiguous():
        return None
    return library.algorithm_for(x.device.index, len(x), n, k, x.dtype, lambda x, w: product(x, w, tiling=MANY[0]))


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None,
    tiling: ProductTiling | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x @ weight.T + bias``: x [..., in], weight [out, in] of any strides, bias [out] -> [..., out].

    Args:
        dtype: dtype of the result; None: x's. Sums are float32.
        tiling: tiling; None: the one for the number of rows.
    """
    n, k = weight.shape
    flat = x.reshape(-1, k).contiguous()
    if flat.dtype is not weight.dtype:
        flat, weight = flat.float(), weight.float()
    out = torch.empty(len(flat), n, dtype=dtype or x.dtype, device=x.device)
    algorithm = _algorithm_of(flat, weight, out) if tiling is None and bias is None else None
    launched = algorithm is not None and library.run(algorithm, flat, weight, out)
    if len(flat) and not launched:
        tile = tiling or tiling_of(len(flat), n, k, flat.dtype)
        grid = (triton.cdiv(n, tile.channels) * triton.cdiv(len(flat), tile.rows), 1, 1)
        tensors = flat, weight, flat if bias is None else bias, out
        constants = n, k, *weight.stride(), bias is not None, *tile[:3], GROUP
        step = (tile.channels + tile.rows) * tile.depth * flat.element_size()
        stages = max(1, min(tile.stages, shared_memory(flat.get_device()) // step))
        _launch(stages)(grid, tensors, (len(flat),), constants, tile.warps)
    return out.view(*x.shape[:-1], n)
