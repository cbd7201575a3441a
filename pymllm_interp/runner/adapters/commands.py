"""Commands that load and unload LoRA adapters between steps."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.adapters.adapter import Adapter
from ...models.adapters.slots import AdapterSlots
from .. import device_memory
from ..interp_model_runner import InterpModelRunner


@dataclass(frozen=True)
class InstallAdapter:
    """Load a LoRA adapter. The first one captures decode passes with adapters, where passes are captured."""

    adapter: Adapter

    def run(self, runner: InterpModelRunner) -> None:
        """Load it; nothing has changed where that fails.

        Raises:
            AdapterError: the name is taken, or all slots are in use.
            torch.OutOfMemoryError: no memory for the slots or the graphs.
        """
        slots = runner.server_config.max_loras
        device_memory.fitting(
            runner,
            lambda: self._install(runner),
            f"no memory for LoRA adapters of rank {self.adapter.rank} in {slots} slots",
            "a lower max_loras, a lower gpu_memory_utilization, or fewer kv_cache_tokens",
        )

    def _install(self, runner: InterpModelRunner) -> None:
        adapters = _slots(runner)
        adapters.install(self.adapter)
        try:
            if runner.graphs.decode is not None or runner.device.startswith("cuda"):
                runner.input_buffers.open_adapters(adapters.max_loras)
            runner.graphs.capture_adapted(adapters)
        except BaseException:
            RemoveAdapter(self.adapter.name).run(runner)
            raise


@dataclass(frozen=True)
class RemoveAdapter:
    """Unload a LoRA adapter. The last one takes the graphs with it."""

    name: str

    def run(self, runner: InterpModelRunner) -> None:
        """Remove the adapter. Raises AdapterError for an unknown name, or while requests use it."""
        adapters = _slots(runner)
        adapters.remove(self.name)
        if not adapters.any_loaded:
            runner.graphs.release_adapted()


def _slots(runner: InterpModelRunner) -> AdapterSlots:
    assert runner.adapters is not None, "call initialize() first"
    return runner.adapters
