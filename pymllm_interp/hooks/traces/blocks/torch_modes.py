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

    Args:
        modes: the block's modes.
        others: the thread's modes without the block.
    """

    __slots__ = ("_device", "_dispatched", "_functions", "_guard", "_modes")

    def __init__(self, modes: Modes, others: Modes) -> None:
        self._modes = modes
        self._functions: list[Any] = [overrides._pop_mode() for _ in range(modes.functions - others.functions)]
        self._dispatched: list[Any] = [dispatch._pop_mode() for _ in range(modes.dispatched - others.dispatched)]
        self._device: dict[str, Any] = {}  # torch's note of the mode that a default device is
        if self._functions:
            self._device = vars(torch._GLOBAL_DEVICE_CONTEXT).copy()
            vars(torch._GLOBAL_DEVICE_CONTEXT).clear()
        self._guard: torch.inference_mode | None = None
        if modes.inference != others.inference:
            # Leaving the guard restores the block's mode, whatever other blocks did in between.
            self._guard = torch.inference_mode(others.inference)
            self._guard.__enter__()
        self._set(others)

    @classmethod
    def park(cls, others: Modes) -> BlockModes | None:
        """Reset the thread to the modes `others`. Returns the block's modes, or None if they are the same."""
        now = Modes.now()
        return None if now == others else cls(now, others)

    def resume(self) -> None:
        """Restore the block's modes. Called once."""
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
        self._set(self._modes)
        while self._functions:
            overrides._push_mode(self._functions.pop())
        while self._dispatched:
            dispatch._push_mode(self._dispatched.pop())
        vars(torch._GLOBAL_DEVICE_CONTEXT).update(self._device)

    @staticmethod
    def _set(modes: Modes) -> None:
        torch._C._set_grad_enabled(modes.grad)
        torch.set_default_dtype(modes.dtype)
        for device, enabled in zip(DEVICES, modes.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
