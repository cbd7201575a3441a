"""`CaptureRing`: the ring buffer through which captured states leave the device.

    schedule       admission.take(requests)  reserves ring space; a request without space waits for a later step
    before a pass  lay_out(parts)            gives each token row of the step its record, all of them in one span
    the pass       kernels write states into the records; `put` writes the logits
    after a pass   send()                    copies the span to the host on a stream of its own
    a thread       RingCopier                copies records to the result of each request, then frees the span

Records of a mean over a prompt, or of a reduction, stay on the device, at the span's end. `send` packs them first, and copies
the packed results. With ``device="engine"``, records are copied to their results on the device, and nothing is sent.

The host ring has the size of the device ring, and a span has the same place in both. It is freed after its records are copied to
the results. Parts of a large one are freed one by one. Neither the engine's thread nor a launched pass waits for these copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ....utils.out_of_memory import is_out_of_memory
from ....utils.stage_times import TIMES
from ..group import Group
from ..layout import RecordKind
from ..reductions.reading import Pending, read_all
from ..rows import CapturedRows
from .admission import RingAdmission
from .copier import NO_MEMORY, AlikeStep, RequestSlice, RingCopier, SentSpan
from .result_memory import Memory, ResultMemory
from .ring_allocator import RingAllocator

SPAN_PART_BYTES = 128 << 20
"""Bytes of a span's parts, freed one by one. Behind a span of 1 GiB the next step waits 11 ms on a CPU, and 62 for the whole."""


class _StepLayout(NamedTuple):
    """The span that the next pass writes to."""

    start: int
    size: int
    num_sent: int
    """Elements, from its start, that are copied to the host."""
    slices: list[RequestSlice] | AlikeStep

    def parts(self, size: int) -> list[_StepLayout]:
        """Spans of about `size` elements, of whole records. A step with packed records is one."""
        if self.size <= size or self.num_sent < self.size or isinstance(self.slices, AlikeStep):
            return [self]
        parts, own, at = list[_StepLayout](), list[RequestSlice](), 0
        pieces = [piece for one in self.slices for piece in one.pieces(size)]
        for i, piece in enumerate(pieces):
            own.append(piece._replace(offset=piece.offset - at))
            stop = piece.offset + piece.size
            if stop - at >= size or i + 1 == len(pieces):
                parts.append(_StepLayout(self.start + at, stop - at, stop - at, own))
                own, at = [], stop
        return parts


class StatesOf(NamedTuple):
    """The rows of a tensor of states that one request captures. They are of consecutive positions."""

    captures: CapturedRows
    row: int
    """First row of the tensor."""
    token: int
    """Token row of the step that the first row is of."""
    rows: int
    """Number of rows."""
    probes: torch.Tensor | None
    """The probes of its group on the device (`Group.write`)."""


@dataclass
class _Run:
    """Consecutive rows that are sent alike, to places with a constant stride."""

    group: Group
    probes: torch.Tensor | None
    alike: tuple[Any, ...]
    """Key; rows with equal keys are sent alike."""
    row: int
    place: int
    count: int = 1
    stride: int = 0

    def extend(self, alike: tuple[Any, ...], row: int, place: int) -> bool:
        """Add `row` at `place`. False: it does not continue the run."""
        stride = self.stride or max(place - self.place, 0)
        if (alike, row, place) != (self.alike, self.row + self.count, self.place + self.count * stride):
            return False
        self.count, self.stride = self.count + 1, stride
        return True


