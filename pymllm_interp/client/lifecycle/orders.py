"""`EngineOrders`: the orders of `Backend.control`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...models.updates import NamedTensors, WeightUpdate
from ...wire.weights import received

BACKENDS = ("ipc", "shared_memory")
AT_ANY_TIME = ("pause", "resume", "is_paused", "is_sleeping", "weight_info")
"""Orders that may come while another one waits. All others run one after another: a server has a thread for each."""


class Lifecycle(Protocol):
    """Pauses and new weights of an engine (`engine.lifecycle.lifecycle.EngineLifecycle`). Engines have kinds of updates."""

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        ...

    def pause(self, mode: str = "abort", stamp: int | None = None) -> bool:
        """Pause the engine. False: a newer `resume` came before."""
        ...

    def resume(self, stamp: int | None = None) -> bool:
        """Let requests run again. False: a newer `pause` came before."""
        ...

    def new_update(self, draft: bool = False) -> Any:
        """Update of the model, or of the draft model."""
        ...

    def install(self, update: Any, draft: bool = False, whole: bool = False) -> dict[str, int]:
        """Check an update, and write it between two steps."""
        ...


class Sleep(Protocol):
    """Sleep of an engine (`engine.lifecycle.sleep.EngineSleep`)."""

    needs_weights: bool

    @property
    def is_sleeping(self) -> bool:
        """Whether memory of the engine is off the device, or weights are to be given."""
        ...

    def check_weights(self) -> None:
        """Raise ValueError while the weights have no memory."""
        ...

    def weights_given(self) -> None:
        """All weights were written."""
        ...

    def sleep(self, level: int = 1, tags: Sequence[str] = (), mode: str = "keep") -> None:
        """Give memory back."""
        ...

    def wake(self, tags: Sequence[str] | None = None, all_graphs: bool = False) -> bool:
        """Take memory again. Returns whether the engine is awake."""
        ...


class EngineOrders:
    """One method for each order.

    Args:
        lifecycle, sleep: carry the orders out.
        device: device of the model.
    """

    def __init__(self, lifecycle: Lifecycle, sleep: Sleep, device: str) -> None:
        self._lifecycle, self._sleep, self._device = lifecycle, sleep, device
        self._one_order = threading.Lock()
        self._backend: str | None = None
        self._update: WeightUpdate | None = None
        self._is_draft, self._label, self._stamp = False, "", 0
        self.sleep, self.wake = self._sleep.sleep, self._sleep.wake
        self.pause, self.resume = self._lifecycle.pause, self._lifecycle.resume

    def run(self, order: str, **arguments: Any) -> Any:
        """The result of an order, by its method's name."""
        if order in AT_ANY_TIME:
            return getattr(self, order)(**arguments)
        with self._one_order:
            return getattr(self, order)(**arguments)

    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._lifecycle.is_paused

    def update_weights(self, weights: NamedTensors | str | Path, draft: bool = False) -> dict[str, Any]:
        """Install weights of this process, see `LM.update_weights`."""
        self._sleep.check_weights()
        update = self._lifecycle.new_update(draft)
        update.add(weights)
        return self._install(update, draft)

    def _install(self, update: WeightUpdate, draft: bool) -> dict[str, Any]:
        self._sleep.check_weights()
        found = self._lifecycle.install(update, draft, whole=self._sleep.needs_weights and not draft)
        if self._sleep.needs_weights and not draft:
            self._sleep.weights_given()
        return found

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return self._sleep.is_sleeping

    # -- vLLM's calls, for weights of another process ------------------------------------------

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Choose the transport: {"backend": "ipc"}, or "shared_memory". Raises ValueError: another one."""
        backend = init_info.get("backend", "ipc" if self._device.startswith("cuda") else "shared_memory")
        if backend not in BACKENDS or init_info.get("packed"):
            raise ValueError(
                f"init_info: expected a backend of {', '.join(BACKENDS)}, and packed=false; got {dict(init_info)}"
            )
        self._backend = backend

    def start_weight_update(self, draft: bool = False) -> None:
        """Begin an update. Raises ValueError: another one is under way."""
        if self._backend is None:
            raise ValueError("start_weight_update comes after init_weight_transfer_engine")
        if self._update is not None:
            raise ValueError(
                "an update is under way: finish_weight_update ends it, shutdown_weight_transfer_engine drops it"
            )
        self._update, self._is_draft = self._lifecycle.new_update(draft), draft

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Collect tensors of another process, or all of a folder: {"folder": PATH}. Nothing is written.

        Raises:
            ValueError: no update is under way.
            WeightsError: an invalid description; the update is dropped.
        """
        if self._update is None:
            raise ValueError("update_weights comes after start_weight_update")
        try:
            folder = update_info.get("folder")
            self._update.add(folder if isinstance(folder, str) else received(update_info, self._device))
        except BaseException:
            self._update = None
            raise

    def check_weight_update(self) -> None:
        """Check the collected tensors. Nothing is written. Raises like `finish_weight_update`, which may follow."""
        if self._update is None:
            raise ValueError("finish_weight_update comes after start_weight_update")
        try:
            self._sleep.check_weights()
            self._update.check(self._sleep.needs_weights and not self._is_draft)
        except BaseException:
            self._update = None
            raise

    def finish_weight_update(self, weight_version: str | None = None, stamp: int = 0) -> dict[str, Any]:
        """Check and write the collected tensors, see `EngineLifecycle.install`.

        Args:
            weight_version: a name for `weight_info`.
            stamp: time of the update, which replicas of one model share.
        """
        update, self._update = self._update, None
        if update is None:
            raise ValueError("finish_weight_update comes after start_weight_update")
        found = self._install(update, self._is_draft)
        self._label, self._stamp = weight_version or str(found["version"]), stamp
        return found

    def shutdown_weight_transfer_engine(self) -> None:
        """Drop an update that is under way."""
        self._backend = self._update = None

    def weight_info(self) -> dict[str, Any]:
        """Name and stamp of the last update, "" and 0 before the first. Also whether the engine is paused or asleep."""
        return {
            "weight_version": self._label, "stamp": self._stamp, "paused": self.is_paused(), "sleeping": self.is_sleeping(),
        }  # fmt: skip
