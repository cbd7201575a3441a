"""Linear layers and the embedding. Every weight matrix of a native model is in one of them.

`Linear` is one projection. `MergedLinear` computes several projections of the same input (q, k and v; gate and up) as one
matrix product. Each projection remains a module with its own name and its own `.weight`::

    qkv = MergedLinear(hidden, [512, 128, 128], bias=False, dtype=torch.float32, device="cpu")
    q_proj, k_proj, v_proj = qkv.projections()     # children of the attention module
    with qkv.product(x):                           # one product ...
        q, k, v = q_proj(x), k_proj(x), v_proj(x)  # ... and three slices of it

Both passes call `project`: the module-by-module pass from `forward`, the fused pass directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.current_pass import current_batch, current_site_ops
from ..core.forward_batch import ForwardBatch, SiteOps
from ..core.model_spec import EMBED_SITE
from .edits.base import apply_at, apply_inner, capture_inner
from .gemm import Gemm
from .lora import LoRASlots
from .quantization.gemm import QuantizedGemm
from .quantization.readable import QuantizableModule
from .quantization.unallocated import weight_device
from .quantization.weight import QuantizedWeight

InnerSite = tuple[int, str]
"""(layer, kind) of an inner site or of the logits."""


def adapted(
    multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, lora: LoRASlots | None, batch: ForwardBatch | None,
    part: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """``multiply(x)`` with the adapters of the pass; see `LoRASlots.product`."""
    if lora is None or batch is None or batch.adapters is None:
        return multiply(x)
    if x.numel() != batch.num_tokens * x.shape[-1]:
        raise RuntimeError(
            f"a module that adapters target got {x.numel() // x.shape[-1]} rows in a pass of {batch.num_tokens}: its rows are not "
            "the pass's, so it cannot be adapted"
        )
    return lora.product(multiply, x, batch.adapters, part)


def plain_copy(module: nn.Linear, memo: dict[int, Any]) -> nn.Linear:
    """`copy.deepcopy` of a projection: an `nn.Linear` with its own weights."""
    copied = nn.Linear(module.in_features, module.out_features, module.bias is not None, "meta")
    copied.weight, copied.bias = deepcopy(module.weight, memo), deepcopy(module.bias, memo)
    memo[id(module)] = copied
    return copied.train(module.training)


class Product(QuantizableModule):
    """A matrix product with a bias: the part of a projection that is independent of the layout of the weight.

    Attributes:
        gemm: computes it.
        lora: the adapters' parts of it; None until an adapter targets it.
        input_site, output_site: the inner site of its input, or of its output, if any.
    """

    gemm: Gemm | QuantizedGemm
    lora: LoRASlots | None = None
    input_site: InnerSite | None = None
    output_site: InnerSite | None = None

    def project(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        """The projection of x. Captures x at `input_site`, and applies the ops at `output_site`.

        The ops at `input_site` come earlier: they belong to the module that computes x.
        """
        if batch is None:
            return self.gemm(x)
        site_ops = batch.site_ops
        if self.input_site is not None:
            capture_inner(x, site_ops, *self.input_site)
        out = adapted(self.gemm, x, self.lora, batch)
        return out if self.output_site is None else apply_inner(out, site_ops, *self.output_site)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.project(input, current_batch())

    def set_quantized(self, weight: QuantizedWeight) -> None:
        """Store and multiply by a quantised weight."""
        super().set_quantized(weight)
        bias: Any = self._parameters["bias"]
        self.gemm = QuantizedGemm(weight, None if bias is None else bias.detach())


class Linear(Product, nn.Linear):
    """A projection: x [..., in] -> [..., out].

    Args:
        input_site, output_site: the inner site of its input, or of its output, if any.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: str,
        *,
        input_site: InnerSite | None = None,
        output_site: InnerSite | None = None,
    ) -> None:
        nn.Module.__init__(self)  # torch's own would draw random weights
        self.input_site, self.output_site = input_site, output_site
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=dtype, device=weight_device(device))
        self.weight = nn.Parameter(weight, False)
        parameter = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), False) if bias else None
        self.register_parameter("bias", parameter)
        self.bind()

    def bind(self) -> None:
        """Rebuild the product after `weight` was replaced by another tensor (tied embeddings)."""
        self.gemm = Gemm([self.weight], self.weight.detach(), None if self.bias is None else self.bias.detach())

    __deepcopy__ = plain_copy


