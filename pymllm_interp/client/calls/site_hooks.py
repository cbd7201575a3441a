"""Functions as hooks at sites: a block that calls them in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.model_spec import LOGITS, ModelSpec
from ...hooks.site import Site
from ...hooks.traces.syntax.envoy import TracedModel
from ...models.transformers.site_ends import QKVSlice
from .activation_cache import NamesFilter, lens_name, select_sites, select_traced_sites

HookFunction = Callable[..., torch.Tensor | None]
"""``function(value, hook=point)`` -> None, or the value to put in place."""


@dataclass(frozen=True)
class HookPoint:
    """The place of a hook, which its function gets.

    Attributes:
        name: TransformerLens' name, `blocks.3.hook_resid_post`; the site's own where TransformerLens has none.
        site: site of the value.
        ctx: a dict for the function, kept from hook to hook at this site.
    """

    name: str
    site: Site
    ctx: dict[str, Any] = field(default_factory=dict)

    def layer(self) -> int:
        """The layer's index.

        Raises:
            ValueError: a site without a layer, such as `embed`.
        """
        if self.site.layer is None:
            raise ValueError(f"{self.name} has no layer")
        return self.site.layer


@dataclass
class PlacedHooks:
    """The functions at one site, in the order given."""

    point: HookPoint
    module: str
    """Path of the module."""
    end: str
    """ "input" or "output"."""
    model: ModelSpec
    functions: list[HookFunction] = field(default_factory=list)

    def run(self, model: TracedModel) -> None:
        """Wait for the value, and let the functions see and replace it. Called within a block."""
        if self.point.site.kind == LOGITS:
            found = model.output.logits  # a soft-cap is behind the head
        else:
            found = getattr(model.get(self.module), self.end)
        whole: torch.Tensor = found[0] if isinstance(found, tuple) else found
        value = self.state_in(whole)
        for function in self.functions:
            new = function(value, hook=self.point)
            if new is None:
                put_state(self.point.site.kind, whole, self.model, value)  # it may have written to it
                continue
            if not isinstance(new, torch.Tensor) or new.shape != value.shape:
                got = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
                raise ValueError(f"the hook at {self.point.name} returned {got}; expected {list(value.shape)}, or None")
            if new is not value:
                value.copy_(new)
            put_state(self.point.site.kind, whole, self.model, value)

    def state_in(self, value: torch.Tensor) -> torch.Tensor:
        """The site's state [prompts, tokens, ...] in the value at the module's end, see `state_at`."""
        return state_at(self.point.site.kind, value, self.model)


def state_at(kind: str, value: torch.Tensor, model: ModelSpec) -> torch.Tensor:
    """The state [batch, tokens, ...] of a kind of site in the value at its module's end: a view.
    Queries beside their group's key and value (Falcon) have no strides as one tensor: a copy, see `put_state`."""
    if not model.family.is_slice(kind):
        rows = value.flatten(2) if value.ndim == 4 and kind.startswith("resid_") else value  # of several streams, all
        return rows.unflatten(-1, model.shape(kind))
    return _slice(kind, model).of(value).flatten(-3, -2)


def put_state(kind: str, value: torch.Tensor, model: ModelSpec, state: torch.Tensor) -> None:
    """Write the state that `state_at` gave back to the value, if it is a copy."""
    if model.family.is_slice(kind) and state.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        view = _slice(kind, model).of(value)
        view.copy_(state.view(view.shape))


def _slice(kind: str, model: ModelSpec) -> QKVSlice:
    return QKVSlice(kind, model.shape("q")[0], model.shape("k")[0], model.family.by_head)


def placed_hooks(fwd_hooks: Iterable[tuple[NamesFilter, HookFunction]], model: ModelSpec) -> list[PlacedHooks]:
    """The hooks by site, in the order of a forward pass.

    Raises:
        TypeError: an entry is not a pair of sites and a function.
        ValueError: an unknown site.
    """
    by_site: dict[Site, list[HookFunction]] = {}
    for entry in fwd_hooks:
        if not isinstance(entry, Sequence) or len(entry) != 2 or not callable(entry[1]):
            raise TypeError(f"fwd_hooks holds {entry!r}: expected pairs (site, function)")
        names, function = entry
        for site in select_traced_sites(names, model):
            by_site.setdefault(site, []).append(function)
    placed = []
    for site in select_sites(list(by_site), model):
        point = model.family.point(site)
        placed.append(PlacedHooks(HookPoint(lens_name(site), site), point.module, point.end, model, by_site[site]))
    return placed


def run_hooks(model: TracedModel, hooks: list[PlacedHooks]) -> torch.Tensor:
    """The body of a block: the hooks in their order, then the logits [1, tokens, vocab]."""
    for hook in hooks:
        hook.run(model)
    return model.output.logits
