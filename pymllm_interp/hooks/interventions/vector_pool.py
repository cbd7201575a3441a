"""`VectorPool`: the vectors of live requests, as rows of one matrix on the device."""

from __future__ import annotations

import bisect
import hashlib
import threading

import torch

from ..declared import Declared

# -- device tables -----------------------------------------------------------------------------------


class VectorPool:
    """Rows of a device matrix for the vectors of live requests; equal vectors share rows, counted by reference.

    Any thread may take and give back; what is new is staged until `take_staged`.

    Args:
        capacity: rows.
        width: of a row. A wider vector takes several, the last one filled up with zeros.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity, self.width = capacity, width
        self._free: list[tuple[int, int]] = [(0, capacity)]  # (first, count), ascending
        self._held: dict[bytes, list[int]] = {}  # content -> [first, count, references]
        self._staged: list[tuple[int, torch.Tensor]] = []
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Rows that are taken."""
        return self.capacity - sum(count for _, count in self._free)

    def acquire(self, declared: Declared) -> None:
        """Take rows for all vectors of a request, or none.

        Raises:
            ValueError: not as many are free in one piece.
        """
        with self._lock:
            try:
                for tensor in declared.tensors():
                    if id(tensor) not in declared.vectors:
                        key, first = self._take(tensor)
                        declared.vectors[id(tensor)] = first
                        declared.held.append(key)
            except ValueError:
                self._release(declared)
                raise

    def release(self, declared: Declared) -> None:
        """Give back what a request holds. A second call does nothing."""
        with self._lock:
            self._release(declared)

    def take_staged(self) -> list[tuple[int, torch.Tensor]]:
        """(first row, vectors [n, width]) that were taken since the last call."""
        with self._lock:
            staged, self._staged = self._staged, []
        return staged

    def _take(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        rows = torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % self.width)).reshape(-1, self.width)
        # Of the rows as they lie there: the same numbers in another shape take another number of them.
        key = hashlib.blake2b(rows.numpy().tobytes(), digest_size=16).digest()
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = [self._allocate(len(rows)), len(rows), 0]
            self._staged.append((held[0], rows))
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

    def _release(self, declared: Declared) -> None:
        for key in declared.held:
            held = self._held[key]
            held[2] -= 1
            if held[2] == 0:
                del self._held[key]
                self._give_back(held[0], held[1])
        declared.held.clear()
        declared.vectors.clear()

    def _give_back(self, first: int, count: int) -> None:
        i = bisect.bisect(self._free, (first, count))
        self._free.insert(i, (first, count))
        for j in (i, i - 1):  # join with what follows, then with what is before
            if 0 <= j < len(self._free) - 1 and sum(self._free[j]) == self._free[j + 1][0]:
                self._free[j : j + 2] = [(self._free[j][0], self._free[j][1] + self._free[j + 1][1])]
