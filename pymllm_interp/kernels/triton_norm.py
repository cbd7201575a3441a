# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Triton kernels for norms; `triton_kernels` has their public names."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core import norm_kind
from .launch import Launcher, grid_wait, launch_dependents

RMS, RMS_ONCE, LAYER = tl.constexpr(norm_kind.RMS), tl.constexpr(norm_kind.RMS_ONCE), tl.constexpr(norm_kind.LAYER)
NORM_BLOCK = 2048
"""Elements per program of a norm: as many whole rows as fit, at least one."""
NORM_WARP = 512
"""Elements per warp of a norm."""


@triton.jit
def load_shift(weight, weights, column, SIZE: tl.constexpr, KIND: tl.constexpr):
    """The bias of a LayerNorm, which lies behind the weight; any other norm has none."""
    if KIND == LAYER:
        return tl.load(weight + SIZE + column, mask=column < SIZE, other=0.0, eviction_policy="evict_last")
    return weights


@triton.jit
def normalize(value, weights, shift, eps, column, SIZE: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """The norm of `value` [rows, block] float32, zeros beyond SIZE, in `dtype`."""
    if KIND == LAYER:
        mean = tl.sum(value, axis=1, keep_dims=True) / SIZE
        value = tl.where(column < SIZE, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + eps)
    if KIND == RMS:
        normed = (value * scale).to(dtype).to(tl.float32)
        return (weights.to(tl.float32) * normed).to(dtype)
    if KIND == LAYER:
        return (value * scale * weights.to(tl.float32) + shift.to(tl.float32)).to(dtype)
    if KIND == RMS_ONCE:
        return (value * scale * weights.to(tl.float32)).to(dtype)
    return (value * scale * (1.0 + weights.to(tl.float32))).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, delta, weight, total, out, rows, eps, SIZE: tl.constexpr, INNER: tl.constexpr, OUTER_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr, ADD: tl.constexpr, PARALLEL: tl.constexpr, IN_PLACE: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm kernel. With PARALLEL, `total` holds a second delta, and is overwritten by the sum."""
    launch_dependents(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < SIZE)
    source = row // INNER * OUTER_STRIDE + row % INNER * INNER_STRIDE + column
    # Keep the norm's weights in the L2 cache: the large weights pass through it once a step.
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0, eviction_policy="evict_last")
    shift = load_shift(weight, weights, column, SIZE, KIND)
    grid_wait(PDL)
    value = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(delta + source, mask=mask, other=0.0).to(tl.float32)
        if PARALLEL:
            added = (added + tl.load(total + source, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        summed = (value + added).to(dtype)
        tl.store(total + source, summed, mask=mask)
        value = summed.to(tl.float32)
    target = source if IN_PLACE else row * SIZE + column
    tl.store(out + target, normalize(value, weights, shift, eps, column, SIZE, KIND, dtype), mask=mask)


_norm_launch = Launcher(_norm, pdl=True, enable_fp_fusion=False)


def _launch_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    kind: int,
    add: bool = False,
    parallel: bool = False,
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if rows == 0:
        return
    inner, outer_stride, inner_stride = 1, size, 0
    if not x.is_contiguous():  # [tokens, heads, head_dim], a slice of a merged product
        inner, (outer_stride, inner_stride, _) = x.shape[1], x.stride()
    per_program, block, warps = norm_launch(size)
    constants = (size, inner, outer_stride, inner_stride, add, parallel, out is x, kind, per_program, block)
    _norm_launch((-(-rows // per_program), 1, 1), (x, delta, weight, total, out), (rows, eps), constants, warps)


def norm_launch(size: int) -> tuple[int, int, int]:
    """(rows per program, elements per row, warps) for kernels that sum over rows of `size`. All sums have the same order."""
    block = 1 << (size - 1).bit_length()
    rows = max(1, NORM_BLOCK // block)
    return rows, block, min(16, max(1, block * rows // NORM_WARP))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: int = norm_kind.RMS) -> torch.Tensor:
    """x [..., size] -> the same shape in fresh memory. x is contiguous, or [tokens, heads, size] with a contiguous last dim."""
    if not x.is_contiguous() and (x.dim() != 3 or x.stride(2) != 1):
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_norm(x, x, weight, x, out, eps, kind)
    return out


def rms_norm_(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: int = norm_kind.RMS) -> None:
    """`rms_norm` in place: x [tokens, heads, size], last dim contiguous."""
    _launch_norm(x, x, weight, x, x, eps, kind)


def add_rms_norm(
    h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, kind: int = norm_kind.RMS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta, its norm), both fresh memory; h and delta [..., size]."""
    h, delta = h.contiguous(), delta.contiguous()
    total, out = torch.empty_like(h), torch.empty_like(h)
    _launch_norm(h, delta, weight, total, out, eps, kind, add=True)
    return total, out


def layer_norm(x: torch.Tensor, weight_and_bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] -> the same shape in fresh memory; weight_and_bias [2, size]."""
    return rms_norm(x, weight_and_bias, eps, norm_kind.LAYER)


def add_layer_norm(
    h: torch.Tensor, delta: torch.Tensor, weight_and_bias: torch.Tensor, eps: float, attention: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta, its norm), out in fresh memory.

    Args:
        h, delta: [..., size].
        attention: [..., size], contiguous, overwritten by the sum ``h + (delta + attention)``; None: fresh memory is.
    """
    h, delta = h.contiguous(), delta.contiguous()
    total, out = torch.empty_like(h) if attention is None else attention, torch.empty_like(h)
    parallel = attention is not None
    _launch_norm(h, delta, weight_and_bias, total, out, eps, norm_kind.LAYER, add=True, parallel=parallel)
    return total, out