class Projection(QuantizableModule, nn.Linear):
    """One projection of a `MergedLinear`. Its weight is a view of the merged weight.

    Args:
        output_site: the inner site of its output, if any.
    """

    def __init__(
        self,
        merged: MergedLinear,
        index: int,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        output_site: InnerSite | None,
    ) -> None:
        nn.Module.__init__(self)  # torch's own would draw random weights
        self._merged, self._index, self.output_site = merged, index, output_site
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    @property
    def place(self) -> tuple[MergedLinear, int]:
        """The merged product, and the index of this projection in it."""
        return self._merged, self._index

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = self._merged.slice(self._index, input)
        return out if self.output_site is None else apply_inner(out, current_site_ops(), *self.output_site)

    __deepcopy__ = plain_copy


class MergedLinear:
    """Several projections of one input, computed as one product [..., in] -> [..., sum of out].

    It does not hold their modules, which hold it: weights in a cycle would wait for the garbage collector.

    Args:
        output_sites: the inner sites of the projections' outputs; none by default.
    """

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: str,
        *,
        output_sites: Sequence[InnerSite] = (),
    ) -> None:
        self.sizes = list(sizes)
        self._output_sites = list(output_sites) or [None] * len(self.sizes)
        weight = torch.empty(sum(sizes), in_features, dtype=dtype, device=weight_device(device))
        merged_bias = torch.empty(sum(sizes), dtype=dtype, device=device) if bias else None
        self._weights = [nn.Parameter(part, False) for part in weight.split(self.sizes)]
        self._quantized: list[QuantizedGemm] = []
        parts = [] if merged_bias is None else merged_bias.split(self.sizes)
        self._biases = [nn.Parameter(part, False) for part in parts] or [None] * len(self.sizes)
        self.gemm: Gemm | QuantizedGemm = Gemm(self._weights, weight, merged_bias)
        self.lora: LoRASlots | None = None
        self._elsewhere: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._input: torch.Tensor | None = None
        self._version = 0
        self._product: torch.Tensor | None = None

    def projections(self) -> list[Projection]:
        """A module for each, over the merged weights."""
        parts = zip(self._weights, self._biases, self._output_sites, strict=True)
        return [Projection(self, i, *own) for i, own in enumerate(parts)]

    def set_weight(self, weight: torch.Tensor) -> list[nn.Parameter]:
        """Compute with another weight [sum of out, in]. Returns the weights of the projections, views of it."""
        self._weights = [nn.Parameter(part, False) for part in weight.split(self.sizes)]
        self.gemm = Gemm(self._weights, weight, self.gemm.bias)
        return self._weights

    def set_quantized(self, weight: QuantizedWeight) -> list[QuantizedWeight]:
        """Compute with a quantised weight [sum of out, in]. Returns the weights of the projections, views of it."""
        parts = weight.split(self.sizes)
        biases = [None if own is None else own.detach() for own in self._biases]
        self.gemm = QuantizedGemm(weight, self.gemm.bias)
        self._quantized = [QuantizedGemm(*own) for own in zip(parts, biases, strict=True)]
        self._weights = []
        return parts

    def compute_by(self, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compute by another product [..., in] -> [..., sum of out], of weights that are elsewhere."""
        self.gemm = self._elsewhere = product  # pyright: ignore[reportAttributeAccessIssue]

    def project(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        """All projections of x, concatenated along the last dim, after the ops and captures at their output sites."""
        product = self._multiply(x, batch)
        if batch is not None and batch.site_ops is not None and batch.site_ops.inner:
            self._apply_and_capture(product, batch.site_ops)
        return product

    def _multiply(self, x: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        return adapted(self.gemm, x, self.lora, batch)

    def _apply_and_capture(self, product: torch.Tensor, site_ops: SiteOps) -> None:
        """The ops and captures at the output sites; `product` [1, tokens, sum of out] is written in place."""
        for part, site in zip(product.split(self.sizes, dim=-1), self._output_sites, strict=True):
            if site is not None and site[1] in site_ops.inner:
                value = part.contiguous()
                applied = apply_inner(value, site_ops, *site)
                capture_inner(applied, site_ops, *site)
                if applied is not value:
                    part.copy_(applied)

    @contextmanager
    def product(self, x: torch.Tensor) -> Iterator[None]:
        """Compute the product of `x`. Within the block the projections return slices of it."""
        self._compute(x)
        try:
            yield
        finally:
            self._input = self._product = None

    def slice(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The projection `index` of `x`; outside of `product` by its own weight and bias.

        A hook may have replaced the input, or written to it. The *merged* product is then computed again, at the same shape,
        so that untouched rows keep their bits.
        """
        batch = current_batch()
        if self._input is None:
            if self._elsewhere is not None:
                return self._part(self._elsewhere(x), index)
            if self._quantized:
                return adapted(self._quantized[index], x, self.lora, batch, index)
            own = partial(F.linear, weight=self._weights[index], bias=self._biases[index])
            return adapted(own, x, self.lora, batch, index)
        if x is not self._input:
            return self._part(self._multiply(x, batch), index)
        if x._version != self._version:
            self._compute(x)
        assert self._product is not None
        return self._part(self._product, index)

    def _compute(self, x: torch.Tensor) -> None:
        self._input, self._version, self._product = x, x._version, self._multiply(x, current_batch())

    def _part(self, product: torch.Tensor, index: int) -> torch.Tensor:
        """A copy: hooks get contiguous values, as in transformers, and may write to them."""
        part = product.narrow(-1, sum(self.sizes[:index]), self.sizes[index])
        return part.clone(memory_format=torch.contiguous_format)  # of one row too, which is contiguous as it is


class LinearForward:
    """The forward of a plain `nn.Linear` in native kernels, if a pass calls it.

    Attributes:
        lora: the adapters' parts of it; None until an adapter targets it.
    """

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self._gemm: Gemm | None = None
        self.lora: LoRASlots | None = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        return adapted(partial(self._product, in_pass=batch is not None), input, self.lora, batch)

    def _product(self, input: torch.Tensor, in_pass: bool) -> torch.Tensor:
        module, gemm = self._module, self._gemm
        weight, bias = module.weight, module.bias
        if not in_pass or torch.is_grad_enabled() or weight.dtype != input.dtype:
            return F.linear(input, weight, bias)
        if gemm is None or gemm.weight is not weight or gemm.bias is not bias:
            gemm = self._gemm = Gemm([weight], weight, bias)
        return gemm(input)


class Embedding(nn.Embedding):
    """Token ids [...] -> [..., hidden], after the ops at the `embed` site.

    Args:
        has_site: whether its output is the stream, with its site.

    Attributes:
        look_up: embeddings of token ids by a weight that is elsewhere; None: by `weight`.
    """

    padding_idx = max_norm = None
    look_up: Callable[[torch.Tensor], torch.Tensor] | None = None
    norm_type, scale_grad_by_freq, sparse = 2.0, False, False

    def __init__(
        self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype, device: str, has_site: bool = True
    ) -> None:
        nn.Module.__init__(self)  # torch's own would draw random weights
        self.num_embeddings, self.embedding_dim, self.has_site = num_embeddings, embedding_dim, has_site
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, dtype=dtype, device=device), False)

    def embed(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        """Embeddings [..., hidden] without ops, with the vectors that requests of the pass give in their place."""
        out = self.of_tokens(ids)
        return out if batch is None or batch.input_embeds is None else batch.input_embeds.placed(out)

    def of_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., hidden] of token ids."""
        return F.embedding(ids, self.weight) if self.look_up is None else self.look_up(ids)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = self.embed(input, current_batch())
        # Weights require no gradients, so the autograd graph begins here.
        out = out.requires_grad_() if torch.is_grad_enabled() else out
        return apply_at(out, current_site_ops(), EMBED_SITE) if self.has_site else out
