# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Triton kernels for activations; `triton_kernels` has their public names."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launcher, grid_wait, launch_dependents

SILU, GELU, GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ACT_BLOCK, ACT_WARPS = 1024, 4


@triton.jit
def _act(x, out, SIZE: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    grid_wait(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    source = x + row * (2 * SIZE if GATED else SIZE) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if KIND == SILU:
        value = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    elif KIND == GELU:
        value = (0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))).to(dtype)
    else:  # 0.5 * (1 + tanh(y)) is the sigmoid of 2 * y
        y = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = (gate / (1.0 + tl.exp(-y))).to(dtype)
    if GATED:
        value = (value.to(tl.float32) * tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + row * SIZE + column, value, mask=mask)


_act_launch = Launcher(_act, pdl=True, enable_fp_fusion=False)


def _launch_act(x: torch.Tensor, size: int, gated: bool, kind: int) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], size)
    if rows := out.numel() // size:
        _act_launch((rows, -(-size // ACT_BLOCK), 1), (x, out), (), (size, gated, kind, ACT_BLOCK), ACT_WARPS)
    return out


@triton.jit(do_not_specialize=["count"])
def _softcap(x, out, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    grid_wait(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    capped = cap * (2.0 / (1.0 + tl.exp(-2.0 * value / cap)) - 1.0)  # the hyperbolic tangent, by an exponential
    tl.store(out + place, capped.to(x.dtype.element_ty), mask=place < count)


_softcap_launch = Launcher(_softcap, pdl=True, enable_fp_fusion=False)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)``, in fresh memory."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _softcap_launch((-(-x.numel() // ACT_BLOCK), 1, 1), (x, out), (x.numel(), cap), (ACT_BLOCK,), ACT_WARPS)
    return out


def silu(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] -> the same shape."""
    return _launch_act(x, x.shape[-1], False, 0)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]: ``silu(gate) * up``, with silu rounded before the product."""
    return _launch_act(gate_up, gate_up.shape[-1] // 2, True, 0)


def gelu(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """x [..., size] -> the same shape; `tanh`: by the approximation with tanh."""
    return _launch_act(x, x.shape[-1], False, 2 if tanh else 1)


def gelu_mul(gate_up: torch.Tensor, tanh: bool) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]: ``gelu(gate) * up``, with gelu rounded before the product."""
    return _launch_act(gate_up, gate_up.shape[-1] // 2, True, 2 if tanh else 1)
