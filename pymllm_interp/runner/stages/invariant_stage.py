"""`InvariantStage`: batch-invariant mode for the products of a step's hooks."""

from __future__ import annotations

from ...core.forward_batch import ForwardBatch
from ...core.step import ModelRunnerOutput
from ...layers.invariant import set_invariant_device
from ..input_batch import InputBatch
from .stage import Stage


class InvariantStage(Stage):
    """Enters the mode on the thread of a step, from its pass to its end. The last stage: hooks of the others run within.

    Args:
        device: kind of the device.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def prepare(self, batch: ForwardBatch, rows: InputBatch) -> None:
        set_invariant_device(self._device)

    def end(self, output: ModelRunnerOutput) -> None:
        set_invariant_device(None)

    def abandon(self) -> None:
        set_invariant_device(None)
