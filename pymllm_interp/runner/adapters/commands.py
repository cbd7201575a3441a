"""Commands that load and unload LoRA adapters between steps."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.adapters.adapter import Adapter
from ..interp_model_runner import InterpModelRunner


@dataclass(frozen=True)
class InstallAdapter:
    """Load an adapter: see `AdaptedPasses.install_adapter`."""

    adapter: Adapter

    def run(self, runner: InterpModelRunner) -> None:
        """Raises AdapterError, or torch.OutOfMemoryError; nothing has changed then."""
        runner.install_adapter(self.adapter)


@dataclass(frozen=True)
class RemoveAdapter:
    """Unload an adapter: see `AdaptedPasses.remove_adapter`."""

    name: str

    def run(self, runner: InterpModelRunner) -> None:
        """Raises AdapterError: no adapter has this name, or requests use it."""
        runner.remove_adapter(self.name)
