"""Projections of families that keep q, k and v as one weight, and GPT-2's `Conv1D`, which keeps a weight transposed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D as PlainConv1D

from ..core.current_pass import current_batch
from ..core.forward_batch import ForwardBatch, SiteOps
from ..core.model_spec import ModelSpec
from .edits.base import apply_inner, capture_inner
from .gemm import Gemm
from .linear import InnerSite, Linear, Product, adapted
from .quantization.unallocated import weight_device
from .rope import heads_of


class Conv1D(Product, PlainConv1D):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A projection with `weight` as [in, out]: a view of memory that lies as [out, in], which kernels read."""

    transposed = True

    def __init__(
        self, nf: int, nx: int, dtype: torch.dtype, device: str, *, input_site: InnerSite | None = None
    ) -> None:
        nn.Module.__init__(self)  # transformers' own would draw random weights
        self.nf, self.nx, self.input_site = nf, nx, input_site
        weight = torch.empty(nf, nx, dtype=dtype, device=weight_device(device))
        bias = torch.empty(nf, dtype=dtype, device=device)
        self.weight, self.bias = nn.Parameter(weight.t(), False), nn.Parameter(bias, False)
        self.bind()

    def bind(self) -> None:
        """Rebuild the product after `weight` was replaced by another tensor."""
        self.gemm = Gemm([self.weight], self.weight.detach().t(), self.bias.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainConv1D:
        """transformers' `Conv1D` with its own weights."""
        copied = PlainConv1D(self.nf, self.nx)
        copied.weight, copied.bias = deepcopy(self.weight, memo), deepcopy(self.bias, memo)
        memo[id(self)] = copied
        return copied.train(self.training)


class FusedQKV(Product):
    """A projection to q, k and v. Their sites are slices of its output.

    Attributes:
        layer_idx: index of the decoder layer.
        head_dim, num_kv_heads: size of a head, and number of K and V heads.
        by_head: whether q, k and v of each head follow each other; else all q, all k, all v.
    """

    layer_idx: int
    head_dim: int
    num_kv_heads: int
    by_head: bool

    def set_heads(self, spec: ModelSpec, layer_idx: int, by_head: bool) -> None:
        """Set the sizes and the layer."""
        self.layer_idx, self.by_head = layer_idx, by_head
        self.head_dim, self.num_kv_heads = spec.head_dim, spec.num_key_value_heads

    def heads_of(self, product: torch.Tensor) -> list[torch.Tensor]:
        """q, k and v, views [tokens, heads, head_dim] of the output [1, tokens, out]."""
        return heads_of(product[0].unflatten(-1, (-1, self.head_dim)), self.num_kv_heads, self.by_head)

    def project(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        """The projection, after the ops at its sites, captured."""
        return self.capture(self._applied(x, batch), None if batch is None else batch.site_ops)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._applied(input, current_batch())

    def _applied(self, x: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        """The projection, after the ops at its sites."""
        if batch is None:
            return self.gemm(x)
        return self._apply_ops(adapted(self.gemm, x, self.lora, batch), batch.site_ops)

    def capture(self, product: torch.Tensor, site_ops: SiteOps | None) -> torch.Tensor:
        """Capture q, k and v. Returns the product."""
        if site_ops is not None and site_ops.inner:
            for kind, part in zip("qkv", self.heads_of(product), strict=True):
                if kind in site_ops.inner:
                    capture_inner(part.flatten(1)[None].contiguous(), site_ops, self.layer_idx, kind)
        return product

    def _apply_ops(self, product: torch.Tensor, site_ops: SiteOps | None) -> torch.Tensor:
        """The product after the ops at q, k and v, which are written in place."""
        if site_ops is not None and site_ops.inner:
            for kind, part in zip("qkv", self.heads_of(product), strict=True):
                if kind in site_ops.inner:
                    value = part.flatten(1)[None].contiguous()
                    applied = apply_inner(value, site_ops, self.layer_idx, kind)
                    if applied is not value:
                        part.copy_(applied[0].view_as(part))
        return product


class FusedLinear(FusedQKV, Linear):
    """`nn.Linear` that projects to q, k and v."""


class FusedConv1D(FusedQKV, Conv1D):
    """`Conv1D` that projects to q, k and v."""
