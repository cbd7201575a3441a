"""torch's modes (inference and grad mode, autocast, defaults, function and dispatch modes), kept separate for each block.

A block may wait inside ``with torch.inference_mode():`` or ``with torch.device("meta"):``. Without care, the mode would stay on for
the engine and for all other requests. So a block's modes are removed from the thread while it waits, and restored when it is
resumed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import get_default_dtype, is_grad_enabled, is_inference_mode_enabled, overrides
from torch._C import (
    _is_any_autocast_enabled as is_any_autocast_enabled,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch._C import (
    _len_torch_dispatch_stack as num_dispatch_modes,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch._C import (
    _len_torch_function_stack as num_function_modes,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch.utils import _python_dispatch as dispatch

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
    dtype: torch.dtype
    functions: int
    """Function modes, such as a default device."""
    dispatched: int
    """Dispatch modes, such as a counter of operations."""

    @classmethod
    def now(cls) -> Modes:
        """Modes of the current thread."""
        return cls(
            is_inference_mode_enabled(), is_grad_enabled(), autocast_by_device(), get_default_dtype(), num_function_modes(),
            num_dispatch_modes(),
        )  # fmt: skip


class BlockModes:
    """The modes that one block has set, while it waits.

    Attributes:
        left: the block's modes; None if they equal the thread's.
    """

    __slots__ = ("_device", "_dispatched", "_functions", "_guard", "left")

    def __init__(self) -> None:
        self.left: Modes | None = None
        self._guard: torch.inference_mode | None = None
        self._functions: list[Any] = []
        self._dispatched: list[Any] = []
        self._device: dict[str, Any] = {}  # torch's note of the mode that a default device is

    def resume(self) -> None:
        """Restore the block's modes."""
        if self.left is not None:
            if self._guard is not None:
                self._guard.__exit__(None, None, None)
            self._set(self.left)
            while self._functions:
                overrides._push_mode(self._functions.pop())
            while self._dispatched:
                dispatch._push_mode(self._dispatched.pop())
            vars(torch._GLOBAL_DEVICE_CONTEXT).update(self._device)
            self.left = self._guard = None

    def park(self, before: Modes) -> None:
        """Reset the thread to the modes `before`, and keep the block's, if they differ."""
        now = Modes.now()
        if now == before:
            return
        self.left = now
        self._functions = [overrides._pop_mode() for _ in range(now.functions - before.functions)]
        self._dispatched = [dispatch._pop_mode() for _ in range(now.dispatched - before.dispatched)]
        if self._functions:
            self._device = vars(torch._GLOBAL_DEVICE_CONTEXT).copy()
            vars(torch._GLOBAL_DEVICE_CONTEXT).clear()
        if now.inference != before.inference:
            # Leaving the guard restores the block's mode, whatever other blocks did in between.
            self._guard = torch.inference_mode(before.inference)
            self._guard.__enter__()
        self._set(before)

    @staticmethod
    def _set(modes: Modes) -> None:
        torch._C._set_grad_enabled(modes.grad)
        torch.set_default_dtype(modes.dtype)
        for device, enabled in zip(DEVICES, modes.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
