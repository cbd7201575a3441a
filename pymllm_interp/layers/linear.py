"""Matrix products. Every weight matrix of a native model goes through here.

`Linear` is one projection. `MergedLinear` computes several that read the same input (q, k and v; gate and up) as one
matrix product, while each of them stays a module of its own, under its own name, with its own `.weight`::

    qkv = MergedLinear(hidden, [512, 128, 128], bias=False, dtype=torch.float32, device="cpu")
    q_proj, k_proj, v_proj = qkv.projections       # modules, for the tree
    with qkv.product(x):                           # one product ...
        q, k, v = q_proj(x), k_proj(x), v_proj(x)  # ... served as three slices of it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import kernels_for
from .edits.base import SiteModule, apply_at, apply_inner, capture_inner, residual_site

HALF = (torch.float16, torch.bfloat16)


class Gemm:
    """``x @ weight.T + bias`` by the quickest kernel that the device has.

    One row in half precision on CUDA reads the weight once, by a kernel of ours, nearer to the memory's speed than the
    library's.

    bfloat16 on the CPU runs from a copy of the weight in oneDNN's blocked layout, about twice as fast in decode. The copy
    is made at first use and anew when the weight was written to since.
    """

    def __init__(self, weights: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self._columns = weight.t()
        self._watched = weights  # tensors whose version tells that the weight was written to
        self._packed: torch.Tensor | None = None
        self._versions: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        if x.is_cpu and x.dtype is torch.bfloat16 and not torch.is_grad_enabled():
            return torch.ops.mkldnn._linear_pointwise(x, self._pack(), self.bias, "none", [], "")
        one_row = x.numel() == self.weight.shape[1] and x.dtype in HALF and x.is_contiguous()
        if one_row and (kernels := kernels_for(x)) is not None:
            return kernels.gemv(x, self.weight, self.bias)
        if not x.is_cuda:
            return F.linear(x, self.weight, self.bias)
        # The library call that `F.linear` comes to, without its detours, which take the host 2 us.
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(rows, self._columns) if self.bias is None else torch.addmm(self.bias, rows, self._columns)
        return out.view(*x.shape[:-1], self.weight.shape[0])

    def _pack(self) -> torch.Tensor:
        versions = [weight._version for weight in self._watched]
        if self._packed is None or versions != self._versions:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
            self._versions = versions
        assert self._packed is not None
        return self._packed


class Linear(SiteModule):
    """A projection: x [..., in] -> [..., out].

    Attributes:
        reads, makes: (layer, kind) of the inner site that its input is, or its output, if any.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.reads: tuple[int, str] | None = None
        self.makes: tuple[int, str] | None = None
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), False) if bias else None
        self.bind()

    def bind(self) -> None:
        """Build the product anew, after `weight` became another tensor (tied embeddings)."""
        self.gemm = Gemm([self.weight], self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edits = self.take_edits()
        if self.reads is not None:
            capture_inner(x, edits, *self.reads)
        out = self.gemm(x)
        return out if self.makes is None else apply_inner(out, edits, *self.makes)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Projection(SiteModule):
    """One of the projections of a `MergedLinear`. Its weight is a view of the merged one.

    Attributes:
        makes: (layer, kind) of the inner site that its output is, if any.
    """

    def __init__(self, merged: MergedLinear, index: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.makes: tuple[int, str] | None = None
        self._merged = [merged]  # in a list: the merged product is no module of the tree
        self._index = index
        self.weight = nn.Parameter(weight, False)
        self.bias = nn.Parameter(bias, False) if bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._merged[0].slice(self._index, x)
        return out if self.makes is None else apply_inner(out, self.take_edits(), *self.makes)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"


class MergedLinear:
    """Several projections of one input, computed as one product [..., in] -> [..., sum of out]."""

    def __init__(self, in_features: int, sizes: Sequence[int], bias: bool, dtype: torch.dtype, device: str) -> None:
        self.sizes = list(sizes)
        weight = torch.empty(sum(sizes), in_features, dtype=dtype, device=device)
        merged_bias = torch.empty(sum(sizes), dtype=dtype, device=device) if bias else None
        weights = weight.split(self.sizes)
        biases = merged_bias.split(self.sizes) if merged_bias is not None else [None] * len(self.sizes)
        self.projections = [Projection(self, i, w, b) for i, (w, b) in enumerate(zip(weights, biases, strict=True))]
        self.gemm = Gemm([projection.weight for projection in self.projections], weight, merged_bias)
        self._input: torch.Tensor | None = None
        self._version = 0
        self._product: torch.Tensor | None = None

    @contextmanager
    def product(self, x: torch.Tensor) -> Iterator[None]:
        """Compute the product of `x`; within the block the projections serve slices of it."""
        self._compute(x)
        try:
            yield
        finally:
            self._input = self._product = None

    def slice(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The projection `index` of `x`.

        An input that is not the product's, or that was written to since, had its block in between: then the *merged*
        product is computed again, at the same shape, so that rows that nobody touched keep their bits.
        """
        if self._input is None:
            projection = self.projections[index]
            return F.linear(x, projection.weight, projection.bias)
        if x is not self._input:
            return self._part(self.gemm(x), index)
        if x._version != self._version:
            self._compute(x)
        assert self._product is not None
        return self._part(self._product, index)

    def _compute(self, x: torch.Tensor) -> None:
        self._input, self._version, self._product = x, x._version, self.gemm(x)

    def _part(self, product: torch.Tensor, index: int) -> torch.Tensor:
        """A copy: what a block is served is contiguous, as in transformers, and it may write to it."""
        return product.narrow(-1, sum(self.sizes[:index]), self.sizes[index]).contiguous()


class Embedding(SiteModule):
    """Token ids [...] -> [..., hidden]."""

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, dtype=dtype, device=device), False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out = F.embedding(input_ids, self.weight)
        # A pass with gradients: weights ask for none, so the graph begins here.
        out = out.requires_grad_() if torch.is_grad_enabled() else out
        return apply_at(out, self.take_edits(), residual_site(0))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
