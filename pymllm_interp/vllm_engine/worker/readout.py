"""`VllmReadout`: the norms and the head of a vLLM model as functions of rows. No op or capture acts on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...core.families import lacks_head
from ...hooks.site import Site
from ..structures import Structure


def head_of(model: Any, config: Any) -> Callable[..., Any]:
    """The head of a model as a function of rows [n, hidden]: logits of tokens, or of labels.
    Raises NotImplementedError: a model that pools, without a linear head."""
    if not hasattr(model, "pooler"):
        return model.compute_logits
    if lacks_head(config):
        return lambda rows: rows.new_zeros(len(rows), 1)
    head: Any = getattr(model, "score", None)
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise NotImplementedError(
            f"vLLM's {type(model).__name__} has no linear head of labels: use LM(model), whose engine is our own"
        )

    def labels(rows: Tensor) -> Tensor:
        found: Any = head(rows.to(head.weight.dtype))
        return found[0] if isinstance(found, tuple) else found

    return labels


def without_adapters(model: Any, head: Callable[..., Any]) -> Callable[..., Any]:
    """The head without LoRA. vLLM's kernels know the adapters of a step's rows, and rows of readouts are others."""
    base = getattr(getattr(model, "logits_processor", None), "base_layer", None)
    if base is None:
        return head
    own = getattr(model, "lm_head", None) or model.model.embed_tokens
    return lambda rows: base(getattr(own, "base_layer", own), rows)


class VllmReadout:
    """Norm and head of vLLM's model (`hooks.captures.reductions.reduction.Readout`).

    Args:
        head: `head_of` the model.
        structure: tapped norms.
        ranks: number of tensor-parallel ranks.
    """

    def __init__(self, head: Callable[..., Any], structure: Structure, ranks: int) -> None:
        self._structure, self._ranks = structure, ranks
        self.head = head

    def norm(self, site: Site, rows: Tensor, gain: bool = True) -> Tensor:
        """Norm at a site, applied to rows [n, hidden] of the residual stream."""
        found: Any = self._structure.last
        if site.kind in ("attn_in", "mlp_in"):
            assert site.layer is not None, "sites of layers have one"
            found = self._structure.layers[site.layer][site.kind == "mlp_in"]
        if not gain:
            if isinstance(found, nn.LayerNorm):
                return F.layer_norm(rows.float(), rows.shape[-1:], None, None, found.eps).to(rows.dtype)
            return F.rms_norm(rows.float(), rows.shape[-1:], None, found.variance_epsilon).to(rows.dtype)
        untapped: Any = type(found).__mro__[1]
        function = untapped.forward
        return function(found, rows.contiguous())

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [n, vocab] of rows [n, hidden] of `final_norm`.
        Raises NotImplementedError: the head is split over ranks, which would have to compute it together."""
        if self._ranks > 1:
            raise NotImplementedError("Lens: with tensor_parallel_size above 1 the head is split over ranks")
        return self.head(rows)
