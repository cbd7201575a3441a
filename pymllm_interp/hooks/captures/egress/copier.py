"""`RingCopier`: the thread that copies captured states from the host ring to the results of their requests.

Rows that are kept as they were sent are copied by one call for all requests of a span. So the engine's thread gets the GIL. Small
decode steps of the same requests are held, and copied together. Rows are folded, or converted, request by request.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.cpu.block_copies import PART_BYTES, CopyBlocks, load_block_copies
from ....utils.integers import as_integers
from ....utils.stage_times import TIMES
from ..activations import CaptureError
from ..layout import RecordKind
from ..rows import CapturedRows
from .result_memory import Memory
from .ring_allocator import RingAllocator

logger = logging.getLogger(__name__)

NO_MEMORY = (MemoryError, OSError, RuntimeError)
"""Errors of a failed allocation or copy. Only the captures of the affected request are lost."""
MAX_STEPS = 32
"""Upper bound of the steps that are held."""
MAX_BYTES = 256 << 20
"""Upper bound of the memory of held steps."""
FEWEST_STEPS = 8
"""Fewest steps that are held. Where fewer fit, each step is copied to the results at once."""
MAX_PLACES = 8
"""Upper bound of the batches with kept places. Pipeline ranks run several by turns."""
NUM_COPIERS = 8
"""Threads that copy from the host ring to results."""


class RequestSlice(NamedTuple):
    """The slice of a step's span with the records of one request, or with their packed results."""

    rows: CapturedRows
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

    def pieces(self, size: int) -> Iterator[RequestSlice]:
        """Slices of at most `size` elements, or of one record. No record is packed."""
        if self.size <= size:
            yield self
            return
        ends, start, before = np.cumsum(self.sizes), 0, 0
        while start < len(ends):
            stop = max(int(np.searchsorted(ends, before + size, side="right")), start + 1)
            count = ends.item(stop - 1) - before
            yield RequestSlice(self.rows, self.first + start, self.sizes[start:stop], self.offset + before, count)
            start, before = stop, before + count


class AlikeStep(NamedTuple):
    """A decode step of requests with records of one kind, a position each: their records are side by side."""

    rows: list[CapturedRows]
    firsts: list[int]
    """Position of each request."""
    kind: RecordKind

    def follows(self, other: AlikeStep, steps: int) -> bool:
        """Whether it is the same requests' step, `steps` after the `other`."""
        return (
            self.kind == other.kind
            and self.rows == other.rows
            and self.firsts == [first + steps for first in other.firsts]
        )


class SentSpan(NamedTuple):
    """A span of the ring that is being copied to the host."""

    start: int
    slices: Sequence[RequestSlice] | AlikeStep
    copied: torch.cuda.Event | None
    """Recorded after the copy; None if the copy is complete."""
    began: torch.cuda.Event | None = None
    """Recorded before it, if it is measured."""

    @property
    def rows(self) -> Sequence[CapturedRows]:
        """The rows of each request."""
        return self.slices.rows if isinstance(self.slices, AlikeStep) else [part.rows for part in self.slices]


class _KeptAt(NamedTuple):
    """Destination of the records of consecutive steps.

    Attributes:
        addresses: addresses by group, [requests] int64; 0 for a request without memory.
    """

    step: AlikeStep
    addresses: list[np.ndarray]


