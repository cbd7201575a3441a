"""Declared ops and captures at the modules of a transformers model. Its code is not changed.

A site is an end of a module. Ops come before a trace, and captures after it:

    site at an output   the ops right after the module's forward; a forward hook captures
    site at an input    a forward pre-hook has the ops; the capture is right before the module's forward
    resid_mid           a forward pre-hook of the norm that reads the stream, which writes the stream in place

"Right after the forward" is `SiteEnds.after_forward`, which the module's controller calls (traces/serving/handover.py). The
hooks call it for a module without a controller: an engine captures graphs before there is a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.current_pass import current_batch, current_site_ops
from ...core.forward_batch import ForwardBatch, SiteOps
from ...core.model_spec import (
    EMBED_SITE,
    INNER_SITES,
    LOGITS,
    NUMBERED_SITES,
    ModelSpec,
    final_norm_site,
    site_index,
)


class _Place(NamedTuple):
    """A kind of site and its layer."""

    kind: str
    layer: int | None


@dataclass(frozen=True)
class QKVSlice:
    """The part of a fused projection that is a site."""

    kind: str
    heads: int
    kv_heads: int
    by_head: bool

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """The part's view of the projection's output [..., width]: [..., groups, heads of a group, head_dim]."""
        groups = self.kv_heads if self.by_head else 1
        queries, keys = self.heads // groups, self.kv_heads // groups
        parts = output.unflatten(-1, (groups, queries + 2 * keys, -1))
        first = {"q": 0, "k": queries, "v": queries + keys}[self.kind]
        return parts.narrow(-2, first, queries if self.kind == "q" else keys)


class SiteEnds:
    """The sites at one module's ends, by number; None for none.

    Attributes:
        slices: sites that are parts of the output, by number.
    """

    def __init__(self, num_layers: int) -> None:
        self.input: int | None = None
        self.output: int | None = None
        self.slices: dict[int, QKVSlice] = {}
        self.has_weights = False
        """Whether the second output holds the attention weights of all requests of a pass, also without being asked for."""
        self.begins_graph = False
        """Whether it is the token embedding. Weights require no gradients, so the autograd graph begins at its output."""
        self.has_controller = False
        """Whether a controller calls `before_forward` and `after_forward`."""
        self._first_inner = final_norm_site(num_layers) + 1
        self._num_layers = num_layers

    def acts(self, site: int | None, ops: SiteOps | None) -> SiteOps | None:
        """`ops`, if they may act at `site`."""
        if ops is None or site is None:
            return None
        return ops if site < self._first_inner or self._kind(site) in ops.inner else None

    def _kind(self, site: int) -> str:
        return INNER_SITES[(site - self._first_inner) % len(INNER_SITES)]

    def before_forward(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Capture the input with which the module continues."""
        ops = self.acts(self.input, current_site_ops())
        if ops is not None:
            assert self.input is not None
            ops.capture(self.input, _rows(_first(args, kwargs)))

    def after_forward(self, output: Any) -> Any:
        """The module's output after the ops, without attention weights of a whole batch."""
        if self.begins_graph and (batch := current_batch()) is not None and batch.input_embeds is not None:
            output = batch.input_embeds.placed(output)
        if self.begins_graph and torch.is_grad_enabled():
            output = output.requires_grad_().clone()  # no leaf: the model and blocks may edit it in place
        if self.has_weights and isinstance(output, tuple) and not _is_eager(current_batch()):
            output = (output[0], None, *output[2:])
        if self.slices and current_site_ops() is not None:
            output = self._edited_slices(output)
        ops = self.acts(self.output, current_site_ops())
        if ops is None:
            return output
        assert self.output is not None
        if isinstance(output, tuple):
            return (_edited(ops, self.output, output[0]), *output[1:])
        return _edited(ops, self.output, output)

    def _edited_slices(self, output: Any) -> torch.Tensor:
        edited = output
        for site, part in self.slices.items():
            ops = self.acts(site, current_site_ops())
            if ops is None:
                continue
            view = part.of(edited)
            value = view.flatten(2)
            new = ops.at(site, value)
            if new is not value:
                edited = edited.clone() if edited is output else edited
                part.of(edited).copy_(new.view(view.shape))
        return edited

    # -- hooks of torch, outside of a trace's view ---------------------------------------

    def pre_hook(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """The ops at the input."""
        ops = self.acts(self.input, current_site_ops())
        if ops is None:
            return None
        assert self.input is not None
        value = _first(args, kwargs)
        new = _edited(ops, self.input, value)
        if new is not value:
            args, kwargs = _replaced(args, kwargs, new)
        if not self.has_controller:
            self.before_forward(args, kwargs)
        return None if new is value else (args, kwargs)

    def hook(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Capture the output with which the model continues."""
        if not self.has_controller:
            output = self.after_forward(output)
        for site, part in self.slices.items():
            ops = self.acts(site, current_site_ops())
            if ops is not None:
                ops.capture(site, part.of(output).flatten(2))
        ops = self.acts(self.output, current_site_ops())
        if ops is not None:
            assert self.output is not None
            ops.capture(self.output, _rows(output[0] if isinstance(output, tuple) else output))
        return None if self.has_controller else output


class StreamEnd:
    """The site `resid_mid` of a layer: the stream that a norm reads, and that bypasses the norm."""

    def __init__(self, site: int) -> None:
        self.site = site

    def pre_hook(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The ops, in place, and the capture."""
        ops = current_site_ops()
        if ops is None:
            return
        value = _first(args, kwargs)
        new = _edited(ops, self.site, value.clone() if torch.is_grad_enabled() else value)
        if new is not value:
            value.copy_(new)
        ops.capture(self.site, _rows(value))


def _is_eager(batch: ForwardBatch | None) -> bool:
    return batch is None or (batch.transformers_pass is not None and batch.transformers_pass.eager)


def install_part(model: nn.Module, embedding: Any, spec: ModelSpec) -> None:
    """`install` for a part of a model, which ends no pass early.

    Args:
        embedding: module of its input states: a token embedding, or that of patches.
    """
    install(model, spec, embedding=embedding, is_encoder=True)


def install(
    model: nn.Module, spec: ModelSpec, cached: bool = False, embedding: Any = None, is_encoder: bool = False
) -> None:
    """Put the sites of `spec` on the model's modules. The logits' site is the model's own.

    Args:
        embedding: the embedding of tokens; None: the model's.
        is_encoder: it is a part, which ends no pass early.
        cached: attention modules compute attention themselves (models/transformers/cache_route.py).
    """
    num_layers, points = spec.num_hidden_layers, spec.family.points
    ends: dict[nn.Module, SiteEnds] = {}
    modules = dict(model.named_modules())

    def at(path: str) -> SiteEnds:
        module = modules[path]
        if module not in ends:
            ends[module] = module.site_ends = SiteEnds(num_layers)  # pyright: ignore[reportArgumentType]
        return ends[module]

    for kind, (path, end) in points.items():
        if kind not in NUMBERED_SITES or kind in (LOGITS, "resid_pre"):
            continue
        for layer in range(num_layers) if "{}" in path else [None]:
            site = site_index(_Place(kind, layer), num_layers)
            if kind == "resid_mid":
                modules[path.format(layer)].register_forward_pre_hook(StreamEnd(site).pre_hook, with_kwargs=True)
            elif spec.family.is_slice(kind):
                (heads, _), (kv_heads, _) = spec.shape("q"), spec.shape("k")
                at(path.format(layer)).slices[site] = QKVSlice(kind, heads, kv_heads, spec.family.by_head)
            else:
                setattr(at(path.format(layer)), end, site)
    if "embed" not in points:
        at(points["resid_pre"].module.format(0)).input = EMBED_SITE
    embedding = embedding or model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    at(next(path for path, module in modules.items() if module is embedding)).begins_graph = True
    attentions = {path: module for path, module in modules.items() if hasattr(module, "paged_calls")}
    for path in attentions if cached else ():
        at(path).has_weights = True
    for module, found in ends.items():
        if found.input is not None:
            module.register_forward_pre_hook(found.pre_hook, with_kwargs=True)
        if found.output is not None or found.slices or found.has_weights or found.begins_graph:
            module.register_forward_hook(
                found.hook, prepend=is_encoder
            )  # before transformers' own, which collect its states
    if is_encoder:
        return
    for layer in range(num_layers):
        block = modules[f"{spec.family.layers}.{layer}"]
        block.register_forward_pre_hook(_LayerInput(layer).pre_hook, with_kwargs=True)
    for module in attentions.values():
        module.register_forward_hook(_attention_hook)


class PassEnd(Exception):
    """Ends a pass before the next layer (`ForwardBatch.depth`). The loop over the layers is the family's own code."""


class _LayerInput:
    """The input of a decoder layer, if a pass collects hidden states, or ends there."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def pre_hook(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        batch = current_batch()
        if batch is None:
            return
        if batch.depth == self.layer:
            raise PassEnd
        if batch.transformers_pass is not None:
            batch.transformers_pass.collect_input(_first(args, kwargs))


def _attention_hook(module: nn.Module, args: tuple, output: Any) -> None:
    batch = current_batch()
    if batch is not None and batch.transformers_pass is not None and isinstance(output, tuple):
        at = 2 if hasattr(module, "relative_attention_num_buckets") else 1  # behind T5's bias
        batch.transformers_pass.end_attention(output[at])


def _rows(value: torch.Tensor) -> torch.Tensor:
    """[1, tokens, width], also of streams [1, tokens, streams, hidden], of [patches, width] and [tiles, patches, width]."""
    if value.ndim == 4:
        return value.flatten(2)
    return value if value.ndim == 3 and len(value) == 1 else value.reshape(1, -1, value.shape[-1])


def _edited(ops: SiteOps, site: int, value: torch.Tensor) -> torch.Tensor:
    """`value` after the ops at a site, in its shape; `value` itself without ops."""
    rows = _rows(value)
    new = ops.at(site, rows)
    return value if new is rows else new.view(value.shape)


def _first(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _replaced(args: tuple, kwargs: dict[str, Any], value: torch.Tensor) -> tuple[tuple, dict[str, Any]]:
    return ((value, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": value})
