"""What requests capture, on its way from the device to their results.

    schedule      take(request, tokens)    room is kept for the blocks of the step's rows; who finds none waits for a later step
    before a pass lay_out(entries)         each token row's block: the step's lie behind each other, in one piece
    the pass                               kernels write the states into the ring; behind it, `put` those of the logits
    behind it     send()                   the piece is copied to the host on a stream of its own
    a thread                               copies blocks from there into each request's result, and frees the piece

Where the mean over a prompt is wanted, the blocks of its rows lie at the end of the piece and stay on the device: what they are
packed to, behind the pass, leaves in their place.

The ring on the host has the size of the one on the device, and a piece has the same place in both: it is free again when its
blocks have been copied out. The engine's thread waits for none of this, and neither does a pass that was launched.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.request import Request
from .activations import CaptureError
from .captures import Captures
from .group import INTEGERS, WORDS, Group
from .result_memory import ResultMemory

logger = logging.getLogger(__name__)

COPIERS = 8
"""Threads that copy out of the ring on the host."""
MAX_WORDS = 1 << 15
"""Of one copy: torch has the threads of its passes come together for more."""
PROMPTS_SHARE = 4
"""Prompts take 1 / PROMPTS_SHARE of the ring in one step: one part fills, one leaves the device, one is copied out."""
NO_MEMORY = (MemoryError, OSError, RuntimeError)
"""What taking memory raises, and torch's copies: it costs the captures that it happened to, and no others."""


class Pieces:
    """Consecutive elements of a ring, given back in the order in which they were taken. Any thread may ask.

    A piece does not wrap around: what is left at the end, where it does not fit, stays unused.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[tuple[int, int]] = deque()  # (start, stop), oldest first
        self._lock = threading.Lock()

    @property
    def in_use(self) -> bool:
        """Whether any piece is taken."""
        return bool(self._taken)

    @property
    def room(self) -> int:
        """Elements of the largest piece that can be taken now. It only grows until one is."""
        return max(stop - start for start, stop in self._free())

    def place(self, count: int) -> int:
        """Where a piece of so many elements would be. Raises ValueError where there is no room."""
        for start, stop in self._free():
            if stop - start >= count:
                return start
        raise ValueError(f"no room for {count} elements in one piece of a ring of {self.size}: {list(self._taken)}")

    def take(self, start: int, count: int) -> None:
        """Take the piece of `place`."""
        with self._lock:
            self._taken.append((start, start + count))

    def give_back(self) -> None:
        """Give back the oldest piece."""
        with self._lock:
            self._taken.popleft()

    def check_integrity(self) -> None:
        """Pieces lie within the ring and behind each other. Raises AssertionError otherwise."""
        with self._lock:
            taken = list(self._taken)
        assert all(0 <= start < stop <= self.size for start, stop in taken), taken
        ordered = sorted(taken)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered)), f"pieces overlap: {taken}"
        oldest = ordered.index(taken[0]) if taken else 0
        assert taken == ordered[oldest:] + ordered[:oldest], f"pieces out of order: {taken}"

    def _free(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the stretches that are free, behind the newest piece first."""
        with self._lock:
            if not self._taken:
                return ((0, self.size),)
            tail, head = self._taken[0][0], self._taken[-1][1]
            wrapped = self._taken[-1][0] < tail
        return ((head, tail),) if wrapped else ((head, self.size), (0, tail))


