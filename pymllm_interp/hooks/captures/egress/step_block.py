"""`StepBlock`: captured states of decode steps, copied to results some steps at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.cpu.block_copies import PART_BYTES, CopyBlocks
from ....utils.integers import as_integers
from ....utils.stage_times import TIMES
from ..captures import Captures, RecordLayout
from ..kept_rows import WORDS
from .result_memory import Memory

MAX_STEPS = 32
"""Upper bound of the steps that a block holds."""
MAX_BYTES = 256 << 20
"""Upper bound of the memory of a block."""
NUM_COPIERS = 8
"""Threads that copy from the host ring to results."""
MAX_WORDS = 1 << 15
"""Upper bound of one copy, in words. For larger copies torch starts its intra-op threads."""
FEWEST_STEPS = 8
"""Fewest steps of a block. Where fewer fit, each step is copied to the results at once."""
STEPS_AHEAD = 32
"""Steps for which the rows of results are found together, where each step is copied at once."""


class AlikeStep(NamedTuple):
    """A decode step of requests that capture alike, one position each: their records are side by side."""

    captures: list[Captures]
    firsts: list[int]
    """Position of each request."""
    layout: RecordLayout

    def follows(self, other: AlikeStep, steps: int) -> bool:
        """Whether it is the same requests' step, `steps` after the `other`."""
        return (
            self.layout is other.layout
            and self.captures == other.captures
            and self.firsts == [first + steps for first in other.firsts]
        )


class _Rows(NamedTuple):
    """The rows of results of consecutive steps of the same requests."""

    first: AlikeStep
    each: list[np.ndarray | None]
    """[steps, words] of each request; None where its records are not kept unchanged."""
    addresses: np.ndarray
    """[requests] int64, of the first row of each."""
    runs: list[tuple[int, int]]
    """[begin, end) of neighbours that all have rows, or all have none."""
    steps: int
    """Steps for which all requests have rows."""

    @classmethod
    def of(cls, first: AlikeStep, each: list[np.ndarray | None]) -> _Rows:
        """The rows from the `first` step on."""
        addresses = [0 if rows is None else rows.__array_interface__["data"][0] for rows in each]
        cuts = [i for i in range(1, len(each)) if (each[i] is None) != (each[i - 1] is None)]
        steps = min((len(rows) for rows in each if rows is not None), default=STEPS_AHEAD)
        return cls(first, each, np.array(addresses, dtype=np.int64), list(pairwise((0, *cuts, len(each)))), steps)

    def steps_before(self, step: AlikeStep) -> int | None:
        """Steps from the first one to `step`. None: it is another."""
        count = step.firsts[0] - self.first.firsts[0]
        return count if 0 <= count < self.steps and step.follows(self.first, count) else None


