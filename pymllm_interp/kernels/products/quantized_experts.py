# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
# As in triton_kernels.py.
"""`moe.expert_product` with weights in FP8.

A program multiplies a tile of one expert's entries with some rows of its weight, which it dequantises in registers. Scales multiply
the float32 sum of their inputs. Sums have one order in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents
from .moe import Sorted, Tiling, gated
from .quantized_blocks import BLOCK_K

TILINGS = (Tiling(16, 64, 128, 4, 4), Tiling(32, 64, 128, 4, 4), Tiling(64, 64, 128, 4, 3), Tiling(128, 64, 128, 8, 3))
"""Tilings, see `moe.TILINGS`. FP8 with groups of fewer inputs steps by a group."""


@triton.jit
def _fp8_step(sums, code_at, scale_at, known, values):
    """`sums` [rows, entries] plus the product of codes with inputs [inputs, entries] of one scale."""
    code = tl.load(code_at, mask=known[:, None], other=0)
    weight = code.to(tl.float8e4nv, bitcast=True).to(values.dtype)
    scale = tl.load(scale_at, mask=known, other=0.0).to(tl.float32)
    return sums + tl.dot(weight, values, input_precision="ieee") * scale[:, None]


@triton.jit(do_not_specialize=["num_entries", "alpha", "limit"])
def _codes_product(
    x, codes, scales, bias, scores, order, owners, out, num_entries, alpha, limit, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, TOP_K: tl.constexpr, GATE: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    parts: tl.constexpr = (N + CHANNELS - 1) // CHANNELS
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    entry = tl.load(order + tile * ENTRIES + tl.arange(0, ENTRIES)).to(tl.int64)
    real = entry < num_entries
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < N
    # Rows of gate and up: next to each other, or all of gate before all of up.
    step: tl.constexpr = 2 if GATE == "clamped" else 1
    to_up: tl.constexpr = 1 if GATE == "clamped" else N
    first = expert * (N if GATE == "" else 2 * N) + channel * step
    sums = tl.zeros((CHANNELS, ENTRIES), tl.float32)
    up_sums = tl.zeros((CHANNELS, ENTRIES), tl.float32)
    row = entry // TOP_K
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    inputs = tl.arange(0, DEPTH)
    x_at = x + row[None, :] * K + inputs[:, None]
    code_at = codes + first[:, None] * K + inputs[None, :]
    scale_at = scales + first * groups
    for start in range(0, K, DEPTH):
        values = tl.load(x_at + start, mask=real[None, :], other=0.0)
        sums = _fp8_step(sums, code_at + start, scale_at + start // GROUP, known, values)
        if GATE != "":
            up_at, up_scale_at = code_at + to_up * K + start, scale_at + to_up * groups + start // GROUP
            up_sums = _fp8_step(up_sums, up_at, up_scale_at, known, values)
    if BIASED:
        sums += tl.load(bias + first, mask=known, other=0.0).to(tl.float32)[:, None]
        if GATE != "":
            up_sums += tl.load(bias + first + to_up, mask=known, other=0.0).to(tl.float32)[:, None]
    value = gated(sums, up_sums, alpha, limit, GATE, dtype)
    if SCALED:
        score = tl.load(scores + entry, mask=real, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * score[None, :]).to(dtype)
    where = out + entry[None, :] * N + channel[:, None]
    tl.store(where, value, mask=known[:, None] & real[None, :])


_launches = {stages: Launcher(_codes_product, pdl=True, num_stages=stages) for stages in {t.stages for t in TILINGS}}


def expert_product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group_size: int, experts: int, by_expert: Sorted,
    entries: int, gate: str, scores: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    clamp: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:  # fmt: skip
    """`moe.expert_product` with a weight of codes.

    Args:
        codes, scales, group_size: see `QuantizedWeight` [experts * rows, in] and `has_expert_kernel`.
    """
    rows, width = codes.shape[0] // experts, x.shape[-1]
    channels = rows // 2 if gate else rows
    out = torch.empty(entries, channels, dtype=x.dtype, device=x.device)
    tiling = by_expert.tiling
    depth = min(group_size, BLOCK_K)
    grid = (len(by_expert.owners) * triton.cdiv(channels, tiling.channels), 1, 1)
    form = channels, width, group_size, entries // len(x), gate, bias is not None, scores is not None
    others = x if bias is None else bias, x if scores is None else scores
    tensors = x, codes.view(torch.uint8), scales, *others, by_expert.order, by_expert.owners, out
    constants = (*form, tiling.entries, tiling.channels, depth)
    _launches[tiling.stages](grid, tensors, (entries, *clamp), constants, tiling.warps)
    return out
