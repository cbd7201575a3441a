"""`VllmReadout`: the norms and the head of a vLLM model as functions of rows. No op or capture acts on them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...hooks.site import Site
from ..structures import Structure


class VllmReadout:
    """Norm and head of vLLM's model (`hooks.captures.reductions.reduction.Readout`).

    Args:
        model: vLLM's model.
        structure: tapped norms.
        ranks: number of tensor-parallel ranks.
    """

    def __init__(self, model: Any, structure: Structure, ranks: int) -> None:
        self._structure, self._ranks = structure, ranks
        self.head = model.compute_logits

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

        Raises:
            NotImplementedError: the head is split over ranks, which would have to compute it together.
        """
        if self._ranks > 1:
            raise NotImplementedError("Lens: with tensor_parallel_size above 1 the head is split over ranks")
        return self.head(rows)
