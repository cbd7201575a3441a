"""`DeviceMemory`: memory on the engine's device for captured states that stay there."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from math import prod

import torch

from ....utils.out_of_memory import within_memory
from .result_memory import FreshMemory


class DeviceMemoryFull(ValueError):
    """Captured states that live on the device leave no room for these."""


class DeviceMemory(FreshMemory):
    """Tensors of zeros on a device, up to a number of bytes that live at once. Thread-safe.

    A tensor is freed with the last reference to its memory, whoever holds it.

    Args:
        size: upper bound of the bytes of live tensors (`device_capture_bytes`).
    """

    def __init__(self, size: int, device: str | torch.device) -> None:
        self.size, self.device = size, torch.device(device)
        self._used = 0
        self._freed: deque[int] = deque()  # by finalizers, which may run on a thread that holds the lock
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of live tensors."""
        with self._lock:
            while self._freed:
                self._used -= self._freed.popleft()
            return self._used

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros. On CUDA it is the default stream's, which the engine runs on, and the current one waits for it.

        Raises:
            DeviceMemoryFull: it exceeds the size, beside the live tensors.
            torch.OutOfMemoryError: the device has no room for it.
        """
        wanted, used = prod(shape) * dtype.itemsize, self.used
        if used + wanted > self.size:
            raise DeviceMemoryFull(
                f"captured states with device='engine' take {wanted} bytes, and the engine keeps {self.size} "
                f"(device_capture_bytes), of which live results hold {used}: raise it, drop results, or capture fewer states"
            )
        on_stream, current = contextlib.nullcontext(), None
        if self.device.type == "cuda":
            current, default = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
            on_stream = torch.cuda.stream(default)
        with on_stream:
            made = within_memory(
                lambda: torch.zeros(shape, dtype=dtype, device=self.device),
                f"{wanted} bytes of captured states do not fit on {self.device}; what helps: a lower gpu_memory_utilization",
            )
        if current is not None:
            current.wait_stream(torch.cuda.default_stream(self.device))
        with self._lock:
            self._used += wanted
        weakref.finalize(made.untyped_storage(), self._freed.append, wanted).atexit = False
        return made
