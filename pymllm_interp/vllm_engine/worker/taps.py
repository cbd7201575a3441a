"""Puts the ops in front of a model's norms, and at its inner sites, by the modules' classes.

Parameters keep their names, for reloads of weights.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import nn

from ...core import norm_kind
from ...core.model_spec import (
    EMBED_SITE,
    ModelSpec,
    attention_add,
    final_norm_site,
    inner_site,
    input_add,
    residual_site,
)
from ..structures import INNER_MODULES, Structure, inner_modules
from . import op
from .split_rows import SplitRows

ROUTES = "_compute_routing"
"""Method of vLLM's routers that chooses experts by the model's numbers."""
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
        ops = op.used or torch.ops.pymllm_interp
        if residual is None:
            ops.state_(x, EMBED_SITE, self.tap_handle)
            return super(tapped, self).forward(x)
        if self.tap_kind is not None:
            ops.norm_(x, residual, self.weight, self.variance_epsilon, self.tap_kind, self.tap_add, self.tap_handle)
            return x, residual
        ops.pair_(x, residual, self.tap_add, self.tap_handle)
        normed, stream = super(tapped, self).forward(x, residual)
        if self.tap_last >= 0:
            ops.state_(normed, self.tap_last, self.tap_handle)
        return normed, stream

    tapped: Any = type(f"Tapped{base.__name__}", (base,), {"forward": forward})
    return tapped


@cache
def _plain_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module's class that calls the op with the stream that it reads, and with its output."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ops = op.used or torch.ops.pymllm_interp
        if self.tap_before >= 0:
            ops.state_(args[0], self.tap_before, self.tap_handle)
        found = super(tapped, self).forward(*args, **kwargs)
        if self.tap_after >= 0:
            rows = found[0] if isinstance(found, tuple) else found
            ops.state_(rows, self.tap_after, self.tap_handle)
        return found

    tapped: Any = type(f"Tapped{base.__name__}", (base,), {"forward": forward})
    return tapped


def put_taps(structure: Structure, handle: int, within: bool = False) -> None:
    """Tap all norms of a model, for the stage with this handle.

    Args:
        within: whether this package's kernels replace norms that they can compute. Else the ops are in front of vLLM's.
    """
    for site, module in structure.summands.items():
        _tap_plain(module, handle, after=site)
    if structure.is_plain:
        _put_plain_taps(structure, handle)
        return
    for layer, (first, middle) in structure.layers.items():
        if 0 < layer <= structure.enlarged:
            _tap_output(structure.blocks[layer - 1], input_add(layer), handle)
        else:
            _tap(first, input_add(layer), handle, within)
        if middle is not None:
            _tap(middle, attention_add(layer), handle, within)
    if structure.last is not None:
        _tap(structure.last, input_add(structure.count), handle, within, final_norm_site(structure.count))


@cache
def _ending_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a decoder layer's class that calls the op with its output, a pair."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        delta, stream = super(tapped, self).forward(*args, **kwargs)
        ops = op.used or torch.ops.pymllm_interp
        ops.pair_(delta, stream, self.tap_add, self.tap_handle)
        return delta, stream

    tapped: Any = type(f"Tapped{base.__name__}", (base,), {"forward": forward})
    return tapped


def _tap_output(layer: Any, residual_add: int, handle: int) -> None:
    layer.tap_add, layer.tap_handle = residual_add, handle
    layer.__class__ = _ending_class(type(layer))


def _put_plain_taps(structure: Structure, handle: int) -> None:
    for layer, (first, middle) in structure.layers.items():
        _tap_plain(first, handle, before=residual_site(input_add(layer)))
        if middle is not None:
            _tap_plain(middle, handle, before=residual_site(attention_add(layer)))
    if (last := structure.last) is not None:
        stream, normed = residual_site(input_add(structure.count)), final_norm_site(structure.count)
        _tap_plain(last, handle, before=stream, after=normed)


def _tap_plain(module: Any, handle: int, before: int = -1, after: int = -1) -> None:
    module.tap_before, module.tap_after, module.tap_handle = before, after, handle
    module.__class__ = _plain_class(type(module))


def _tap(norm: Any, residual_add: int, handle: int, within: bool, last: int = -1) -> None:
    norm.tap_kind = _kind_of(norm) if within else None
    norm.tap_add, norm.tap_handle, norm.tap_last = residual_add, handle, last
    norm.__class__ = _tapped_class(type(norm))


@cache
def _inner_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module's class that calls the op with its input, or its output."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ops = op.used or torch.ops.pymllm_interp
        if self.tap_input:
            ops.inner_(x, self.tap_sites, self.tap_widths, self.tap_handle)
        found = super(tapped, self).forward(x, *args, **kwargs)
        if not self.tap_input:
            rows = found[0] if isinstance(found, tuple) else found
            ops.inner_(rows, self.tap_sites, self.tap_widths, self.tap_handle)
        return found

    tapped: Any = type(f"Tapped{base.__name__}", (base,), {"forward": forward})
    return tapped


@cache
def _choosing_class(base: type) -> type:
    """A subclass of a router's class that calls the op with the chosen experts and their scores, best first.

    The experts have the model's numbers. With EPLB, vLLM replaces them after `ROUTES` by numbers of copies, which move.
    """

    def route(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores, ids = getattr(super(tapped, self), name)(*args, **kwargs)
        best = scores.argsort(dim=-1, descending=True, stable=True)
        chosen = torch.cat([found.gather(-1, best).to(self.tap_dtype) for found in (ids, scores)], -1)
        ops = op.used or torch.ops.pymllm_interp
        ops.inner_(chosen, self.tap_sites, self.tap_widths, self.tap_handle)
        return scores, ids

    name = ROUTES if hasattr(base, ROUTES) else "select_experts"
    tapped: Any = type(f"Tapped{base.__name__}", (base,), {name: route})
    return tapped


def put_inner_taps(
    structure: Structure, model: ModelSpec, kinds: Collection[str], split: SplitRows, handle: int
) -> int:
    """Tap the inner sites of a model, for the stage with this handle. Kinds that the model does not have are left out.

    Returns:
        the number of taps.

    Raises:
        NotImplementedError: vLLM's module for a site is not there, or has other columns than the site.
    """
    served, taps = set(kinds) & model.family.points.keys(), 0
    for layer, block in structure.blocks.items():
        found = inner_modules(block)
        for name, own in INNER_MODULES.items():
            wanted = [kind for kind in own if kind in served and layer >= model.family.first_layer(kind)]
            if wanted:
                reason = _no_tap(found.get(name), name, own, split)
                if reason is not None:
                    raise NotImplementedError(
                        f"inner_sites={tuple(wanted)} cannot be served in this model with engine='vllm': {reason}"
                    )
                places = [inner_site(structure.count, layer, kind) if kind in wanted else -1 for kind in own]
                _tap_inner(found[name], name, places, [split.width(kind) for kind in own], model, handle)
                taps += len(wanted)
    return taps


def _tap_inner(module: Any, name: str, sites: list[int], widths: list[int], model: ModelSpec, handle: int) -> None:
    if name == "experts":
        module = module.router
        module.tap_dtype = model.dtype
        module.__class__ = _choosing_class(type(module))
    else:
        module.tap_input = name in ("o_proj", "down_proj")
        module.__class__ = _inner_class(type(module))
    module.tap_sites, module.tap_widths, module.tap_handle = sites, widths, handle


def _no_tap(module: Any, name: str, kinds: tuple[str, ...], split: SplitRows) -> str | None:
    """Reason against a tap at a module of vLLM, or None."""
    if module is None:
        return f"its layers have no module {name}"
    base, width = getattr(module, "base_layer", module), sum(map(split.width, kinds))
    if name == "qkv":
        found = (base.num_heads + 2 * base.num_kv_heads) * base.head_size
    elif name in ("o_proj", "down_proj"):
        found = base.input_size_per_partition
    else:
        found = base.output_size if name == "router" else width
    if found != width:
        return f"its {name} has {found} columns a rank, and the sites {width}"
    if name == "experts" and module.is_monolithic:
        return "its experts are chosen within vLLM's kernel"
    if (
        name == "experts"
        and getattr(module.router, "eplb_state", None) is not None
        and not hasattr(module.router, ROUTES)
    ):
        return "its experts move between ranks, and this version of vLLM has no place with their own numbers"
    if name == "shared_experts" and split.ranks > 1:
        return "each rank has a part of the sum; tensor_parallel_size is to be 1"
    return None
