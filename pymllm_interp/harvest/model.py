"""Interface of a model for harvests, and texts that describe one. `LM` implements it; this folder does not import the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..client.backend import Backend
from ..client.calls.model_weights import ModelWeights
from ..client.chat import RenderedPrompt
from ..client.handle import RequestHandle
from ..core.limits import EngineLimits
from ..core.model_spec import ModelSpec, site_index
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from ..hooks.monitors.monitor import Monitor
from ..hooks.site import Site, expand
from ..hooks.spec import described
from .folder import Identity


class HarvestModel(Protocol):
    """The members of `LM` that a harvest uses."""

    tokenizer: Any
    backend: Backend

    @property
    def limits(self) -> EngineLimits:
        """Limits of the engine."""
        ...

    @property
    def model_spec(self) -> ModelSpec:
        """Sites and widths of the model."""
        ...

    @property
    def weights(self) -> ModelWeights:
        """Fingerprint and version of the weights."""
        ...

    def token_ids(self, prompt: Any, what: str = "the prompt") -> list[int]:
        """Token ids of a text. Raises PromptError."""
        ...

    def _read(self, prompt: Any, what: str) -> RenderedPrompt:
        """Token ids, embeddings and images of a document. Raises PromptError."""
        ...

    def _resolve_specs(
        self, capture: Sequence[Capture | Site | str], interventions: Sequence[Intervention] | None
    ) -> tuple[list[Capture], list[Intervention]]:
        """Captures and interventions with vectors in place of their names."""
        ...

    def _submit_prefill(
        self,
        prompt: RenderedPrompt,
        captures: Sequence[Capture],
        interventions: Sequence[Intervention],
        what: str,
        lora: str | None = None,
    ) -> RequestHandle:
        """Start one forward pass that captures. Raises PromptError."""
        ...


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
