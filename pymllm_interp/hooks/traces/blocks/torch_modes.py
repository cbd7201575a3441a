"""torch's thread-local modes (inference mode, grad mode, autocast), kept separate for each block.

A block may wait inside ``with torch.inference_mode():``. Without care, the mode would stay on for the engine and for all
other requests. So a block's modes are removed from the thread while it waits, and restored when it is resumed.
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
    """The modes of a thread."""

    inference: bool
    grad: bool
    autocast: tuple[bool, ...]

    @classmethod
    def now(cls) -> Modes:
        """Modes of the current thread."""
        return cls(is_inference_mode_enabled(), is_grad_enabled(), autocast_by_device())


class BlockModes:
    """The modes that one block has set, while it waits.

    Attributes:
        left: the block's modes; None if they equal the thread's.
    """

    __slots__ = ("_guard", "left")

    def __init__(self) -> None:
        self.left: Modes | None = None
        self._guard: torch.inference_mode | None = None

    def resume(self) -> None:
        """Restore the block's modes."""
        if self.left is not None:
            if self._guard is not None:
                self._guard.__exit__(None, None, None)
            self._set(self.left)
            self.left = self._guard = None

    def park(self, before: Modes) -> None:
        """Reset the thread to the modes `before`, and keep the block's, if they differ."""
        now = Modes.now()
        if now == before:
            return
        self.left = now
        if now.inference != before.inference:
            # Leaving the guard restores the block's mode, whatever other blocks did in between.
            self._guard = torch.inference_mode(before.inference)
            self._guard.__enter__()
        self._set(before)

    @staticmethod
    def _set(modes: Modes) -> None:
        torch._C._set_grad_enabled(modes.grad)
        for device, enabled in zip(DEVICES, modes.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