class _Share(NamedTuple):
    """A request's part of a piece: the blocks of the positions from `first` on, or what they are packed to."""

    captures: Captures
    first: int
    sizes: np.ndarray
    offset: int
    """From the piece's start."""
    size: int
    """Elements that leave."""
    blocks: int | None = None
    """From the piece's start, where they are packed; None where they leave as they are."""

    def cut(self, parts: int) -> list[_Share]:
        """So many shares with as many positions each, or fewer. What is packed stays whole."""
        if parts <= 1 or self.blocks is not None or len(self.sizes) == 1:
            return [self]
        found, offset, count = [], self.offset, -(-len(self.sizes) // parts)
        for i in range(0, len(self.sizes), count):
            sizes = self.sizes[i : i + count]
            found.append(_Share(self.captures, self.first + i, sizes, offset, int(sizes.sum())))
            offset += found[-1].size
        return found


_Part = tuple[_Share, torch.Tensor | None]
"""What one thread copies; and [words] of the result, where it is kept as it is."""


class _LaidOut(NamedTuple):
    """A piece that a pass is to write to."""

    start: int
    size: int
    leaving: int
    """Elements of it that leave the device."""
    shares: list[_Share]


class StatesOf(NamedTuple):
    """Which states of consecutive positions are a request's."""

    captures: Captures
    row: int
    """The first of them."""
    token: int
    """The token row that it is of."""
    rows: int
    probes: torch.Tensor | None
    """Those of its group (`Group.write`), on the device."""


@dataclass
class _Run:
    """States of consecutive rows that leave alike, with equal distances from place to place."""

    group: Group
    probes: torch.Tensor | None
    alike: tuple[Any, ...]
    row: int
    place: int
    count: int = 1
    stride: int = 0

    def take(self, alike: tuple[Any, ...], row: int, place: int) -> bool:
        """Add `row` at `place`, if it is the next one."""
        stride = self.stride or max(place - self.place, 0)
        if (alike, row, place) != (self.alike, self.row + self.count, self.place + self.count * stride):
            return False
        self.count, self.stride = self.count + 1, stride
        return True


class _Sent(NamedTuple):
    """A piece on its way."""

    start: int
    shares: list[_Share]
    copied: torch.cuda.Event | None


class CaptureRing:
    """The ring on the device, the one on the host, and the thread that empties it.

    Args:
        size: bytes of each (`capture_ring_bytes`).
        dtype: of the states.
        when_full: "block" or "fail" (`capture_when_full`).
        keep: bytes of former results' memory that is kept for the next ones (`capture_kept_bytes`).

    Attributes:
        memory: [elements] on the device, what kernels write to.
        results: what results' memory is taken from.
        pieces: what is taken of it.
        on_room: called on the ring's thread when a piece has been given back.
        refused: whether a request found no room since `begin`.
        bytes_sent: that have left the device, or are leaving it.
    """

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device | str, when_full: str, keep: int = 0
    ) -> None:
        self.memory = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
        self.pieces = Pieces(len(self.memory))
        self.results = ResultMemory(keep)
        self.on_room: Callable[[], None] = lambda: None
        self.refused = False
        self.bytes_sent = 0
        self._size, self._when_full = size, when_full
        self._room = self._of_prompts = 0
        self._laid_out: _LaidOut | None = None
        self._blocks = np.zeros((2, 0), dtype=np.int64)  # of `lay_out`
        self._queue: queue.SimpleQueue[_Sent | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._host: torch.Tensor | None = None
        self._stream = torch.cuda.Stream(self.memory.device) if self.memory.is_cuda else None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Make the ring on the host, and start the thread; a second call does nothing. Called on any thread."""
        with self._lock:
            if self._thread is None:
                self._host = torch.empty(len(self.memory), dtype=self.memory.dtype, pin_memory=self.memory.is_cuda)
                self._copiers = ThreadPoolExecutor(COPIERS, "pymllm-interp-captures")
                self._thread = threading.Thread(target=self._drain, name="pymllm-interp-captures", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Empty the ring and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._copiers.shutdown()
            self._thread = None
            self.results.close()

    def check(self, wanted: Sequence[tuple[Captures, int]], what: str) -> None:
        """Raise ValueError where the ring can never hold what a step captures.

        Args:
            wanted: what takes part in the step together: captures, and tokens from the first on that one step computes.
            what: names them, for the message.
        """
        sizes = [max(captures.room_of(0, n), captures.largest_room) for captures, n in wanted]
        needed = sum(sizes) * self.memory.dtype.itemsize
        if needed > self._size:
            raise ValueError(
                f"the captures of {what} take {needed} bytes in one step, and the ring that they leave the device through has "
                f"{self._size} (capture_ring_bytes): raise it, or capture fewer sites"
            )

    # -- who takes part in a step ------------------------------------------------------

    def begin(self) -> None:
        """A step's requests are picked, from the start."""
        self._room, self.refused = self.pieces.room, False
        self._of_prompts = 0

    def take(self, wanted: Sequence[tuple[Request, int]], whole: bool = True) -> int:
        """Keep room for the next tokens of requests that take part in the step together.

        First come, first served: behind one that finds no room, no other is given any. With `capture_when_full` "fail" nobody
        waits: who finds no room loses what it captures.

        Args:
            wanted: requests, and tokens of each.
            whole: all of them or none; else, of a single request, as many as there is room for in the share of the ring that
                a step's prompts have, so that the rest is emptied meanwhile. One at least, where none has any of that share.

        Returns:
            the tokens that may be computed, of the only request or the first one; 0 for none.
        """
        if not whole:
            return self._take_part(*wanted[0])
        needed = sum([_room(request, tokens) for request, tokens in wanted])
        if needed <= self._room:
            self._room -= needed
            return wanted[0][1]
        return self._refuse(wanted)

    def _take_part(self, request: Request, tokens: int) -> int:
        captures = _captures(request)
        rooms = 0 if captures is None else captures.rooms(request.num_computed_tokens, tokens)
        ends = np.cumsum(np.broadcast_to(rooms, tokens))
        first, share = int(ends[0]), self.pieces.size // PROMPTS_SHARE
        room = min(self._room, max(share - self._of_prompts, 0) if self._of_prompts else max(share, first))
        count = int(np.searchsorted(ends, room, side="right"))
        if count:
            self._room -= int(ends[count - 1])
            self._of_prompts += int(ends[count - 1])
            return count
        if first > self._room:
            return self._refuse([(request, tokens)])
        self._of_prompts = self.pieces.size  # first come, first served; its turn is in the next step
        return 0

    def _refuse(self, wanted: Sequence[tuple[Request, int]]) -> int:
        if self._when_full == "fail":
            for request, _ in wanted:
                self._lose(request)
            return wanted[0][1]
        self.refused, self._room = True, 0
        return 0

    def fits(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """Whether `take` would find room for so many tokens of each."""
        return self._when_full == "fail" or sum(map(_room, requests, tokens)) <= self._room

    def _lose(self, request: Request) -> None:
        captures: Captures | None = request.declared and request.declared.captures
        if captures is not None and captures.error is None:
            captures.error = CaptureError(
                f"request {request.request_id} lost what it captured: a step found no room in the ring that states leave the "
                f"device through, which has {self._size} bytes (capture_ring_bytes: raise it, or set capture_when_full='block')"
            )
            request.warnings.append(str(captures.error))

    # -- a step ------------------------------------------------------------------------

    def lay_out(self, parts: Sequence[tuple[Captures | None, int, int]]) -> np.ndarray:
        """Place the blocks of a step's token rows.

        Returns:
            [2, tokens] int64: each row's first element of the ring, and the one after its last; equal where nothing is captured.
        """
        rows = np.concatenate([_sizes(*part) for part in parts])
        stops = np.cumsum(rows)
        ends, row, leaving, shares, staying = [0, *stops.tolist()], 0, 0, [], []
        for captures, first, count in parts:
            size, share_rows = ends[row + count] - ends[row], slice(row, row + count)
            if size and captures is not None:
                sizes = rows[share_rows]
                if captures.packs(first):
                    staying.append((len(shares), share_rows, size))
                    size = captures.packed_size(first, sizes)
                elif leaving != ends[row]:  # behind one that is packed
                    stops[share_rows] += leaving - ends[row]
                shares.append(_Share(captures, first, sizes, leaving, size))
                leaving += size
            row += count
        end = leaving
        for number, share_rows, size in staying:
            shares[number] = shares[number]._replace(blocks=end)
            stops[share_rows] += end - ends[share_rows.start]
            end += size
        start = self.pieces.place(end) if shares else 0
        self._laid_out = _LaidOut(start, end, leaving, shares) if shares else None
        stops += start
        self._blocks = np.stack((stops - rows, stops))
        return self._blocks

    def put(self, site: int, states: torch.Tensor, parts: Sequence[StatesOf]) -> None:
        """Write states that no kernel writes into the blocks that were laid out last.

        Those that leave alike, and have equal distances from place to place, are one copy: all those of a decode step in which
        each request captures the same.

        Args:
            states: [rows, width], on the ring's device.
        """
        runs: list[_Run] = []
        for captures, row, token, rows, probes in parts:
            group, column = captures.by_site[site]
            alike = group.width, group.converted, None if probes is None else probes.data_ptr()
            for i, (start, stop) in enumerate(self._blocks[:, token : token + rows].T.tolist()):
                place = start + group.offset_of(column)
                if place < stop and not (runs and runs[-1].take(alike, row + i, place)):
                    runs.append(_Run(group, probes, alike, row + i, place))
        for run in runs:
            run.group.write(states[run.row : run.row + run.count], run.probes, self.memory, run.place, run.stride)

    def send(self) -> None:
        """The pass whose rows were laid out last has been launched: let its piece leave behind it.

        A pass that fails before is not sent, and leaves the ring as it was; so does a piece that cannot be sent.
        """
        laid_out, self._laid_out = self._laid_out, None
        if laid_out is None:
            return
        start, size, leaving, shares = laid_out
        assert self._host is not None, "open() comes before the first request that captures"
        device, host, copied = self.memory[start : start + size], self._host[start : start + leaving], None
        if self._stream is None:
            _pack(device, shares)
            host.copy_(device[:leaving])
        else:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    _pack(device, shares)
                    host.copy_(device[:leaving], non_blocking=True)
                    copied = torch.cuda.Event(blocking=True)
                    copied.record()
            except NO_MEMORY:
                current.wait_stream(self._stream)  # what it has begun there comes before what the next pass writes
                raise
        self.pieces.take(start, size)
        self.bytes_sent += leaving * self.memory.itemsize
        for captures, first, sizes, *_ in shares:
            captures.next = first + len(sizes)
        self._queue.put(_Sent(start, shares, copied))

    def forget(self) -> None:
        """The pass whose rows were laid out last is not sent."""
        self._laid_out = None

    # -- the thread --------------------------------------------------------------------

    def after(self, function: Callable[[], None]) -> None:
        """Call `function` on the ring's thread, behind all that was sent; at once, before `open`."""
        if self._thread is None:
            function()
        else:
            self._queue.put(function)

    def wait(self) -> None:
        """Wait until all that was sent has been copied out, and what came behind it has been called."""
        done = threading.Event()
        self.after(done.set)
        done.wait()

    def _drain(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Sent):
                try:
                    self._copy_out(item)
                except NO_MEMORY as error:  # of CUDA; those behind it must still be served
                    for share in item.shares:
                        _lose(share.captures, error)
                self.pieces.give_back()
                self.on_room()
            else:
                item()

    def _copy_out(self, item: _Sent) -> None:
        assert self._host is not None
        if item.copied is not None:
            item.copied.synchronize()
        parts = [part for share in item.shares for part in self._parts(share)]
        piece = self._host[item.start :]
        list(self._copiers.map(lambda dealt: _copy(piece, dealt), _dealt(parts)))
        for share in item.shares:
            share.captures.copied(share.first + len(share.sizes))

    def _parts(self, share: _Share) -> list[_Part]:
        """A share, cut where several threads may copy it."""
        captures = share.captures
        try:
            captures.prepare(self.results)
            return [(part, self._rows_of(part)) for part in share.cut(1 if captures.in_order else COPIERS)]
        except NO_MEMORY as error:
            _lose(captures, error)
            return [(share, None)]

    def _rows_of(self, part: _Share) -> torch.Tensor | None:
        rows = part.captures.rows_of(part.first, len(part.sizes)) if part.blocks is None else None
        # Positions that were computed again have no block.
        return rows if rows is not None and rows.nbytes == part.size * self.memory.itemsize else None


def _dealt(parts: list[_Part]) -> list[list[_Part]]:
    """For each copier parts that lie behind each other, about equally much."""
    ends = np.cumsum([share.size for share, _ in parts])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, COPIERS) / COPIERS, side="right").tolist()
    return [dealt for begin, end in pairwise((0, *cuts, len(parts))) if (dealt := parts[begin:end])]