class BlockCopies:
    """Copies out of host memory that are made together. See `group.SentRecords`.

    Args:
        memory: [elements].
    """

    def __init__(self, memory: torch.Tensor, copy: CopyBlocks) -> None:
        self._values, self._copy = as_integers(memory), copy
        self._address, self._itemsize = memory.data_ptr(), memory.itemsize
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._steps: list[tuple[np.ndarray, np.ndarray, int]] = []

    def values(self, offset: int, count: int) -> np.ndarray:
        """[count] of the elements from `offset` on, as integers of their width."""
        return self._values[offset : offset + count]

    def add(self, to: int, offset: int, count: int, size: int, stride: int) -> None:
        """Copy `count` rows of `size` bytes to adjacent places. Thread-safe.

        Args:
            to: address of the first place.
            offset: first element of the first row.
            stride: elements from one row to the next.
        """
        stride *= self._itemsize
        if size == stride:
            count, size, stride = 1, count * size, count * size
        self._rows.append((to, self._address + offset * self._itemsize, count, size, stride))

    def add_steps(self, to: np.ndarray, offset: int, steps: int, size: int, stride: int) -> None:
        """`add` for each request of some steps.

        Args:
            to: [requests] int64, addresses of the first step; 0 for none.
            offset: first element of the first request.
            stride: elements from one request to the next.
        """
        step = np.arange(steps, dtype=np.int64)[:, None]
        source = self._address + (step * (len(to) * stride) + np.arange(len(to)) * stride + offset) * self._itemsize
        places = to + step * size
        if not to.all():
            places, source = places[:, to > 0], source[:, to > 0]
        self._steps.append((places.ravel(), source.ravel(), size))

    def make(self) -> None:
        """Make all collected copies."""
        parts = [(to, source, np.full(len(to), size, np.int64)) for to, source, size in self._steps]
        if self._rows:
            places: list[int] = []
            sources: list[int] = []
            sizes: list[int] = []
            for to, source, count, size, stride in self._rows:
                places += range(to, to + count * size, size)
                sources += range(source, source + count * stride, stride)
                sizes += [size] * count
            parts.append((np.array(places), np.array(sources), np.array(sizes)))
        if parts:
            to, source, sizes_of = map(np.concatenate, zip(*parts, strict=True))
            with TIMES.of("copier: copies to results", int(sizes_of.sum())):
                self._copy(to, source, sizes_of, NUM_COPIERS)


