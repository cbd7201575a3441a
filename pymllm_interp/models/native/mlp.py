"""The MLP of decoders without a gate: ``last(act(first(x)))``."""

from __future__ import annotations

import torch

from ...core.forward_batch import ForwardBatch
from ...core.model_spec import delta_site, mlp_add
from ...layers.activation import activation, activation_module
from ...layers.edits.base import apply_inner
from ...layers.linear import Product
from ..base import ProjectedBranch


class MLP(ProjectedBranch):
    """The base of the families' MLPs. Each family has its own `forward`.

    Args:
        act: the name of the activation function.
        first: the first projection. A family holds it under its own name, too.
    """

    name, inner_kind = "mlp", "mlp_act"

    def __init__(self, layer_idx: int, act: str, first: Product) -> None:
        super().__init__(layer_idx)
        self.output_site = delta_site(mlp_add(layer_idx))
        self.act = activation_module(act)
        # The fused pass has its own copies: hooks may wait at the modules.
        self._parts = first, activation(act)

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden]."""
        (x,), (first, act) = inputs, self._parts
        return self.apply_ops(act(first.project(x, batch)), batch)

    def apply_ops(self, act: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        """The neurons after their ops."""
        return act if batch is None else apply_inner(act, batch.site_ops, self.layer_idx, "mlp_act")