class StepBlock:
    """Copies the states of decode steps to the requests' results.

    A step costs one call, whatever the number of requests. So the engine's thread gets the GIL. States of consecutive small steps
    of the same requests are held, and copied together. Without `copy_blocks` so are larger ones.

    Args:
        results: memory of the results.
        lose: called with captures that are lost, and why.

    Attributes:
        copy_blocks: copies without the GIL; None: by torch.
        pool: threads that copy large blocks by torch.
    """

    copy_blocks: CopyBlocks | None = None
    pool: ThreadPoolExecutor

    def __init__(self, results: Memory, lose: Callable[[Captures, Exception], None]) -> None:
        self._results, self._lose = results, lose
        self._memory = torch.empty((0, 0))
        self._first: AlikeStep | None = None
        self._count = 0
        self._ahead: _Rows | None = None

    def add(self, host: torch.Tensor, step: AlikeStep) -> None:
        """Copy a step out of the ring.

        Args:
            host: the ring from the step's first element on.

        Raises:
            MemoryError, RuntimeError: no memory for the block.
        """
        size = len(step.captures) * step.layout.sent_size
        if self._first is not None and not step.follows(self._first, self._count):
            self.flush()
        size_bytes = size * host.itemsize
        steps = min(MAX_STEPS, MAX_BYTES // size_bytes)
        if steps < FEWEST_STEPS or (self.copy_blocks is not None and size_bytes >= PART_BYTES):
            self._copy(host[None, :size], step)
            return
        if self._first is None:
            if self._memory.shape[1] != size:
                self._memory = torch.empty((steps, size), dtype=host.dtype)
            self._first = step
        # By NumPy: torch would start its intra-op threads.
        with TIMES.of("copier: ring to block", size * host.itemsize):
            np.copyto(as_integers(self._memory[self._count]), as_integers(host[:size]))
        self._count += 1
        if self._count == len(self._memory):
            self.flush()

    def flush(self) -> None:
        """Copy what is held to the results. Nothing of them is held any more."""
        first, count = self._first, self._count
        self._first, self._count = None, 0
        if first is not None:
            self._copy(self._memory[:count], first)
        self._ahead = None

    def _copy(self, block: torch.Tensor, first: AlikeStep) -> None:
        """Copy states [steps, requests * size] to the results. Requests lose theirs where that fails; others are still served."""
        try:
            self._copy_out(block, first)
        except (MemoryError, OSError, RuntimeError) as error:
            for captures in first.captures:
                self._lose(captures, error)

    def _copy_out(self, block: torch.Tensor, first: AlikeStep) -> None:
        with TIMES.of("copier: find rows of results"):
            rows, before = self._rows(first, len(block), block.itemsize)
        size = first.layout.sent_size
        for begin, end in rows.runs:
            part = block[:, begin * size : end * size]
            if rows.each[begin] is not None:
                with TIMES.of("copier: copies to results", part.nbytes):
                    self._copy_columns(part.view(WORDS), rows, begin, end, before)
                continue
            integers = as_integers(part)
            for i in range(begin, end):
                own = integers[:, (i - begin) * size : (i - begin + 1) * size]
                self._copy_by_record(first.captures[i], own, first.firsts[i], first.layout)
        for captures, position in zip(first.captures, first.firsts, strict=True):
            captures.mark_copied(position + len(block))

    def _copy_columns(self, block: torch.Tensor, rows: _Rows, begin: int, end: int, before: int) -> None:
        """Copy words [steps, requests * words] to the rows of the requests [begin, end), from the step `before` of them on."""
        if self.copy_blocks is not None:
            size = block.shape[1] // (end - begin) * block.itemsize
            steps = np.arange(len(block), dtype=np.int64)[:, None]
            to = rows.addresses[begin:end] + (before + steps) * size
            source = block.data_ptr() + steps * (block.stride(0) * block.itemsize) + np.arange(end - begin) * size
            self.copy_blocks(to, source, np.full(to.size, size), NUM_COPIERS)
            return
        stop = before + len(block)
        self._copy_by_torch(
            block, [torch.from_numpy(own[before:stop]) for own in rows.each[begin:end] if own is not None]
        )

    def _copy_by_torch(self, block: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Copy words [steps, requests * words] to rows [steps, words]. Each thread has the GIL once."""
        words = rows[0].shape[1]
        each = -(-len(rows) // min(NUM_COPIERS, max(1, block.nbytes // PART_BYTES)))
        # Columns of at most `MAX_WORDS`: for larger copies torch starts its intra-op threads.
        lines = max(1, MAX_WORDS // words)

        def copy(begin: int) -> None:
            own = rows[begin : begin + each]
            part = block[:, begin * words : (begin + len(own)) * words]
            with TIMES.of("copiers: block to results", part.nbytes):
                copy_lines(own, part)

        def copy_lines(own: list[torch.Tensor], part: torch.Tensor) -> None:
            for top in range(0, len(part), lines):
                out = own if lines >= len(part) else [row[top : top + lines] for row in own]
                torch.split_with_sizes_copy(part[top : top + lines], [words] * len(own), dim=1, out=out)

        if each >= len(rows):
            copy(0)
        else:
            list(self.pool.map(copy, range(0, len(rows), each)))

    def _rows(self, step: AlikeStep, count: int, itemsize: int) -> tuple[_Rows, int]:
        """The rows for `count` steps, and the number of steps of them that are before these."""
        before = None if self._ahead is None or count > 1 else self._ahead.steps_before(step)
        if self._ahead is not None and before is not None:
            return self._ahead, before
        size = step.layout.sent_size * itemsize
        each = zip(step.captures, step.firsts, strict=True)
        if count > 1:
            return _Rows.of(step, [self._rows_of(*one, count, size) for one in each]), 0
        # As many steps as a request has positions. A row is kept unchanged at all generated positions, or at none.
        rows = [self._rows_of(*one, min(STEPS_AHEAD, one[0].longest - one[1]), size) for one in each]
        self._ahead = _Rows.of(step, rows)
        return self._ahead, 0

    def _rows_of(self, captures: Captures, first: int, count: int, size: int) -> np.ndarray | None:
        """[count, words], where the records of a request are kept unchanged, `size` bytes each; else None."""
        try:
            captures.prepare(self._results)
            rows = captures.direct_rows(first, count)
        except (MemoryError, OSError, RuntimeError) as error:
            self._lose(captures, error)
            return None
        return rows if rows is not None and rows.nbytes == count * size else None

    def _copy_by_record(self, captures: Captures, records: np.ndarray, first: int, layout: RecordLayout) -> None:
        """Copy records [steps, size] that are not kept as they are."""
        copy = captures.unpack if layout.packed_size else captures.copy
        size = np.full(1, layout.record_size)
        try:
            for position, record in enumerate(records, first):
                if captures.error is None:
                    copy(record, position, size)
        except (MemoryError, OSError, RuntimeError) as error:
            self._lose(captures, error)
