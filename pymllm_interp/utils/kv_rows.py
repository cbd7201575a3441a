"""K and V as a cache stores them: in its dtype. For FP8, rows are divided by a scale and rounded to E4M3."""

from __future__ import annotations

import torch

from .device import resolve_dtype

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype of a cache: "auto" is the model's, "fp8" or "fp8_e4m3" E4M3."""
    if name == "auto":
        return dtype
    return FP8 if name.startswith("fp8") else resolve_dtype(name, device)


def memory_of(stored: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype that torch indexes: FP8 as bytes."""
    return stored.view(torch.uint8) if stored.dtype is FP8 else stored


def write_rows(stored: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float = 1.0) -> None:
    """Write rows [tokens, ...] to the slots [tokens] int64 of a cache. They are detached: a cache outlives every autograd graph.

    Args:
        scale: quantization scale of an FP8 cache. Values are clamped to 448 times the scale.
    """
    rows = rows.detach()
    if stored.dtype is FP8:
        rows = (rows.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    memory_of(stored).index_copy_(0, slots, memory_of(rows.to(stored.dtype)))


def read_rows(stored: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The slots [tokens] int64 of a cache as rows [tokens, ...] of a dtype, in fresh memory."""
    found = memory_of(stored).index_select(0, slots)
    if stored.dtype is not FP8:
        return found.to(dtype)
    rows = found.view(FP8).to(dtype)
    return rows if scale == 1 else rows.mul_(scale)