class RingCopier:
    """Copies spans of the host ring to results and frees them, on its own thread.

    Attributes:
        on_freed: called on the thread after a span was freed.
    """

    def __init__(self, allocator: RingAllocator, results: Memory) -> None:
        self.on_freed: Callable[[], None] | None = None
        self._allocator, self._results = allocator, results
        self._queue: queue.SimpleQueue[SentSpan | Callable[[], None] | None] = queue.SimpleQueue()
        self._host = torch.empty(0)
        self._thread: threading.Thread | None = None
        self._block = torch.empty((0, 0))
        self._held: AlikeStep | None = None  # the first step of the block
        self._count = 0
        self._places = deque[_KeptAt](maxlen=MAX_PLACES)

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
        self._pool = ThreadPoolExecutor(NUM_COPIERS, "pymllm-interp-captures")
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
        self._copy = load_block_copies()
        while (item := self._queue.get()) is not None:
            if isinstance(item, SentSpan):
                self._take(item)
            else:
                self._flush()
                with TIMES.of("copier: results of ended requests"):
                    item()
            del item  # its results are freed with their request, and not with the next item
        self._flush()

    def _take(self, span: SentSpan) -> None:
        """Wait for a span's copy to the host, copy it to its results, and free it."""
        try:
            if span.copied is not None:
                with TIMES.of("copier: wait for the pass and its copy to the host"):
                    span.copied.synchronize()
                if span.began is not None:
                    TIMES.add("device: ring to host", span.began.elapsed_time(span.copied) / 1e3)
            if isinstance(span.slices, AlikeStep):
                self._hold(self._host[span.start :], span.slices)
            else:
                self._flush()
                self._copy_slices(self._host[span.start :], span.slices)
        except NO_MEMORY as error:  # of CUDA; later spans must still be served
            _lose_all(span.rows, error)
        self._allocator.free_oldest()
        if self.on_freed is not None:
            self.on_freed()

    def _hold(self, host: torch.Tensor, step: AlikeStep) -> None:
        """Hold a step for a later copy, or copy it now if it is large.

        Args:
            host: the ring from the step's first element on.
        """
        size = len(step.rows) * step.kind.sent_size
        if self._held is not None and not step.follows(self._held, self._count):
            self._copy_held()
        size_bytes = size * host.itemsize
        steps = min(MAX_STEPS, MAX_BYTES // size_bytes)
        if steps < FEWEST_STEPS or size_bytes >= PART_BYTES:
            self._copy_steps(host[None, :size], step)
            return
        if self._held is None:
            if self._block.shape[1] != size:
                self._block = torch.empty((steps, size), dtype=host.dtype)
            self._held = step
        # By NumPy: torch would start its intra-op threads.
        with TIMES.of("copier: ring to block", size_bytes):
            np.copyto(as_integers(self._block[self._count]), as_integers(host[:size]))
        self._count += 1
        if self._count == len(self._block):
            self._copy_held()

    def _flush(self) -> None:
        """Copy the held steps to the results, and hold no results."""
        self._copy_held()
        self._places.clear()

    def _copy_held(self) -> None:
        first, count = self._held, self._count
        self._held, self._count = None, 0
        if first is not None:
            self._copy_steps(self._block[:count], first)

    def _copy_steps(self, block: torch.Tensor, step: AlikeStep) -> None:
        """Copy records [steps, requests * size]. A request with a failed copy loses its captures; others are still served."""
        size, packed = step.kind.sent_size, step.kind.packed_size > 0
        copies = BlockCopies(block.view(-1), self._copy)
        places = self._places_of(step)
        before = step.firsts[0] - places.step.firsts[0]
        for (group, start), to in zip(step.rows[0].layout.sent_places(packed), places.addresses, strict=True):
            if group.copied:
                own = np.where(to > 0, to + before * group.row_bytes, 0) if before else to
                copies.add_steps(own, start, len(block), group.row_bytes, size)
                continue
            for i, (rows, first) in enumerate(zip(step.rows, step.firsts, strict=True)):
                own_rows = rows.groups[group.index]
                where = own_rows.group.ordinals.item(first), i * size + start, len(block), block.shape[1]
                self._guarded(rows, partial(own_rows.copy_block, copies, *where))
        self._make(copies, step.rows)
        for rows, first in zip(step.rows, step.firsts, strict=True):
            rows.mark_copied(first + len(block))

    def _places_of(self, step: AlikeStep) -> _KeptAt:
        for known in self._places:
            steps = step.firsts[0] - known.step.firsts[0]
            if steps >= 0 and step.follows(known.step, steps):
                return known
        addresses = np.zeros((len(step.rows[0].groups), len(step.rows)), dtype=np.int64)
        with TIMES.of("copier: find rows of results"):
            for i, (rows, first) in enumerate(zip(step.rows, step.firsts, strict=True)):
                try:
                    rows.prepare(self._results)
                except NO_MEMORY as error:
                    _lose(rows, error)
                    continue
                for index, own in enumerate(rows.groups):
                    addresses[index, i] = own.address + own.group.ordinals.item(first) * own.group.row_bytes
        self._places.append(found := _KeptAt(step, list(addresses)))
        return found

    def _copy_slices(self, host: torch.Tensor, slices: Sequence[RequestSlice]) -> None:
        copies = BlockCopies(host, self._copy)

        def keep(part: RequestSlice) -> None:
            part.rows.prepare(self._results)
            part.rows.copy_rows(copies, part.first, part.sizes, part.offset, part.records_at is not None)

        def copy(part: RequestSlice) -> None:
            self._guarded(part.rows, partial(keep, part))

        with TIMES.of("copier: steps that are not alike"):
            slow = [part for part in slices if len(part.sizes) > 1 and not part.rows.layout.copied]
            for part in slices:
                if len(part.sizes) == 1 or part.rows.layout.copied:
                    copy(part)
            list(self._pool.map(copy, slow) if len(slow) > 1 else map(copy, slow))
            self._make(copies, [part.rows for part in slices])
        for part in slices:
            part.rows.mark_copied(part.first + len(part.sizes))

    def _guarded(self, rows: CapturedRows, keep: Callable[[], None]) -> None:
        """Call `keep`. Its request loses its states where that fails."""
        try:
            if rows.error is None:
                keep()
        except NO_MEMORY as error:
            _lose(rows, error)

    def _make(self, copies: BlockCopies, rows: Sequence[CapturedRows]) -> None:
        try:
            copies.make()
        except NO_MEMORY as error:
            _lose_all(rows, error)


def _lose_all(rows: Sequence[CapturedRows], error: Exception) -> None:
    for own in rows:
        _lose(own, error)


def _lose(rows: CapturedRows, error: Exception) -> None:
    logger.warning("captured states are lost: %r", error)
    rows.error = CaptureError(f"captured states are lost: {error!r}")
