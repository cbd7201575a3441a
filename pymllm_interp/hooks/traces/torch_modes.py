"""torch's modes of a thread that many blocks share.

A block that parks inside ``with torch.inference_mode():`` has the mode on when the engine goes on, and every other request with
it. So a block takes along what it changed, and has it again when it is resumed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled  # pyright: ignore[reportAttributeAccessIssue]

DEVICES = ("cpu", "cuda")
NO_AUTOCAST = (False,) * len(DEVICES)


def autocast_by_device() -> tuple[bool, ...]:
    """Whether autocast is on in this thread, for each of `DEVICES`."""
    return tuple(map(torch.is_autocast_enabled, DEVICES)) if is_any_autocast_enabled() else NO_AUTOCAST


class Modes(NamedTuple):
    """The modes that a ``with`` block sets for its thread."""

    inference: bool
    grad: bool
    autocast: tuple[bool, ...]

    @classmethod
    def now(cls) -> Modes:
        """The thread's."""
        return cls(is_inference_mode_enabled(), is_grad_enabled(), autocast_by_device())


class BlockModes:
    """What one block has changed of the modes, while it is parked.

    Attributes:
        left: the modes that it left on; None where they are the thread's own.
    """

    def __init__(self) -> None:
        self.left: Modes | None = None
        self._guard: torch.inference_mode | None = None

    def resume(self) -> None:
        """Put the block's changes, `left`, back."""
        if self.left is not None:
            if self._guard is not None:
                self._guard.__exit__(None, None, None)
            self._set(self.left)
            self.left = self._guard = None

    def park(self, before: Modes) -> None:
        """Take the block's changes, if there are any, out of the thread, which had the modes `before`."""
        now = Modes.now()
        if now == before:
            return
        self.left = now
        if now.inference != before.inference:
            # Leaving it restores what is now, whatever other blocks did meanwhile.
            self._guard = torch.inference_mode(before.inference)
            self._guard.__enter__()
        self._set(before)

    @staticmethod
    def _set(modes: Modes) -> None:
        torch._C._set_grad_enabled(modes.grad)
        for device, enabled in zip(DEVICES, modes.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
