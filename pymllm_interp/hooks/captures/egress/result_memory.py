"""Host memory of captured states."""

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
    """Allocates the tensors of results."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the CPU."""
        ...

    def clear(self, rows: torch.Tensor, used: int) -> None:
        """Leave no foreign data after the first `used` rows of a tensor of `empty`."""
        ...

    def close(self) -> None:
        """Release free memory. Memory that is freed later is not kept."""
        ...


class FreshMemory:
    """Memory allocated as zeros."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros. The kernel maps zero pages: memory that is not used is not written."""
        return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)

    def clear(self, rows: torch.Tensor, used: int) -> None:
        """Do nothing: the memory holds zeros."""

    def close(self) -> None:
        """Do nothing: nothing is kept."""


FRESH = FreshMemory()


SMALL = 1 << 20
"""Tensors of fewer bytes are not pooled: they are few, and a mapping takes whole pages."""
HUGE = 1 << 21
"""Bytes of a huge page. Releasing a part of it splits it into small pages."""


class ResultMemory:
    """A pool of host memory for results. Thread-safe.

    Args:
        keep: upper bound, in bytes, of freed memory kept for reuse.

    Attributes:
        kept: bytes of freed memory kept for reuse.
    """

    def __init__(self, keep: int) -> None:
        self.kept = 0
        self._keep = keep
        self._mappings: dict[int, list[mmap.mmap]] = {}  # freed, by size; the last freed is last
        self._mapping_at: dict[int, mmap.mmap] = {}  # by address, of live tensors
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, which may hold the states of a former result: see `clear`.
        Raises MemoryError, OSError: out of memory."""
        size = prod(shape) * dtype.itemsize
        if size < SMALL:
            return FRESH.empty(shape, dtype)
        mapping = self._take(rounded(size))
        memory = np.frombuffer(mapping, np.uint8, size)
        self._mapping_at[memory.ctypes.data] = mapping
        weakref.finalize(memory, self._free, memory.ctypes.data).atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def clear(self, rows: torch.Tensor, used: int) -> None:
        """Zero a tensor of `empty` after its first `used` rows, which removes the states of former results.

        Whole pages are released to the system, and are zero when they are used again.
        """
        mapping = self._mapping_at.get(rows.data_ptr())
        if mapping is None or used == len(rows):
            return
        memory = np.frombuffer(mapping, np.uint8)
        start = used * rows.stride(0) * rows.itemsize
        whole = -(-(rows.data_ptr() + start) // HUGE) * HUGE - rows.data_ptr()
        if sys.platform == "linux" and whole < rows.nbytes:
            with contextlib.suppress(OSError):  # the pages are locked in memory
                mapping.madvise(mmap.MADV_DONTNEED, whole)
                memory[start:whole] = 0
                return
        memory[start : rows.nbytes] = 0

    def close(self) -> None:
        """Release the pool. Memory that is freed later is not kept."""
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

    def _free(self, address: int) -> None:
        mapping = self._mapping_at.pop(address)
        # A finalizer: the garbage collector may call it on a thread that holds the lock.
        if not self._lock.acquire(blocking=False):
            return
        try:
            size = len(mapping)
            self._mappings[size] = [*self._mappings.pop(size, ()), mapping]
            self.kept += size
            while self.kept > self._keep:
                self._pop(next(iter(self._mappings)))  # the least recently used size
        finally:
            self._lock.release()

    def _pop(self, size: int) -> mmap.mmap:
        mapping = self._mappings[size].pop()
        self.kept -= size
        if not self._mappings[size]:
            del self._mappings[size]
        return mapping


def rounded(size: int) -> int:
    """`size` rounded up by an eighth at most, so that results of similar sizes share mappings."""
    unit = 1 << (size.bit_length() - 4)
    return -(-size // unit) * unit
