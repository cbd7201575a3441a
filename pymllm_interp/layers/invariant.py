"""Batch-invariant mode: the bits of a row do not depend on the rows beside it (docs/batch-invariance.md).

A model is built within `batch_invariant`, so that its parts are chosen once, and no pass asks for the mode. Steps with hooks run
within it, too: products of SAEs and lenses ask for it (`product`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.cpu.cpu_dispatch import cpu_kernels_for


class _Mode(threading.local):
    # Not a context variable: hooks run in greenlets, each of which would have its own.
    device: str | None = None


_mode = _Mode()


@contextmanager
def batch_invariant(device: str | None) -> Iterator[None]:
    """Parts that are made within this block are batch-invariant on a kind of device, "cpu" or "cuda". None: they are as usual."""
    before = set_invariant_device(device)
    try:
        yield
    finally:
        set_invariant_device(before)


def set_invariant_device(device: str | None) -> str | None:
    """Enter or leave the mode on this thread. Returns what `invariant_device` was."""
    before, _mode.device = _mode.device, device
    return before


def invariant_device() -> str | None:
    """Kind of the device on which parts that are made now are batch-invariant; None: they are as usual."""
    return _mode.device


# -- products of hooks ------------------------------------------------------------------------

_columns: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weight -> (its version, its columns as rows in float32 or its dtype). Kernels of a CPU read the columns one after the other."""


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x @ weight`` for x [..., in] and weight [in, out], in `dtype`, or in x's.

    In batch-invariant mode, outside of passes with gradients, a row's bits do not depend on the other rows.
    """
    if _mode.device is None or torch.is_grad_enabled():
        return x @ weight if dtype is None else x.to(dtype) @ weight.to(dtype)
    dtype = dtype or x.dtype
    if x.is_cuda:
        from ..kernels.products.fixed import product as fixed_product

        return fixed_product(x, weight.t(), None, dtype)
    x, columns = x.to(dtype), _columns_of(weight, dtype)
    kernels = cpu_kernels_for(x, columns)
    if kernels is None or not kernels.has_gemm(dtype):  # float16, float64
        rows = [row[None] @ weight.to(dtype) for row in x.reshape(-1, x.shape[-1]).clone()]
        return torch.cat([x.new_zeros(0, weight.shape[1]), *rows]).view(*x.shape[:-1], -1)
    return kernels.gemm(x, columns, None)


def _columns_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    columns = weight.detach().t()
    if columns.is_contiguous() and columns.dtype is dtype:
        return columns
    kept = _columns.get(weight)
    if kept is None or kept[0] != weight._version or kept[1].dtype is not dtype:
        kept = _columns[weight] = weight._version, columns.to(dtype).contiguous()
    return kept[1]


# -- elementwise functions of a CPU -----------------------------------------------------------
# In torch's own, the last elements of a thread's part run other code than those in whole vectors, with other bits. Its exp, tanh,
# erf and log1p, and its arithmetic, have no such elements.


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The logistic function in float32, rounded once."""
    return (1.0 / (torch.exp(-x.float()) + 1.0)).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)`` in float32, rounded once."""
    wide = x.float()
    return (wide / (torch.exp(-wide) + 1.0)).to(x.dtype)


def gelu(x: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """GELU in float32, rounded once. `tanh`: by its approximation."""
    wide = x.float()
    inner = (wide + 0.044715 * (wide * wide * wide)) * math.sqrt(2 / math.pi) if tanh else wide * math.sqrt(0.5)
    return (0.5 * wide * (1.0 + (torch.tanh(inner) if tanh else torch.erf(inner)))).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))`` in float32; x itself above 20."""
    wide = x.float()
    return torch.where(wide > 20.0, wide, torch.log1p(torch.exp(wide)))


def sigmoid_of_mode() -> Callable[[torch.Tensor], torch.Tensor]:
    """The logistic function for parts that are made now."""
    return sigmoid if invariant_device() == "cpu" else torch.sigmoid
