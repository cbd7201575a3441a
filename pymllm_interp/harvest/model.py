"""Interface of a model for harvests. `LM` implements it; this folder does not import the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..client.backend import Backend
from ..client.calls.model_weights import ModelWeights
from ..client.chat import RenderedPrompt
from ..core.events import FinishedEvent
from ..core.limits import EngineLimits
from ..core.model_spec import ModelSpec
from ..core.request import Request
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from ..hooks.site import Site


class PrefillHandle(Protocol):
    """Handle of a submitted forward pass."""

    requests: list[Request]
    """The one request, with `activations` or `error` after `wait`."""
    ends: list[FinishedEvent]
    """Its last event, after `wait`."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the pass has ended."""
        ...

    def cancel(self) -> None:
        """Cancel the pass."""
        ...


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
    ) -> PrefillHandle:
        """Start one forward pass that captures. Raises PromptError."""
        ...