class CaptureRing:
    """The device ring, the host ring, and the thread that copies out of it.

    Args:
        size: bytes of each ring (`capture_ring_bytes`).
        when_full: "block" or "fail" (`capture_when_full`).
        results: memory of the results; None: memory of which nothing is kept.

    Attributes:
        memory: [elements], the device ring, which kernels write to.
        admission: the scheduler's side.
        bytes_sent: bytes copied to the host, or being copied.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        when_full: str,
        results: Memory | None = None,
    ) -> None:
        self.memory = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
        self.allocator = RingAllocator(len(self.memory))
        self.admission = RingAdmission(self.allocator, size, dtype.itemsize, when_full)
        self.results = results or ResultMemory(0)
        self.bytes_sent = 0
        self._copier = RingCopier(self.allocator, self.results)
        self._layout: _StepLayout | None = None
        self._records = np.zeros((2, 0), dtype=np.int64)  # of the last `lay_out`
        self._lock = threading.Lock()
        self._host: torch.Tensor | None = None
        self._stream = torch.cuda.Stream(self.memory.device) if self.memory.is_cuda else None

    def open(self) -> None:
        """Allocate the host ring and start the copier; a second call does nothing. Thread-safe."""
        with self._lock:
            if not self._copier.started:
                self._host = torch.empty(len(self.memory), dtype=self.memory.dtype, pin_memory=self.memory.is_cuda)
                self._copier.start(self._host)

    def close(self) -> None:
        """Copy everything sent to the results, and end the copier. Later notifications are dropped."""
        if self._copier.started:
            self._copier.close()
            self.results.close()
        self._copier.on_freed = None

    def notify_when_freed(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the copier's thread after each span that is freed."""
        self._copier.on_freed = callback

    def after(self, function: Callable[[], None]) -> None:
        """Call `function` on the copier's thread after all that was sent so far was copied; at once before `open`."""
        self._copier.after(function)

    def wait(self) -> None:
        """Wait until all that was sent so far was copied, and functions given to `after` have returned."""
        self._copier.wait()

    @property
    def idle(self) -> bool:
        """Whether the copier has nothing queued."""
        return self._copier.idle

    # -- a step ------------------------------------------------------------------------

    def lay_out(self, parts: Sequence[tuple[CapturedRows | None, int, int]]) -> np.ndarray:
        """Place the records of a step's token rows.

        Args:
            parts: (captures or None, first position, number of positions) of each request of the step, in batch order.

        Returns:
            [2, tokens] int64: start and stop of each row's record in the ring; equal for rows without captures.
        """
        if (alike := _all_alike(parts)) is not None:
            return self._lay_out_alike(parts, alike)
        if (sizes := _sizes_of_single(parts)) is not None:
            return self._lay_out_single(parts, sizes)
        sizes = np.concatenate([
            np.zeros(count, dtype=np.int64) if captures is None else captures.record_sizes(first, count)
            for captures, first, count in parts
        ])  # fmt: skip
        stops = np.cumsum(sizes)
        # `ends` are the stops of unpacked records. Packed slices take `sent` elements before the records, which come last.
        ends, row, sent, slices, packed = [0, *stops.tolist()], 0, 0, [], []
        for captures, first, count in parts:
            size, rows = ends[row + count] - ends[row], slice(row, row + count)
            if captures is not None and size:
                if captures.packs(first):
                    packed.append((len(slices), rows, size))
                    size = captures.layout.packed_size(first, sizes[rows])
                elif sent != ends[row]:  # after a packed slice
                    stops[rows] += sent - ends[row]
                slices.append(RequestSlice(captures, first, sizes[rows], sent, size))
                sent += size
            row += count
        end = sent
        for number, rows, size in packed:
            slices[number] = slices[number]._replace(records_at=end)
            stops[rows] += end - ends[rows.start]
            end += size
        start = self.allocator.find(end) if slices else 0
        self._layout = _StepLayout(start, end, sent, slices) if slices else None
        stops += start
        self._records = np.stack((stops - sizes, stops))
        return self._records

    def _lay_out_alike(self, parts: Sequence[tuple[CapturedRows | None, int, int]], kind: RecordKind) -> np.ndarray:
        """`lay_out` of one position each, with records of one kind: packed results, then records."""
        count, size = len(parts), kind.record_size
        sent = count * kind.sent_size
        records_at = count * kind.packed_size
        total = records_at + count * size
        start = self.allocator.find(total)
        captures: list[CapturedRows] = [part[0] for part in parts]  # pyright: ignore[reportAssignmentType]
        self._layout = _StepLayout(start, total, sent, AlikeStep(captures, [part[1] for part in parts], kind))
        starts = start + records_at + size * np.arange(count)
        self._records = np.stack((starts, starts + size))
        return self._records

    def _lay_out_single(self, parts: Sequence[tuple[CapturedRows | None, int, int]], sizes: list[int]) -> np.ndarray:
        """`lay_out` of a position each, with records that are not packed."""
        each = np.array(sizes, dtype=np.int64)
        stops = np.cumsum(each)
        end = stops.item(-1)
        slices = [
            RequestSlice(captures, first, each[i : i + 1], stop - size, size)
            for i, ((captures, first, _), size, stop) in enumerate(zip(parts, sizes, stops.tolist(), strict=True))
            if captures is not None and size
        ]
        start = self.allocator.find(end) if slices else 0
        self._layout = _StepLayout(start, end, end, slices) if slices else None
        stops += start
        self._records = np.stack((stops - each, stops))
        return self._records

    def put(self, site: int, states: torch.Tensor, parts: Sequence[StatesOf]) -> None:
        """Write states that no kernel writes into the records of the last `lay_out`.

        States that are sent alike, to places with a constant stride, are one copy. A decode step in which each request captures
        the same is one copy.

        Args:
            states: [rows, width] on the ring's device.
        """
        runs: list[_Run] = []
        for captures, row, token, rows, probes in parts:
            group, column = captures.layout.by_site[site]
            alike = group.width, group.converted, None if probes is None else probes.data_ptr()
            for i, (start, stop) in enumerate(self._records[:, token : token + rows].T.tolist()):
                place = start + group.offset_of(column)
                if place < stop and not (runs and runs[-1].extend(alike, row + i, place)):
                    runs.append(_Run(group, probes, alike, row + i, place))
        for run in runs:
            run.group.write(states[run.row : run.row + run.count], run.probes, self.memory, run.place, run.stride)

    def send(self) -> None:
        """Copy the span of the last `lay_out` to the host, after the launched pass that writes it.

        The span is allocated here. A pass that fails before, or a copy that fails, leaves the ring as it was.
        """
        layout, self._layout = self._layout, None
        if layout is None:
            return
        start, size, num_sent, slices = layout
        assert self._host is not None, "open() comes before the first request that captures"
        parts = layout.parts(SPAN_PART_BYTES // self.memory.itemsize)
        spans: list[SentSpan] = []
        if self._stream is None:
            _pack(self.memory[start : start + size], slices)
            self._host[start : start + num_sent].copy_(self.memory[start : start + num_sent])
            spans += (SentSpan(part.start, part.slices, None) for part in parts)
        else:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    _pack(self.memory[start : start + size], slices)
                    spans += map(self._launch, parts)
            except NO_MEMORY:
                current.wait_stream(self._stream)  # the next pass writes to the span after the launched copies
                raise
        for part in parts:
            self.allocator.allocate(part.start, part.size)
        self.bytes_sent += num_sent * self.memory.itemsize
        if isinstance(slices, AlikeStep):
            for captures, first in zip(slices.rows, slices.firsts, strict=True):
                captures.next_position = first + 1
        else:
            for captures, first, sizes, *_ in slices:
                captures.next_position = first + len(sizes)
        for span in spans:
            self._copier.send(span)

    def _launch(self, part: _StepLayout) -> SentSpan:
        """Launch the copy of a part to the host, on the current stream."""
        assert self._host is not None
        began, own = None, slice(part.start, part.start + part.num_sent)
        if TIMES.on:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        self._host[own].copy_(self.memory[own], non_blocking=True)
        copied = torch.cuda.Event(enable_timing=TIMES.on, blocking=True)
        copied.record()
        return SentSpan(part.start, part.slices, copied, began)

    def forget(self) -> None:
        """Discard the last `lay_out`: its pass failed."""
        self._layout = None


def _all_alike(parts: Sequence[tuple[CapturedRows | None, int, int]]) -> RecordKind | None:
    """The kind of the records of one position each. None: they differ, or a position is not captured (again)."""
    found = None
    for captures, first, count in parts:
        kind = captures.kind(first) if captures is not None and count == 1 else None
        if kind is None or (found is not None and kind is not found and kind != found):
            return None
        found = kind
    return found


def _sizes_of_single(parts: Sequence[tuple[CapturedRows | None, int, int]]) -> list[int] | None:
    """Elements of each request's record, where all have one position and no record is packed; else None."""
    sizes = []
    for captures, first, count in parts:
        if count != 1 or (captures is not None and captures.packs(first)):
            return None
        sizes.append(0 if captures is None else captures.reserved_size(first, 1))
    return sizes


def _pack(span: torch.Tensor, slices: Sequence[RequestSlice] | AlikeStep) -> None:
    """Pack the records that stay on the device: rows of all requests at once, so that weights are read once.

    A reduction, which may be code of callers, may raise. Then each request's records are packed apart, and its result raises.

    Args:
        span: [elements] on the device.
    """
    parts = list(_packers(span, slices, together=True))
    try:
        read_all([entry for _, pack in parts for entry in pack()])
    except BaseException as error:
        if is_out_of_memory(error):
            raise
        for captures, pack in _packers(span, slices, together=False):
            try:
                read_all(pack())
            except BaseException as own:
                if is_out_of_memory(own):
                    raise
                captures.fail(own)


def _packers(
    span: torch.Tensor, slices: Sequence[RequestSlice] | AlikeStep, together: bool
) -> Iterator[tuple[CapturedRows, Callable[[], list[Pending]]]]:
    """Functions that pack the records of a request, or of all alike requests `together`, and return the pending writes."""
    if isinstance(slices, AlikeStep):
        count, kind = len(slices.rows), slices.kind
        if not kind.packed_size:
            return
        packed, records = (
            part.view(count, -1) for part in span.split([count * kind.packed_size, count * kind.record_size])
        )
        for i in range(0, count, count if together else 1):
            own = slice(i, count if together else i + 1)
            yield slices.rows[i], partial(slices.rows[i].layout.pack_rows, records[own], packed[own])
        return
    for captures, first, sizes, offset, size, records_at in slices:
        if records_at is not None:
            records = span[records_at : records_at + int(sizes.sum())]
            yield captures, partial(captures.pack, records, span[offset : offset + size], first, sizes)
