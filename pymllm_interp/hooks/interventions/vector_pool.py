"""`VectorPool`: which rows of a device matrix hold the vectors of live requests. Steps carry the rows to the worker."""

from __future__ import annotations

import bisect
import threading

import torch

from ...core.step import VectorRow
from ..declared import Declared
from ..demands import Demands
from ..vectors.files import content_hash


def num_rows(tensor: torch.Tensor, width: int) -> int:
    """Number of rows of `width` numbers for a tensor [..., own width]. Each of its rows begins a new one."""
    own = tensor.shape[-1]
    return tensor.numel() // own * -(-own // width)


class VectorPool:
    """Allocates rows of a device matrix to vectors. Equal vectors share rows, with a reference count.

    Thread-safe. The worker writes the vectors (`DeviceTables.set_row`).

    Args:
        capacity: number of rows.
        width: width of a row. A wider vector takes several rows, padded with zeros.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity, self.width = capacity, width
        self._free: list[tuple[int, int]] = [(0, capacity)]  # (first, count), ascending
        self._held: dict[tuple[bytes, int], list[int]] = {}  # content, width -> [first, count, references]
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Number of allocated rows."""
        return self.capacity - sum(count for _, count in self._free)

    def acquire(self, declared: Declared) -> tuple[VectorRow, ...]:
        """Allocate rows for all vectors of a request, or for none. Returns the rows of each.
        Raises ValueError: no contiguous rows are free for one of them."""
        with self._lock:
            try:
                for tensor in declared.hooks.tensors:
                    key, declared.vectors[id(tensor)] = self._hold(tensor)
                    declared.held.append(key)
            except ValueError:
                self._release(declared)
                raise
        return tuple(zip(declared.vectors.values(), declared.held, strict=True))

    def release(self, held: Declared | Demands) -> None:
        """Release the vectors of a request. A second call does nothing."""
        with self._lock:
            self._release(held)

    def _hold(self, tensor: torch.Tensor) -> tuple[tuple[bytes, int], int]:
        """(key, first row), one reference more."""
        width = tensor.shape[-1]
        key = content_hash(tensor), width  # equal numbers of another width may take another number of rows
        held = self._held.get(key)
        if held is None:
            count = num_rows(tensor, self.width)
            held = self._held[key] = [self._allocate(count), count, 0]
        held[2] += 1
        return key, held[0]

    def _allocate(self, count: int) -> int:
        for i, (first, room) in enumerate(self._free):
            if room >= count:
                self._free[i : i + 1] = [(first + count, room - count)] if room > count else []
                return first
        raise ValueError(
            f"the pool of intervention vectors has {self.used} of {self.capacity} rows in use and no {count} in one piece "
            "(max_intervention_vectors): raise it, or submit fewer requests with distinct vectors at once"
        )

    def _release(self, declared: Declared | Demands) -> None:
        for key in declared.held:
            held = self._held[key]
            held[2] -= 1
            if held[2] == 0:
                del self._held[key]
                self._free_rows(held[0], held[1])
        declared.held.clear()
        declared.vectors.clear()

    def _free_rows(self, first: int, count: int) -> None:
        i = bisect.bisect(self._free, (first, count))
        self._free.insert(i, (first, count))
        for j in (i, i - 1):  # merge with the next free range, then with the previous one
            if 0 <= j < len(self._free) - 1 and sum(self._free[j]) == self._free[j + 1][0]:
                self._free[j : j + 2] = [(self._free[j][0], self._free[j][1] + self._free[j + 1][1])]
