"""Puts the ops in front of a model's norms, by the norms' classes. Parameters keep their names, for reloads of weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from ...core import norm_kind
from ...core.model_spec import EMBED_SITE, attention_add, final_norm_site, input_add
from ..structures import Structure
from . import op  # noqa: F401  # registers the ops

NORMS = {"RMSNorm": norm_kind.RMS, "GemmaRMSNorm": norm_kind.RMS_OFFSET}
"""Norms of vLLM that this package's kernels can replace."""


def _kind_of(norm: Any) -> int | None:
    """The kind of a norm that this package's kernels compute; None for another one."""
    whole = getattr(norm, "variance_size_override", None) is None and getattr(norm, "has_weight", True)
    return NORMS.get(type(norm).__name__) if whole and norm.weight.is_contiguous() else None


@cache
def _tapped_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a norm's class that calls the ops around it."""

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            torch.ops.pymllm_interp.state_(x, EMBED_SITE, self.tap_handle)
            return super(tapped, self).forward(x)
        if self.tap_kind is not None:
            torch.ops.pymllm_interp.norm_(
                x, residual, self.weight, self.variance_epsilon, self.tap_kind, self.tap_add, self.tap_handle
            )
            return x, residual
        torch.ops.pymllm_interp.pair_(x, residual, self.tap_add, self.tap_handle)
        normed, stream = super(tapped, self).forward(x, residual)
        if self.tap_last >= 0:
            torch.ops.pymllm_interp.state_(normed, self.tap_last, self.tap_handle)
        return normed, stream

    tapped: Any = type(f"Tapped{base.__name__}", (base,), {"forward": forward})
    return tapped


def put_taps(structure: Structure, handle: int, within: bool = False) -> None:
    """Tap all norms of a model, for the stage with this handle.

    Args:
        within: whether this package's kernels replace norms that they can compute. Else the ops are in front of vLLM's.
    """
    count = len(structure.layers)
    for layer, (first, middle) in enumerate(structure.layers):
        _tap(first, input_add(layer), handle, within)
        _tap(middle, attention_add(layer), handle, within)
    _tap(structure.last, input_add(count), handle, within, final_norm_site(count))


def _tap(norm: Any, residual_add: int, handle: int, within: bool, last: int = -1) -> None:
    norm.tap_kind = _kind_of(norm) if within else None
    norm.tap_add, norm.tap_handle, norm.tap_last = residual_add, handle, last
    norm.__class__ = _tapped_class(type(norm))
