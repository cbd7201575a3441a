"""`StepBlock`: captured states of decode steps, copied to results some steps at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

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
PART_BYTES = 1 << 20
"""Fewest bytes that a thread copies."""


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


class _RowsAhead(NamedTuple):
    """The rows of results of consecutive steps of the same requests."""

    first: AlikeStep
    rows: list[np.ndarray | None]
    """[steps, words] of each request; None where its records are not kept unchanged."""
    steps: int
    """Steps for which all requests have rows."""

    def of(self, step: AlikeStep) -> list[torch.Tensor | None] | None:
        """[1, words] of each request, in order. None: the step is another."""
        behind = step.firsts[0] - self.first.firsts[0]
        if not 0 <= behind < self.steps or not step.follows(self.first, behind):
            return None
        return [None if rows is None else torch.from_numpy(rows[behind : behind + 1]) for rows in self.rows]


class StepBlock:
    """Holds the states of consecutive decode steps of the same requests, and copies them to the requests' results together.

    A step costs one copy of all its states, whatever the number of requests. So the engine's thread gets the GIL.

    Args:
        results: memory of the results.
        lose: called with captures that are lost, and why.

    Attributes:
        pool: threads that copy large blocks.
    """

    pool: ThreadPoolExecutor

    def __init__(self, results: Memory, lose: Callable[[Captures, Exception], None]) -> None:
        self._results, self._lose = results, lose
        self._memory = torch.empty((0, 0))
        self._first: AlikeStep | None = None
        self._count = 0
        self._ahead: _RowsAhead | None = None

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
        steps = min(MAX_STEPS, MAX_BYTES // (size * host.itemsize))
        if steps < FEWEST_STEPS:
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
            columns = self._columns(first, len(block), block.itemsize)
        size = first.layout.sent_size
        # Runs of requests with records that are kept unchanged: one call of torch each, which releases the GIL once.
        cuts = [
            0,
            *(i for i in range(1, len(columns)) if (columns[i] is None) != (columns[i - 1] is None)),
            len(columns),
        ]
        for begin, end in pairwise(cuts):
            part = block[:, begin * size : end * size]
            if rows := [column for column in columns[begin:end] if column is not None]:
                with TIMES.of("copier: wait for copiers", part.nbytes):
                    self._copy_columns(part.view(WORDS), rows)
                continue
            integers = as_integers(part)
            for i in range(begin, end):
                own = integers[:, (i - begin) * size : (i - begin + 1) * size]
                self._copy_by_record(first.captures[i], own, first.firsts[i], first.layout)
        for captures, position in zip(first.captures, first.firsts, strict=True):
            captures.mark_copied(position + len(block))

    def _copy_columns(self, block: torch.Tensor, rows: list[torch.Tensor]) -> None:
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

    def _columns(self, step: AlikeStep, count: int, itemsize: int) -> list[torch.Tensor | None]:
        """[steps, words] of each request: its rows for `count` steps; None where its records are not kept unchanged."""
        size = step.layout.sent_size * itemsize
        each = list(zip(step.captures, step.firsts, strict=True))
        if count > 1:
            found = [self._rows_of(*one, count, size) for one in each]
            return [None if rows is None else torch.from_numpy(rows) for rows in found]
        found = None if self._ahead is None else self._ahead.of(step)
        if found is None:
            # As many steps as a request has positions. A row is kept unchanged at all generated positions, or at none.
            rows = [self._rows_of(*one, min(STEPS_AHEAD, one[0].longest - one[1]), size) for one in each]
            steps = min((len(own) for own in rows if own is not None), default=STEPS_AHEAD)
            self._ahead = _RowsAhead(step, rows, steps)
            found = self._ahead.of(step)
            assert found is not None
        return found

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
