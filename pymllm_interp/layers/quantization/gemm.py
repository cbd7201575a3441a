"""`QuantizedGemm`: a matrix product with a quantised weight.

On CUDA, up to `MAX_KERNEL_ROWS` rows run native Triton kernels, which dequantise the codes as they multiply. With more rows
the weight is dequantised, and multiplied by cuBLAS. With `quantize="fp8-w8a8"` more than `MAX_UNROUNDED_ROWS` rows are
rounded to FP8, each with its own scale.

On a CPU the weight is dequantised, and multiplied as an unquantised one. So are passes with gradients. Their backward pass
dequantises again, so that no pass holds all weights.

The dequantised weight lives as long as the product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.products.quantized_blocks import block_of
from ..dispatch import triton_kernels_for
from ..gemm import HALF, Gemm
from ..invariant import invariant_device
from .weight import BITS, FP8_MAX, QuantizedWeight

MAX_KERNEL_ROWS, MAX_UNROUNDED_ROWS = 256, 48
"""Rows up to which a kernel that reads the codes is used: a dequantised weight is written and read again. And rows up to which
such a kernel is faster on an H100 than rounded rows."""
MAX_ROUNDED_WIDTH = 1 << 15
"""A kernel holds a row in registers."""


class QuantizedGemm:
    """``x @ weight.T + bias``.

    Args:
        weight: [out, in].
        bias: [out].

    Attributes:
        rounds_rows: whether many rows are rounded to FP8, like the weight.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> QuantizedGemm:
        """The kind for parts that are made now."""
        return object.__new__(InvariantQuantizedGemm if cls is QuantizedGemm and invariant_device() == "cuda" else cls)

    def __init__(self, weight: QuantizedWeight | None, bias: torch.Tensor | None) -> None:
        self._weight, self.bias = weight, bias
        self.rounds_rows = False

    @property
    def weight(self) -> QuantizedWeight:
        """The quantised weight."""
        assert self._weight is not None, "a subclass has the weight"
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        weight = self.weight
        rows = x.numel() // max(x.shape[-1], 1)
        if self.rounds_rows and rows > MAX_UNROUNDED_ROWS and x.is_cuda and not torch.is_grad_enabled():
            return scaled_product(x, weight, self.bias)
        has_scales = weight.scales.is_floating_point()  # and no exponents, which only experts have
        if x.dtype in HALF and 0 < rows <= MAX_KERNEL_ROWS and has_scales and triton_kernels_for(x) is not None:
            from ...kernels.products.quantized import has_kernel, product

            if has_kernel(weight.kind, x.shape[-1], weight.group_size, x.get_device()):
                codes = weight.kind, weight.codes, weight.scales, weight.zeros
                form = weight.group_size, weight.pair, weight.scale_dtype
                return product(x.contiguous(), *codes, self.bias, *form)
        if torch.is_grad_enabled() and x.requires_grad:
            return _DequantizedProduct.apply(x, self)  # pyright: ignore[reportReturnType]
        dequantized = weight.dequantize(x.dtype)
        if x.is_cuda:
            return F.linear(x, dequantized, self.bias)
        return Gemm([dequantized], dequantized, self.bias)(x)


class InvariantQuantizedGemm(QuantizedGemm):
    """The product of batch-invariant mode on CUDA: the weight is dequantised for any number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if triton_kernels_for(x) is None:
            return super().__call__(x)
        from ...kernels.products.fixed import product

        return product(x, self.weight.dequantize(x.dtype), self.bias)


def laid_out(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with its codes and scales as the kernels of its device read them."""
    block = block_of(BITS[weight.kind], weight.shape[1], weight.group_size)
    if not weight.is_cuda or block is None:
        return weight
    # A multiprocessor loads 4 bytes ahead of time, and not 2.
    if weight.scales.shape[1] > 1 and weight.scales.dtype in HALF:
        weight = replace(weight, scales=weight.scales.float(), scale_dtype=weight.scales.dtype)
    return weight.paired(block // 2) if BITS[weight.kind] == 4 else weight


def takes_rounded_rows(weight: QuantizedWeight) -> bool:
    """Whether `scaled_product` takes a weight: FP8 with a scale for each channel, and sizes that are multiples of 16."""
    return (
        weight.kind == "fp8"
        and weight.scales.shape[1] == 1
        and not any(size % 16 for size in weight.shape)
        and weight.shape[1] <= MAX_ROUNDED_WIDTH
    )


def scaled_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of rows that are rounded to FP8 and an FP8 weight, on FP8 tensor cores. See `takes_rounded_rows`.

    Args:
        x: [..., in] bfloat16.

    Returns:
        [..., out] bfloat16. A row does not depend on the others.
    """
    rows = x.reshape(-1, x.shape[-1])
    if triton_kernels_for(x) is not None:
        from ...kernels.products.rounded_rows import round_rows

        codes, scales = round_rows(rows.contiguous())
    else:
        codes, scales = rounded(rows)
    of_channels = weight.scales.float().view(1, -1)
    out = torch._scaled_mm(codes, weight.codes.t(), scale_a=scales, scale_b=of_channels, out_dtype=torch.bfloat16)
    out = out.to(x.dtype) if bias is None else out.to(x.dtype) + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain-torch reference of `kernels.products.rounded_rows.round_rows`."""
    rows = x.float()
    scales = rows.abs().amax(1, keepdim=True).div_(FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    return rows.div_(scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


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
