"""Puts the ops in front of a model's norms, by the norms' classes. Parameters keep their names, for reloads of weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from ...core.model_spec import EMBED_SITE, attention_add, final_norm_site, input_add
from ..structures import Structure
from . import op  # noqa: F401  # registers the ops


@cache
def _tapped_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a norm's class that calls the ops around it."""

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            torch.ops.pymllm_interp.state_(x, EMBED_SITE, self.tap_handle)
            return super(tapped, self).forward(x)
        torch.ops.pymllm_interp.pair_(x, residual, self.tap_add, self.tap_handle)
        normed, stream = super(tapped, self).forward(x, residual)
        if self.tap_last >= 0:
            torch.ops.pymllm_interp.state_(normed, self.tap_last, self.tap_handle)
        return normed, stream

    tapped: Any = type(f"Tapped{base.__name__}", (base,), {"forward": forward})
    return tapped


def put_taps(structure: Structure, handle: int) -> None:
    """Tap all norms of a model, for the stage with this handle."""
    count = len(structure.layers)
    for layer, (first, middle) in enumerate(structure.layers):
        _tap(first, input_add(layer), handle)
        _tap(middle, attention_add(layer), handle)
    _tap(structure.last, input_add(count), handle, final_norm_site(count))


def _tap(norm: Any, residual_add: int, handle: int, last: int = -1) -> None:
    norm.tap_add, norm.tap_handle, norm.tap_last = residual_add, handle, last
    norm.__class__ = _tapped_class(type(norm))
