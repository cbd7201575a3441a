"""`ResultArena`: host memory of a rank's results, which the client maps. Captured states are not copied on their way there.

It is one memory file (memfd_create). It has a name under /proc only, and ends with its processes.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from math import prod
from typing import Any

import numpy as np
import torch

from ....hooks.captures.egress.result_memory import FRESH, SMALL, rounded
from ....utils.stage_times import TIMES
from ...results import Shared


class ResultArena:
    """Blocks of one memory file. A `hooks.captures.egress.result_memory.Memory`. Thread-safe.

    Args:
        keep: upper bound, in bytes, of freed memory that is kept for reuse.
        size: bytes of the file, which takes memory only for written pages; None: the size of the host's memory.

    Attributes:
        name: name of the file, for processes of this host and user.
        kept: bytes of freed memory that is kept.
    """

    def __init__(self, keep: int, size: int | None = None) -> None:
        found = size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.size = found // mmap.PAGESIZE * mmap.PAGESIZE
        self._file = os.memfd_create("pymllm-interp-results", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.size)
        self._mapping = mmap.mmap(self._file, self.size)
        self._base = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.name = f"/proc/{os.getpid()}/fd/{self._file}"
        self.kept, self._keep = 0, keep
        self._lock = threading.Lock()
        self._free = [(0, self.size)]  # (start, size), ascending: memory that is not written
        self._of_size: dict[int, list[int]] = {}  # kept blocks, by size; the last used size is last
        self._live: dict[
            int, tuple[int, Any]
        ] = {}  # start -> size, and a token of the tensor; None if the client has it
        self._returned: deque[tuple[int, Any]] = deque()  # finalizers take no lock

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, which may hold a former result: see `clear`. Raises MemoryError: no room."""
        size = prod(shape) * dtype.itemsize
        if size < SMALL:
            return FRESH.empty(shape, dtype)
        token = object()
        start = self._take(-(-rounded(size) // mmap.PAGESIZE) * mmap.PAGESIZE, token)
        memory = np.frombuffer(self._mapping, np.uint8, size, start)
        weakref.finalize(memory, self._returned.append, (start, token)).atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def clear(self, rows: torch.Tensor, used: int) -> None:
        """Zero a tensor of `empty` behind its first `used` rows. Whole pages go back to the system, and come back as zeros."""
        start = self._start(rows)
        if start is None or used >= len(rows):
            return
        first, stop = start + used * rows.stride(0) * rows.itemsize, start + rows.nbytes
        whole, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        memory = np.frombuffer(self._mapping, np.uint8)
        if whole < end:
            with TIMES.of("results: clear unused rows", end - whole):
                self._remove(whole, end - whole)
            memory[end:stop] = 0
        memory[first : min(whole, stop)] = 0

    def given(self, tensor: torch.Tensor) -> Shared | None:
        """Location of a tensor. Its block then belongs to the client. None if it is not in the arena."""
        start = self._start(tensor)
        if start is None:
            return None
        with self._lock:
            size, _ = self._live[start]
            self._live[start] = size, None
        offset = tensor.data_ptr() - self._base - start
        return Shared(start, size, offset, str(tensor.dtype)[6:], tuple(tensor.shape), tensor.stride())

    def take_back(self, starts: list[int] | None = None) -> None:
        """The client has done with blocks; None: with all that it has."""
        with self._lock:
            if starts is None:
                starts = [start for start, (_, token) in self._live.items() if token is None]
            self._returned.extend((start, None) for start in starts)
            old = self._reclaim()
        self._release(old)

    @property
    def live(self) -> int:
        """Bytes of blocks that are being written, or that the client has."""
        with self._lock:
            return sum(size for size, _ in self._live.values())

    def close(self) -> None:
        """Release free memory. Memory that is freed later is not kept."""
        with self._lock:
            self._keep = 0
            old = self._reclaim()
        self._release(old)

    def _start(self, tensor: torch.Tensor) -> int | None:
        start = tensor.untyped_storage().data_ptr() - self._base
        return start if start in self._live else None

    def _take(self, size: int, token: object) -> int:
        with self._lock:
            old = self._reclaim()
            kept = size in self._of_size
            start = self._pop(size) if kept else self._carve(size)
            TIMES.add(f"results: {'kept' if kept else 'fresh'} block", 0.0, nbytes=size)
            while start is None and (old or self._of_size):
                freed = old.pop() if old else self._pop_oldest()
                self._remove(*freed)
                self._add_free(*freed)
                start = self._carve(size)
            if start is None:
                raise MemoryError(f"results take more than the {self.size} bytes of the host")
            self._live[start] = size, token
        self._release(old)
        return start

    def _reclaim(self) -> list[tuple[int, int]]:
        """Take freed blocks back. Returns (start, size) of those beyond the memory that is kept, for `_release`."""
        while self._returned:
            start, token = self._returned.popleft()
            size, current = self._live.get(start, (0, self))
            if current is not token:  # the client got the block meanwhile
                continue
            del self._live[start]
            self._of_size[size] = [*self._of_size.pop(size, ()), start]
            self.kept += size
        old: list[tuple[int, int]] = []
        while self.kept > self._keep:
            old.append(self._pop_oldest())
        return old

    def _pop(self, size: int) -> int:
        start = self._of_size[size].pop()
        self.kept -= size
        if not self._of_size[size]:
            del self._of_size[size]
        return start

    def _pop_oldest(self) -> tuple[int, int]:
        """A kept block of the size that was used longest ago."""
        size = next(iter(self._of_size))
        return self._pop(size), size

    def _release(self, blocks: list[tuple[int, int]]) -> None:
        """Give blocks back to the system, without the lock: the copying thread may need a block meanwhile."""
        for start, size in blocks:
            with TIMES.of("results: release a block", size):
                self._remove(start, size)
            with self._lock:
                self._add_free(start, size)

    def _remove(self, start: int, size: int) -> None:
        """Give whole pages back to the system, without the GIL. `mmap.madvise` has it meanwhile: 0.2 s for each GB."""
        if self._madvise(self._base + start, size, mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "madvise(MADV_REMOVE)")

    def _add_free(self, start: int, size: int) -> None:
        i = bisect.bisect(self._free, (start, size))
        self._free.insert(i, (start, size))
        for j in (i, i - 1):  # merge with the next free range, then with the previous one
            if 0 <= j < len(self._free) - 1 and sum(self._free[j]) == self._free[j + 1][0]:
                self._free[j : j + 2] = [(self._free[j][0], self._free[j][1] + self._free[j + 1][1])]

    def _carve(self, size: int) -> int | None:
        for i, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None
