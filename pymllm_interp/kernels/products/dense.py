# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Products of a few rows in half precision: decode steps of small batches, and drafts.

cuBLAS reads such weights at 72 to 94 % of an H100's bandwidth (benchmarks/results/h100-few-rows.json). A row's sums do not depend
on the number of rows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents

MAX_ROWS = 16
"""A tile of the tensor cores has as many."""
FEWEST_CHANNELS = 1024
"""Fewer output channels are too few programs."""


class Tile(NamedTuple):
    """Output channels and inputs of a block, and its warps and stages."""

    channels: int
    inputs: int
    warps: int
    stages: int


WIDE, LONG = Tile(64, 128, 4, 4), Tile(32, 256, 4, 4)
"""The fastest of 12 for an 8B model on an H100. LONG: where the sums are long, and the channels few."""


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, out, rows,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    weights = weight + channel.to(tl.int64)[:, None] * K + column[None, :]
    inputs = x + row[None, :] * K + column[:, None]
    there = (row < rows)[None, :]
    grid_wait(PDL)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # The weights are read once: evict them first.
        part = tl.load(weights + start, eviction_policy="evict_first")
        total = tl.dot(part, tl.load(inputs + start, mask=there, other=0.0), total)
    if HAS_BIAS:
        total += tl.load(bias + channel).to(tl.float32)[:, None]
    tl.store(out + row[None, :] * N + channel[:, None], total.to(out.dtype.element_ty), mask=there)


_launch = Launcher(_few_rows, pdl=True)


@cache
def tile_of(channels: int, inputs: int) -> Tile | None:
    """The tile for a weight [channels, inputs]; None: cuBLAS multiplies it."""
    tile = LONG if inputs > 2 * channels else WIDE
    fits = channels >= FEWEST_CHANNELS and channels % tile.channels == 0 and inputs % tile.inputs == 0
    return tile if fits else None


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] with at most `MAX_ROWS` rows, weight [out, in], bias [out], all contiguous -> [..., out]. Sums in float32."""
    channels, inputs = weight.shape
    tile = tile_of(channels, inputs)
    assert tile is not None, "tile_of says whether it fits"
    out = x.new_empty(*x.shape[:-1], channels)
    constants = channels, inputs, bias is not None, MAX_ROWS, tile.channels, tile.inputs, tile.stages
    tensors = x, weight, weight if bias is None else bias, out
    _launch((channels // tile.channels, 1, 1), tensors, (x.numel() // inputs,), constants, tile.warps)
    return out
