"""`QuantizedGemm`: a matrix product with a quantised weight.

| where | how |
|---|---|
| CUDA, up to `MAX_KERNEL_ROWS` rows | our Triton kernels, which dequantise the codes as they multiply |
| CUDA, more rows | the weight is dequantised, and multiplied by cuBLAS |
| CPU | the weight is dequantised, and multiplied as an unquantised one |
| with gradients | as on a CPU; the backward pass dequantises again, so that no pass holds all weights |

The dequantised weight lives as long as the product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..dispatch import triton_kernels_for
from ..gemm import HALF, Gemm
from .weight import QuantizedWeight

MAX_KERNEL_ROWS = 256
"""Rows up to which a kernel that reads the codes is used: a dequantised weight is written and read again."""


class QuantizedGemm:
    """``x @ weight.T + bias``.

    Args:
        weight: [out, in].
        bias: [out].
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        weight = self.weight
        rows = x.numel() // max(x.shape[-1], 1)
        if x.dtype in HALF and 0 < rows <= MAX_KERNEL_ROWS and triton_kernels_for(x) is not None:
            from ...kernels.triton_quantized import has_kernel, product

            if has_kernel(weight.kind, x.shape[-1], weight.group_size, x.get_device()):
                x = x.contiguous()
                return product(x, weight.kind, weight.codes, weight.scales, weight.zeros, self.bias, weight.group_size)
        if torch.is_grad_enabled() and x.requires_grad:
            return _DequantizedProduct.apply(x, self)  # pyright: ignore[reportReturnType]
        dequantized = weight.dequantize(x.dtype)
        if x.is_cuda:
            return F.linear(x, dequantized, self.bias)
        return Gemm([dequantized], dequantized, self.bias)(x)


class _DequantizedProduct(torch.autograd.Function):
    """The product for a pass with gradients of x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, gemm: QuantizedGemm) -> torch.Tensor:
        return F.linear(x, gemm.weight.dequantize(x.dtype), gemm.bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, QuantizedGemm], output: torch.Tensor) -> None:
        ctx.gemm = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] @ ctx.gemm.weight.dequantize(grads[0].dtype), None
