# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Rows rounded to FP8 (e4m3), each with its own scale, in one kernel: operands of `torch._scaled_mm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents

FP8_MAX = 448.0
SMALLEST = torch.finfo(torch.float32).tiny


@triton.jit
def _round_rows(
    x, codes, scales, WIDTH: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    grid_wait(PDL)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value)), LARGEST), SMALLEST)
    code = tl.clamp(tl.div_rn(value, scale), -LARGEST, LARGEST)
    tl.store(codes + row * WIDTH + column, code.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)


_launch = Launcher(_round_rows, pdl=True)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x in FP8, and their scales: ``x == codes * scales`` to rounding.

    Args:
        x: [rows, width], contiguous. A program holds a row in registers.

    Returns:
        codes [rows, width] float8_e4m3fn, and scales [rows, 1] float32: the largest of a row over 448.
    """
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _launch((rows, 1, 1), (x, codes, scales), (), (width, FP8_MAX, SMALLEST, block), min(16, max(4, block // 1024)))
    return codes, scales
