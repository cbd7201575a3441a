"""TransformerLens' interventions as equivalent declared ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.model_spec import ModelSpec
from ..hooks.interventions.specs import Patch, Scale, Steer
from .names import Place

_KEYS = {"suppress": set(), "scale": {"factor"}, "add": {"value"}, "set": {"value"}}
"""Op -> the keys that it needs."""
_ON_THE_STREAM = ("ln1.hook_in", "ln2.hook_in", "ln_final.hook_in")
"""Inputs of norms. The stream bypasses the norm, so editing them does not edit the stream's site."""


def declared(
    given: Mapping[str, Any], places: Mapping[str, Place], spec: ModelSpec
) -> tuple[list[Any], dict[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """(declared interventions, functions by hook point) of `Driver.forward`'s `intervene`.
    Raises ValueError: an unknown op, or keys that it does not have."""
    ops, edits = [], {}
    for name, what in given.items():
        if callable(what):
            edits[name] = what
            continue
        _check(name, what)
        place = places[name]
        if (
            place.part == "value" == place.captured_part
            and place.site is not None
            and not name.endswith(_ON_THE_STREAM)
        ):
            ops.append(_op(what, place, spec))
        else:
            edits[name] = _function(what)
    return ops, edits


def _check(name: str, what: Any) -> None:
    if not isinstance(what, Mapping) or what.get("op") not in _KEYS:
        raise ValueError(
            f"intervene[{name!r}] is {what!r}; expected a function, or a dict whose op is one of {', '.join(_KEYS)}"
        )
    needed, keys = _KEYS[what["op"]], set(what) - {"op", "pos"}
    if keys != needed:
        raise ValueError(
            f"intervene[{name!r}]: {what['op']} takes {', '.join(needed) or 'nothing'} and pos, not {', '.join(keys)}"
        )


def _op(what: Mapping[str, Any], place: Place, spec: ModelSpec) -> Any:
    site, pos = str(place.site), what.get("pos")
    where: Any = "all" if pos is None else [pos] if isinstance(pos, int) else list(pos)
    if what["op"] in ("suppress", "scale"):
        return Scale(site, float(what.get("factor", 0.0)), positions=where)
    value = torch.as_tensor(what["value"], dtype=torch.float32)
    assert place.site is not None
    vector = value.flatten().expand(spec.width(place.site.kind)).contiguous()
    return Steer(site, vector, positions=where) if what["op"] == "add" else Patch(site, vector, positions=where)


def _function(what: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(value: torch.Tensor) -> torch.Tensor:
        pos = what.get("pos")
        rows = slice(None) if pos is None else [pos] if isinstance(pos, int) else list(pos)
        new = value.clone()
        if what["op"] in ("suppress", "scale"):
            new[:, rows] *= what.get("factor", 0.0)
            return new
        vector = torch.as_tensor(what["value"]).to(value)
        if vector.numel() > 1:
            vector = vector.reshape(value.shape[2:])
        new[:, rows] = new[:, rows] + vector if what["op"] == "add" else vector
        return new

    return edit
