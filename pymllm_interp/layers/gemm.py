"""`Gemm`: a matrix product with a bias, by the device's fastest kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.cpu.cpu_dispatch import cpu_kernels_for
from ..kernels.products import fastest
from .dispatch import triton_kernels_for
from .invariant import invariant_device

HALF = (torch.float16, torch.bfloat16)


class Gemm:
    """``x @ weight.T + bias`` by the device's fastest kernel.

    On CUDA one row in half precision runs as a native matrix-vector kernel, with more bandwidth than cuBLAS. Of 33 to 256 rows,
    cuBLASLt's fastest algorithm is taken by a measurement.

    On a CPU, native kernels read the weight as it lies in memory. Without them, bfloat16 runs from a copy of the weight in
    oneDNN's blocked layout, if oneDNN has such products. The copy is made at first use, and again after a write to the
    weight.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Gemm:
        """The kind for parts that are made now."""
        return object.__new__(InvariantGemm if cls is Gemm and invariant_device() == "cuda" else cls)

    def __init__(self, weights: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self._columns = weight.t()
        self._watched = weights  # their versions tell of writes to the weight
        self._packed: torch.Tensor | None = None
        self._versions: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        one_row = x.numel() == self.weight.shape[1] and x.dtype in HALF and x.is_contiguous()
        if one_row and (kernels := triton_kernels_for(x)) is not None:
            return kernels.gemv(x, self.weight, self.bias)
        if not x.is_cuda:
            return self._on_cpu(x)
        # The library call behind `F.linear`, without its dispatch, which takes 2 us on the host.
        rows = x.reshape(-1, x.shape[-1])
        if self.bias is not None:
            out = torch.addmm(self.bias, rows, self._columns)
        elif fastest.FEWEST <= rows.shape[0] <= fastest.MOST and self._is_measured(rows):
            out = fastest.product(rows, self.weight)
        else:
            out = torch.mm(rows, self._columns)
        return out.view(*x.shape[:-1], self.weight.shape[0])

    def _is_measured(self, rows: torch.Tensor) -> bool:
        return rows.dtype in HALF and rows.dtype is self.weight.dtype and triton_kernels_for(rows) is not None

    def _on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        fits = x.shape[-1] == self.weight.shape[1]
        if fits and (kernels := cpu_kernels_for(x, self.weight)) is not None and kernels.has_gemm(x.dtype):
            return kernels.gemm(x, self.weight, self.bias)
        if x.is_cpu and x.dtype is torch.bfloat16 and _packs_bfloat16() and not torch.is_grad_enabled():
            return torch.ops.mkldnn._linear_pointwise(x, self._pack(), self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def _pack(self) -> torch.Tensor:
        versions = [weight._version for weight in self._watched]
        if self._packed is None or versions != self._versions:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
            self._versions = versions
        assert self._packed is not None
        return self._packed


class InvariantGemm(Gemm):
    """The product of batch-invariant mode on CUDA. Passes with gradients have one request, and multiply as usual."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if triton_kernels_for(x) is None:
            return super().__call__(x)
        from ..kernels.products.fixed import product

        return product(x, self.weight, self.bias)


@cache
def _packs_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 products for this CPU: it wants AVX-512 or the like."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
