"""`LocalOrders`: the orders of `Backend.control`, of an engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.engine import Engine
from ...engine.lifecycle.lifecycle import EngineLifecycle
from ...models.updates import NamedTensors


class LocalOrders:
    """One method for each order.

    Args:
        engine: the engine, started.
    """

    def __init__(self, engine: Engine) -> None:
        self._lifecycle = EngineLifecycle(engine)
        self.pause, self.resume = self._lifecycle.pause, self._lifecycle.resume

    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._lifecycle.is_paused

    def update_weights(self, weights: NamedTensors | str | Path, draft: bool = False) -> dict[str, Any]:
        """Install weights of this process, see `LM.update_weights`."""
        update = self._lifecycle.new_update(draft)
        update.add(weights)
        return self._lifecycle.install(update, draft)
