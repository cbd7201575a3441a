"""`RingAllocator`: allocates contiguous spans of a ring buffer."""

from __future__ import annotations

import threading
from collections import deque
from itertools import pairwise


class RingAllocator:
    """Contiguous spans of a ring, freed in the order in which they were allocated. Thread-safe.

    A span does not wrap around. Elements at the end of the ring that are too few for a span stay unused.

    Args:
        size: elements of the ring.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._spans: deque[tuple[int, int]] = deque()  # (start, stop), oldest first
        self._lock = threading.Lock()

    @property
    def in_use(self) -> bool:
        """Whether any span is allocated."""
        return bool(self._spans)

    @property
    def largest_free(self) -> int:
        """Elements of the largest span that can be allocated now. It only grows until `allocate` is called."""
        return max(stop - start for start, stop in self._free_spans())

    def find(self, count: int) -> int:
        """Start of a free span of `count` elements. Raises ValueError: no free span is that large."""
        for start, stop in self._free_spans():
            if stop - start >= count:
                return start
        raise ValueError(f"no room for {count} elements in one span of a ring of {self.size}: {list(self._spans)}")

    def allocate(self, start: int, count: int) -> None:
        """Allocate the span that `find` found."""
        with self._lock:
            self._spans.append((start, start + count))

    def free_oldest(self) -> None:
        """Free the oldest span."""
        with self._lock:
            self._spans.popleft()

    def check_integrity(self) -> None:
        """Spans lie within the ring, disjoint and in order. Raises AssertionError otherwise."""
        with self._lock:
            spans = list(self._spans)
        assert all(0 <= start < stop <= self.size for start, stop in spans), spans
        ordered = sorted(spans)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered)), f"spans overlap: {spans}"
        oldest = ordered.index(spans[0]) if spans else 0
        assert spans == ordered[oldest:] + ordered[:oldest], f"spans out of order: {spans}"

    def _free_spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the free spans; the one after the newest allocated span comes first."""
        with self._lock:
            if not self._spans:
                return ((0, self.size),)
            tail, head = self._spans[0][0], self._spans[-1][1]
            wrapped = self._spans[-1][0] < tail
        return ((head, tail),) if wrapped else ((head, self.size), (0, tail))
