"""`RingCopier`: the thread that copies captured states from the host ring to the results of their requests."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from ....kernels.cpu.block_copies import CopyBlocks, load_block_copies
from ....utils.integers import INTEGERS
from ....utils.stage_times import TIMES
from ..activations import CaptureError
from ..captures import Captures
from ..group import SmallRow
from ..kept_rows import WORDS
from .result_memory import Memory
from .ring_allocator import RingAllocator
from .step_block import MAX_WORDS, NUM_COPIERS, AlikeStep, StepBlock

logger = logging.getLogger(__name__)

NO_MEMORY = (MemoryError, OSError, RuntimeError)
"""What a failed allocation or copy raises. Only the captures of the affected request are lost."""


class RequestSlice(NamedTuple):
    """The slice of a step's span that holds the records of one request, or what its records are packed to."""

    captures: Captures
    first: int
    """First position."""
    sizes: np.ndarray
    """[positions] int64: elements of each record."""
    offset: int
    """First element to copy to the host, from the start of the span."""
    size: int
    """Elements to copy to the host."""
    records_at: int | None = None
    """First element of the records that are packed on the device, from the start of the span. None: no record is packed."""

    def split(self, parts: int) -> list[RequestSlice]:
        """At most `parts` slices with equal numbers of positions. A packed slice is not split."""
        if parts <= 1 or self.records_at is not None or len(self.sizes) == 1:
            return [self]
        slices, offset, count = [], self.offset, -(-len(self.sizes) // parts)
        for i in range(0, len(self.sizes), count):
            sizes = self.sizes[i : i + count]
            slices.append(RequestSlice(self.captures, self.first + i, sizes, offset, int(sizes.sum())))
            offset += slices[-1].size
        return slices


class SentSpan(NamedTuple):
    """A span of the ring that is being copied to the host."""

    start: int
    slices: Sequence[RequestSlice] | AlikeStep
    copied: torch.cuda.Event | None
    """Recorded after the copy; None where the copy is done."""
    began: torch.cuda.Event | None = None
    """Recorded before it, where it is measured."""


_Copy = tuple[RequestSlice, torch.Tensor | None]
"""A slice to copy, and the rows of its result, [words], where its records are kept unchanged."""
_SmallCopy = tuple[RequestSlice, SmallRow]
T = TypeVar("T", _Copy, _SmallCopy)


class RingCopier:
    """Copies spans of the host ring to results and frees them, on a thread of its own.

    Args:
        allocator: of the ring.
        results: memory of the results.

    Attributes:
        on_freed: called on the thread after a span was freed.
    """

    def __init__(self, allocator: RingAllocator, results: Memory) -> None:
        self.on_freed: Callable[[], None] | None = None
        self._allocator, self._results = allocator, results
        self._queue: queue.SimpleQueue[SentSpan | Callable[[], None] | None] = queue.SimpleQueue()
        self._steps = StepBlock(results, _lose)
        self._host = torch.empty(0)
        self._copy_blocks: CopyBlocks | None = None
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None

    def start(self, host: torch.Tensor) -> None:
        """Start the thread.

        Args:
            host: [elements], the host ring.
        """
        self._host = host
        self._pool = self._steps.pool = ThreadPoolExecutor(NUM_COPIERS, "pymllm-interp-captures")
        self._thread = threading.Thread(target=self._run, name="pymllm-interp-captures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy all that was sent, then end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._pool.shutdown()
            self._thread = None

    def send(self, span: SentSpan) -> None:
        """Copy an allocated span to its results, then free it."""
        self._queue.put(span)

    def after(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread after all spans sent so far; at once if the thread does not run."""
        if self._thread is None:
            function()
        else:
            self._queue.put(function)

    def wait(self) -> None:
        """Wait until all spans sent so far are copied, and functions given to `after` have returned."""
        done = threading.Event()
        self.after(done.set)
        done.wait()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        return self._queue.empty()

    def _run(self) -> None:
        self._copy_blocks = self._steps.copy_blocks = load_block_copies()
        while (item := self._queue.get()) is not None:
            if not isinstance(item, SentSpan):
                self._steps.flush()
                with TIMES.of("copier: results of ended requests"):
                    item()
                continue
            try:
                if item.copied is not None:
                    with TIMES.of("copier: wait for the pass and its copy to the host"):
                        item.copied.synchronize()
                    if item.began is not None:
                        TIMES.add("device: ring to host", item.began.elapsed_time(item.copied) / 1e3)
                if isinstance(item.slices, AlikeStep):
                    self._steps.add(self._host[item.start :], item.slices)
                else:
                    self._steps.flush()
                    with TIMES.of("copier: steps that are not alike"):
                        self._copy_out(self._host[item.start :], item.slices)
            except NO_MEMORY as error:  # of CUDA; later spans must still be served
                for captures in captures_of(item.slices):
                    _lose(captures, error)
            self._allocator.free_oldest()
            if self.on_freed is not None:
                self.on_freed()
        self._steps.flush()

    def _copy_out(self, host: torch.Tensor, slices: Sequence[RequestSlice]) -> None:
        copies, small = [], []
        for request_slice in slices:
            found = self._small_copy(request_slice)
            if found is not None:
                small.append(found)
            else:
                copies += self._copies_of(request_slice)
        if self._copy_blocks is not None:
            copies = _copy_unchanged(self._copy_blocks, host, copies)
        if copies:
            list(self._pool.map(lambda dealt: _copy_measured(host, dealt), _dealt(copies)))
        _copy_small(host, small)
        for request_slice in slices:
            request_slice.captures.mark_copied(request_slice.first + len(request_slice.sizes))

    def _small_copy(self, request_slice: RequestSlice) -> _SmallCopy | None:
        """The copy of a slice that is one small record, kept unchanged; else None."""
        if len(request_slice.sizes) > 1:
            return None
        captures = request_slice.captures
        try:
            captures.prepare(self._results)
        except NO_MEMORY:  # `_copies_of` says so
            return None
        row = captures.small_row(request_slice.first)
        if row is None or row[0].itemsize != request_slice.size * self._host.itemsize:
            return None
        return request_slice, row

    def _copies_of(self, request_slice: RequestSlice) -> list[_Copy]:
        """The copies of a slice: several where several threads may copy it."""
        captures = request_slice.captures
        try:
            captures.prepare(self._results)
            whole = None if self._copy_blocks is None else self._direct_rows(request_slice)
            if whole is not None:
                return [(request_slice, whole)]
            parts = request_slice.split(1 if captures.in_order else NUM_COPIERS)
            return [(part, self._direct_rows(part)) for part in parts]
        except NO_MEMORY as error:
            _lose(captures, error)
            return [(request_slice, None)]

    def _direct_rows(self, part: RequestSlice) -> torch.Tensor | None:
        rows = part.captures.direct_rows(part.first, len(part.sizes))
        # Positions that were computed again have no record, and sums come before the rows.
        fits = rows is not None and rows.nbytes == part.size * self._host.itemsize
        return torch.from_numpy(rows.reshape(-1)) if rows is not None and fits else None


def _copy_unchanged(copy_blocks: CopyBlocks, host: torch.Tensor, copies: list[_Copy]) -> list[_Copy]:
    """Copy slices with records that are kept unchanged, in one call. Returns the others."""
    unchanged = [(part, rows) for part, rows in copies if rows is not None]
    if unchanged:
        sizes = np.array([rows.nbytes for _, rows in unchanged])
        to = np.array([rows.data_ptr() for _, rows in unchanged])
        source = host.data_ptr() + host.itemsize * np.array([part.offset for part, _ in unchanged])
        with TIMES.of("copier: steps that are not alike, unchanged", int(sizes.sum())):
            copy_blocks(to, source, sizes, NUM_COPIERS)
    return [copy for copy in copies if copy[1] is None]


def _dealt(copies: list[_Copy]) -> list[list[_Copy]]:
    """Consecutive copies for each thread, with about equally many elements."""
    ends = np.cumsum([part.size for part, _ in copies])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, NUM_COPIERS) / NUM_COPIERS, side="right").tolist()
    return [dealt for begin, end in pairwise((0, *cuts, len(copies))) if (dealt := copies[begin:end])]


def _copy_measured(host: torch.Tensor, copies: list[_Copy]) -> None:
    with TIMES.of("copiers: ring to results", sum(part.size for part, _ in copies) * host.itemsize):
        _copy(host, copies)


def _copy(host: torch.Tensor, copies: list[_Copy]) -> None:
    """Copy slices of a span to their results.

    Consecutive records that are kept unchanged are one call of torch, which releases the GIL: the engine's thread needs it.
    """
    for unchanged, run in groupby(copies, key=lambda copy: copy[1] is not None):
        if unchanged:
            for adjacent in _adjacent(list(run)):
                _copy_rows(host, adjacent)
            continue
        integers = host.view(INTEGERS[host.dtype.itemsize]).numpy()
        for (captures, first, sizes, offset, size, records_at), _ in run:
            try:
                if captures.error is None:
                    copy = captures.copy if records_at is None else captures.unpack
                    copy(integers[offset : offset + size], first, sizes)
            except NO_MEMORY as error:
                _lose(captures, error)


def _copy_small(host: torch.Tensor, copies: list[_SmallCopy]) -> None:
    """Copy small records to their rows. NumPy takes a tenth of torch's time for a row, and does not hand the GIL over."""
    values = host.view(INTEGERS[host.dtype.itemsize]).numpy()
    for adjacent in _adjacent(copies):
        for _, run in groupby(adjacent, key=lambda copy: copy[0].size):
            alike = list(run)
            (first, (rows, _)), count = alike[0], len(alike)
            records = values[first.offset : first.offset + count * first.size].reshape(count, -1).view(rows.dtype)[:, 0]
            for (_, (target, ordinal)), record in zip(alike, records, strict=True):
                target[ordinal] = record


def _adjacent(copies: list[T]) -> Iterator[list[T]]:
    """Lists of copies with adjacent slices."""
    start = 0
    for i in range(1, len(copies) + 1):
        before = copies[i - 1][0]
        if i == len(copies) or copies[i][0].offset != before.offset + before.size:
            yield copies[start:i]
            start = i


def _copy_rows(host: torch.Tensor, copies: list[_Copy]) -> None:
    """Copy adjacent records to their rows."""
    first, last = copies[0][0], copies[-1][0]
    rows = [row for _, row in copies if row is not None]
    try:
        if max(map(len, rows)) > MAX_WORDS:
            rows = [some for row in rows for some in row.split(MAX_WORDS)]
        records = host[first.offset : last.offset + last.size].view(WORDS)
        torch.split_with_sizes_copy(records, [len(row) for row in rows], out=rows)
    except NO_MEMORY as error:
        for part, _ in copies:
            _lose(part.captures, error)


def captures_of(slices: Sequence[RequestSlice] | AlikeStep) -> Sequence[Captures]:
    """The captures of each request of a span."""
    return slices.captures if isinstance(slices, AlikeStep) else [each.captures for each in slices]


def _lose(captures: Captures, error: Exception) -> None:
    logger.warning("captured states are lost: %r", error)
    captures.error = CaptureError(f"captured states are lost: {error!r}")
