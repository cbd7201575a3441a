"""Host memory that captured states are put in."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import weakref
from math import prod
from typing import Protocol

import numpy as np
import torch


class Memory(Protocol):
    """Where results are put."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU that may hold anything."""
        ...

    def clear(self, rows: torch.Tensor, used: int) -> None:
        """Nothing that others wrote is left in a tensor of `empty` behind its first `used` rows."""
        ...


class FreshMemory:
    """Memory that holds zeros, so that there is nothing to clear."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros. The system has whole pages of them: what is not used is not written to."""
        return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)

    def clear(self, rows: torch.Tensor, used: int) -> None:
        """Nothing."""


FRESH = FreshMemory()


SMALL = 1 << 20
"""Bytes below which memory is fresh: of that there is never much, and a mapping takes whole pages."""
HUGE = 1 << 21
"""Bytes of a huge page. One that is given back in part falls to pieces."""


class ResultMemory:
    """Tensors on the CPU, and the memory of those that are gone. Any thread may ask.

    Args:
        keep: bytes that are kept for the next tensors at most, while nobody holds them.

    Attributes:
        kept: bytes that are kept.
    """

    def __init__(self, keep: int) -> None:
        self.kept = 0
        self._keep = keep
        self._mappings: dict[int, list[mmap.mmap]] = {}  # by size, the one that came back last at the end
        self._mapping_at: dict[int, mmap.mmap] = {}  # by address, of the tensors that somebody holds
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that holds anything, another's former states included: see `clear`.

        Raises:
            MemoryError, OSError: there is no memory.
        """
        size = prod(shape) * dtype.itemsize
        if size < SMALL:
            return FRESH.empty(shape, dtype)
        mapping = self._take(_rounded(size))
        memory = np.frombuffer(mapping, np.uint8, size)
        self._mapping_at[memory.ctypes.data] = mapping
        weakref.finalize(memory, self._give_back, memory.ctypes.data).atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def clear(self, rows: torch.Tensor, used: int) -> None:
        """Write zeros behind the first `used` rows of a tensor of `empty`, so that nothing of former ones is left there.

        Whole pages go back to the system, which has zeros in their place when they are used again.
        """
        mapping = self._mapping_at.get(rows.data_ptr())
        if mapping is None or used == len(rows):
            return
        memory = np.frombuffer(mapping, np.uint8)
        start = used * rows.stride(0) * rows.itemsize
        whole = -(-(rows.data_ptr() + start) // HUGE) * HUGE - rows.data_ptr()
        if sys.platform == "linux" and whole < rows.nbytes:
            with contextlib.suppress(OSError):  # of pages that are locked in memory
                mapping.madvise(mmap.MADV_DONTNEED, whole)
                memory[start:whole] = 0
                return
        memory[start : rows.nbytes] = 0

    def close(self) -> None:
        """Keep nothing any more, nor what comes back later."""
        with self._lock:
            self._keep = self.kept = 0
            self._mappings.clear()

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            if size in self._mappings:
                return self._pop(size)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def _give_back(self, address: int) -> None:
        mapping = self._mapping_at.pop(address)
        # Called wherever the last reference ends: also amid the lines that hold the lock, by the garbage collector.
        if not self._lock.acquire(blocking=False):
            return
        try:
            size = len(mapping)
            self._mappings[size] = [*self._mappings.pop(size, ()), mapping]
            self.kept += size
            while self.kept > self._keep:
                self._pop(next(iter(self._mappings)))  # the size that was of no use for the longest time
        finally:
            self._lock.release()

    def _pop(self, size: int) -> mmap.mmap:
        mapping = self._mappings[size].pop()
        self.kept -= size
        if not self._mappings[size]:
            del self._mappings[size]
        return mapping


def _rounded(size: int) -> int:
    """Up by an eighth at most, so that results which differ little can have each other's memory."""
    unit = 1 << (size.bit_length() - 4)
    return -(-size // unit) * unit
