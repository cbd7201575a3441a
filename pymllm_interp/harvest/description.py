"""Text descriptions of a harvest, for its manifest and for the error of a run that does not match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.model_spec import site_index
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from ..hooks.monitors.monitor import Monitor
from ..hooks.site import expand
from ..hooks.spec import described
from .folder import Identity
from .model import HarvestModel

SHOWN_DIGITS = 8
"""Hexadecimal digits of a fingerprint in words."""


def describe(
    model: HarvestModel, captures: Sequence[Capture], interventions: Sequence[Intervention], identity: Identity
) -> dict[str, Any]:
    """The model, its tokenizer, the captured sites and all specs, for `manifest.json`."""
    spec = model.model_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    sites = {site for one in captures for site in expand(one.site, spec.num_hidden_layers, spec.family)}
    return {
        "model": (
            f"{spec.family.name}, {spec.num_hidden_layers} layers, hidden_size {spec.hidden_size}, {dtype}, "
            f"fingerprint {identity.model[:SHOWN_DIGITS]}"
        ),
        "num_hidden_layers": spec.num_hidden_layers,
        "tokenizer": f"fingerprint {identity.tokenizer[:SHOWN_DIGITS]}" if identity.tokenizer else "none",
        "sites": [
            *map(str, sorted(sites, key=lambda site: site_index(site, spec.num_hidden_layers))),
            *(f"scores.{one.name}" for one in interventions if isinstance(one, Monitor)),
        ],
        "capture": [described(one) for one in captures],
        "interventions": [described(one) for one in interventions],
    }
