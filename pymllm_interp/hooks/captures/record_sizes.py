"""`RecordSizes`: how many elements of the ring the captures of a request take, by position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from .activations import CaptureError
from .group import Group

MAX_RUNS = 16
"""Upper bound of the runs of equal record sizes in a packed prompt.

With more runs all records get the largest size, so that few slices select the states.
"""


class RecordSizes:
    """Ring elements of each position of a request, and how far its captures are.

    The worker's `Captures` are these, with the states. The scheduler has a copy of its own (`sizes`), with its own progress.

    Args:
        groups: of the captures, in the order of a record; each gets its place in it.
        prompt_len: positions of the prompt.
        longest: upper bound of the request's positions.

    Attributes:
        next_position: positions before it were sent. They are not captured again when they are computed again.
        error: why the states are lost; nothing is captured any more. None where they are not.
    """

    def __init__(self, groups: Sequence[Group], prompt_len: int, longest: int) -> None:
        self.next_position = 0
        self.error: CaptureError | None = None
        self._prompt_len = prompt_len
        self._captured = reduce(np.logical_or, [group.captured for group in groups], np.zeros(longest, dtype=np.bool_))
        self._sums_size = sum(group.sums_size for group in groups)
        self._reads = any(group.reading is not None for group in groups)
        self._record_sizes = np.zeros(longest, dtype=np.int64)
        offset = 0
        for group in groups:
            group.offset, offset = offset, offset + group.record_size
            self._record_sizes[group.ordinals >= 0] = offset
        for group in groups:  # a record has the states of other groups that its own read
            stops = [source[0].offset + source[0].record_size for source in group.sources if source is not None]
            if stops:
                np.maximum(self._record_sizes, max(stops), out=self._record_sizes, where=group.ordinals >= 0)
        self._sizes_to_pack = self._packed_sizes = self._record_sizes
        if self._sums_size or self._reads:
            packed = longest if self._reads else prompt_len
            if np.count_nonzero(np.diff(self._record_sizes[:packed])) > MAX_RUNS:
                self._sizes_to_pack = np.where(self._record_sizes > 0, self._record_sizes.max(), 0)
            self._packed_sizes = np.sum([group.sent_whole * group.packed_size for group in groups], axis=0)

    @property
    def longest(self) -> int:
        """Upper bound of the request's positions."""
        return len(self._captured)

    def sizes(self) -> RecordSizes:
        """The sizes without states, with a progress of their own."""
        copied, own = object.__new__(RecordSizes), vars(self)
        vars(copied).update({name: own[name] for name in FIELDS})
        return copied

    def was_sent(self, stop: int) -> None:
        """The positions before `stop` were sent."""
        self.next_position = max(self.next_position, stop)

    def lose(self, why: str) -> None:
        """Capture nothing any more. A second call does nothing."""
        if self.error is None:
            self.error = CaptureError(why)

    def first_position(self, start: int) -> int | None:
        """The first captured position from `start` on; None for none, or where the captures are lost."""
        own = self._captured[start:]
        return None if self.error is not None or not own.any() else start + int(own.argmax())

    @property
    def max_reserved_size(self) -> int:
        """Upper bound of the ring elements for one position."""
        if not self._sums_size and not self._reads:
            return int(self._record_sizes.max(initial=0))
        packed = self._sizes_to_pack + self._packed_sizes + self._sums_size
        packed = packed if self._reads else packed[: self._prompt_len]
        return int(max(packed.max(initial=0), self._record_sizes.max(initial=0)))

    def packs(self, first: int) -> bool:
        """Whether the records of a pass from position `first` on are packed: states are read, or prompt positions summed."""
        return self._reads or (self._sums_size > 0 and max(first, self.next_position) < self._prompt_len)

    def record_sizes(self, first: int, count: int) -> np.ndarray:
        """[count] int64: elements of the records of positions `first` and on; 0 for positions that are not captured (again)."""
        sizes = (self._sizes_to_pack if self.packs(first) else self._record_sizes)[first : first + count]
        if self.error is not None:
            return np.zeros_like(sizes)
        if first < self.next_position:
            sizes = sizes.copy()
            sizes[: self.next_position - first] = 0
        return sizes

    def reserved_sizes(self, first: int, count: int) -> np.ndarray:
        """[count] int64: ring elements for these positions in one pass: their records, and what they are packed to."""
        sizes = self.record_sizes(first, count)
        if not self.packs(first) or not sizes.any():
            return sizes
        reserved = sizes + np.where(sizes > 0, self._packed_sizes[first : first + count], 0)
        reserved[0] += self._sums_size
        return reserved

    def reserved_size(self, first: int, count: int) -> int:
        """The sum of `reserved_sizes`."""
        if count != 1 or self.packs(first):
            return int(self.reserved_sizes(first, count).sum())
        return 0 if first < self.next_position or self.error is not None else self._record_sizes.item(first)

    def packed_size(self, first: int, sizes: np.ndarray) -> int:
        """Elements that records are packed to, whether or not `error` was set since.

        Args:
            first: first position.
            sizes: [positions], of `record_sizes`.
        """
        if len(sizes) == 1:  # decode steps have hundreds of these
            return self._sums_size + self._packed_sizes.item(first) * (sizes.item() > 0)
        return self._sums_size + int(self._packed_sizes[first : first + len(sizes)][sizes > 0].sum())


FIELDS = (
    "next_position", "error", "_prompt_len", "_captured", "_sums_size", "_reads", "_record_sizes", "_sizes_to_pack",
    "_packed_sizes",
)  # fmt: skip
"""Attributes of a `RecordSizes`."""