def _copy(piece: torch.Tensor, parts: list[_Part]) -> None:
    """Copy parts out of a piece on the host.

    What stays as it is is one call, which does without Python's lock: the engine's thread has it most of the time.
    """
    for as_it_is, run in groupby(parts, key=lambda part: part[1] is not None):
        if as_it_is:
            _copy_rows(piece, list(run))
            continue
        integers = piece.view(INTEGERS[piece.dtype.itemsize]).numpy()
        for (captures, first, sizes, offset, size, blocks), _ in run:
            try:
                if captures.error is None:
                    take = captures.copy if blocks is None else captures.unpack
                    take(integers[offset : offset + size], first, sizes)
            except NO_MEMORY as error:
                _lose(captures, error)


def _copy_rows(piece: torch.Tensor, parts: list[_Part]) -> None:
    """Copy blocks that lie behind each other to their rows."""
    first, last = parts[0][0], parts[-1][0]
    rows = [row for _, row in parts if row is not None]
    try:
        if max(map(len, rows)) > MAX_WORDS:
            rows = [some for row in rows for some in row.split(MAX_WORDS)]
        blocks = piece[first.offset : last.offset + last.size].view(WORDS)
        torch.split_with_sizes_copy(blocks, [len(row) for row in rows], out=rows)
    except NO_MEMORY as error:
        for share, _ in parts:
            _lose(share.captures, error)


def _lose(captures: Captures, error: Exception) -> None:
    logger.warning("captured states are lost: %r", error)
    captures.error = CaptureError(f"captured states are lost: {error!r}")


def _pack(piece: torch.Tensor, shares: Sequence[_Share]) -> None:
    """Pack the blocks of a piece [elements] that stay on the device."""
    for captures, first, sizes, offset, size, blocks in shares:
        if blocks is not None:
            stop = blocks + int(sizes.sum())
            captures.pack(piece[blocks:stop], piece[offset : offset + size], first, sizes)


def _captures(request: Request) -> Captures | None:
    """What leaves by the ring of a request. A pass with gradients goes by the host."""
    return None if request.declared is None or request.alone else request.declared.captures


def _room(request: Request, count: int) -> int:
    """Elements of the ring that a request's next `count` positions take."""
    captures = _captures(request)
    return 0 if captures is None else captures.room_of(request.num_computed_tokens, count)


def _sizes(captures: Captures | None, first: int, count: int) -> np.ndarray:
    """[count] int64: elements of the blocks of a request's positions `first` and on."""
    return np.zeros(count, dtype=np.int64) if captures is None else captures.block_sizes(first, count)
