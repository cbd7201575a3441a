"""`Group`: sites of one request with equal captures, and the values that are sent and kept of their states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...kernels.edit_codes import ALIGNED
from ..positions import Window, progressions
from ..site import Site
from .reductions.pools import Pool
from .reductions.reading import Pending, StateReading
from .spec import Capture


class SentRecords(Protocol):
    """Records sent to the host, and copies of them that are made together (`egress.copier.BlockCopies`)."""

    def values(self, offset: int, count: int) -> np.ndarray:
        """[count] of the elements from `offset` on, as integers of their width."""
        ...

    def add(self, to: int, offset: int, count: int, size: int, stride: int) -> None:
        """Copy `count` rows of `size` bytes to adjacent places.

        Args:
            to: address of the first place.
            offset: first element of the first row.
            stride: elements from one row to the next.
        """
        ...


class Group:
    """Sites of a layout that are captured alike: same positions, dtype and reduction. It is not changed after `layout_of`.

    The values sent from the device for a state are

    - with a `StateReading`: its result;
    - with the `probes` of a reduction: the state's dot products with them;
    - with a reduction that `sums`: the float32 fold of a pass's prompt positions, and states of generated positions;
    - else the state, if it is `needed`; in `spec.dtype` if that is narrower than the model's, and the reduction `narrows`.

    Args:
        longest: upper bound of the request's positions.
        reading: device computation over the states; None: the stored values are sent.

    Attributes:
        sites: numbers of the sites (layers/edits), a column each.
        names: the sites, by column.
        sources: (group, column) that stores each column's state; None: this group itself.
        captured: [longest] bool, by position: whether it is captured.
        ordinals: [longest] int64, by position: its index among the positions that the result is made of, or -1.
        positions: [rows] int64, the positions that the result is made of.
        of_prompt: number of these among the prompt.
        index: index among the groups of the layout.
        offset: first element in a record.
        probes: [n, width] float32, directions of dot products that the device computes; None for none.
        converted: narrower dtype that the device converts states to, or None.
        width: values sent for a state.
        kept_width: values kept for a state, padding included.
        result_dtype: dtype of the result, if it consists of states.
        stored_dtype: dtype that kernels store.
        in_order: positions must come in order, on one thread.
        states: whether states are kept, not values that the device computed.
        streams: whether pieces of a stream have its rows. The one row of a pool comes with the result.
    """

    def __init__(
        self,
        spec: Capture,
        windows: tuple[Window, ...],
        width: int,
        dtype: torch.dtype,
        prompt_len: int,
        longest: int,
        reading: StateReading | None = None,
    ) -> None:
        self.spec, self.reading = spec, reading
        self.sites: list[int] = []
        self.names: list[Site] = []
        self.sources: list[tuple[Group, int] | None] = []
        self.index = self.offset = 0
        self.captured = np.zeros(longest, dtype=np.bool_)
        for window in windows:
            self.captured[window.start : window.stop : window.step] = True
        reduction = spec.reduction
        in_result = reduction.needed(self.captured, prompt_len)
        self._rows = np.cumsum(in_result)
        self.positions = np.flatnonzero(in_result)
        self._captured_rows = self._rows if np.array_equal(in_result, self.captured) else np.cumsum(self.captured)
        self.ordinals = np.where(in_result, self._rows - 1, -1)
        self.of_prompt = self.rows_before(prompt_len)
        self.probes: torch.Tensor | None = None
        self.converted: torch.dtype | None = None
        asked = spec.dtype if isinstance(spec.dtype, torch.dtype) else None
        self.result_dtype = asked or (dtype if reduction.of_states else torch.float32)
        if reading is None:
            self.probes = reduction.probes
            self.converted = (
                self.result_dtype if reduction.narrows and self.result_dtype.itemsize < dtype.itemsize else None
            )
        self.width = self._state_width = width if self.probes is None else len(self.probes)
        self.sent_dtype = self.stored_dtype = torch.float32 if self.probes is not None else self.converted or dtype
        self._state_size = size_in(self.width, self.stored_dtype, dtype)
        if reading is not None:
            self.width, self.sent_dtype = reading.width, reading.dtype
        self._site_size = size_in(self.width, self.sent_dtype, dtype)  # elements that are sent for a state
        self.kept_width = self.width
        if reading is not None and reading.reduces:
            self._site_size = aligned(self._site_size)
            self.kept_width = self._site_size * dtype.itemsize // self.sent_dtype.itemsize
        self._sent_integer = np.dtype(f"i{self.sent_dtype.itemsize}")
        self.in_order = reduction.pools
        self._sum_size = 0  # elements of a sum
        if reduction.sums and self.of_prompt:
            self._sum_size = self.width * torch.float32.itemsize // dtype.itemsize
        self.states = self.probes is None and (reading is None or not reading.reduces)
        self.pool = reduction if isinstance(reduction, Pool) else None
        self.streams = spec.stream and self.pool is None
        self.kept_dtype = self.result_dtype if reduction.of_states else self.sent_dtype
        if self.pool is not None:
            self.kept_dtype = self.sent_dtype if self.pool.narrows else torch.float64
        # The values sent for a record are a row of the result.
        dense = self._site_size * dtype.itemsize == self.kept_width * self.sent_dtype.itemsize
        self.unchanged = self.kept_dtype is self.sent_dtype and self.pool is None
        self.copied = self.unchanged and dense

    @property
    def num_rows(self) -> int:
        """Rows that are kept: one for each position; for a pool the newest, and the fold of all earlier ones."""
        return len(self.positions) if self.pool is None else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all columns."""
        return len(self.sites) * self.kept_width * self.kept_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows take on the host."""
        return self.num_rows * self.row_bytes

    def rows_before(self, position: int) -> int:
        """Rows that the result has of the positions before `position`."""
        return _before(self._rows, position)

    def captured_before(self, position: int) -> int:
        """Positions before `position` that are captured."""
        return _before(self._captured_rows, position)

    @property
    def record_size(self) -> int:
        """Elements of the group in a record, aligned."""
        return aligned(len(self.sites) * self._state_size)

    @property
    def packed_size(self) -> int:
        """Elements that are sent for a record which is packed, aligned."""
        return aligned(len(self.sites) * self._site_size)

    @property
    def sent_size(self) -> int:
        """Elements that are sent for a record, without padding."""
        return len(self.sites) * self._site_size

    @property
    def reads_weights(self) -> bool:
        """Whether the values sent for a state depend on weights."""
        return self.reading is not None or self.probes is not None

    @property
    def stores_states(self) -> bool:
        """Whether a record holds the group's states as the model has them."""
        return self.probes is None and self.converted is None

    def add(self, number: int, site: Site) -> int:
        """The column of a site; a new site gets a new column."""
        if number not in self.sites:
            self.sites.append(number)
            self.names.append(site)
            self.sources.append(None)
        return self.sites.index(number)

    @property
    def sums_size(self) -> int:
        """Elements of the sums sent for a pass with prompt positions; 0 without sums."""
        return aligned(len(self.sites) * self._sum_size)

    @property
    def sent_whole(self) -> np.ndarray:
        """[longest] bool, by position: whether its state is sent in a pass that sums prompt positions."""
        return self.ordinals >= (self.of_prompt if self._sum_size else 0)

    def offset_of(self, column: int) -> int:
        """First element of a site in a record."""
        return self.offset + column * self._state_size

    def stored(self, states: torch.Tensor, probes: torch.Tensor | None) -> torch.Tensor:
        """Stored values [n, width] of states [n, state width]. `probes` are the group's, on the device of the states."""
        if probes is not None:
            states = torch.stack([(states.float() * probe).sum(-1) for probe in probes], -1)
        return states.to(self.stored_dtype)

    def write(
        self, states: torch.Tensor, probes: torch.Tensor | None, memory: torch.Tensor, place: int, stride: int
    ) -> None:
        """Write states into the ring, as kernels do.

        Args:
            states: [n, width].
            probes: probes of the group, on the device.
            memory: [elements], the ring.
            place: first element of the first state.
            stride: elements from one state to the next.
        """
        target = memory.as_strided((len(states), self._state_size), (stride, 1), place).view(self.stored_dtype)
        target[:, : self._state_width].copy_(self.stored(states, probes))

    def pack(
        self, runs: Sequence[torch.Tensor], into: torch.Tensor, first: int, sizes: np.ndarray, pending: list[Pending]
    ) -> int:
        """Write the group's values to send to the front of `into`; see `CaptureLayout.pack`.

        Args:
            runs: [n, elements] each: the records of positions `first` and on that have a size, in order.
            pending: gets the later writes of `read_all`.

        Returns:
            Elements written.
        """
        summed, whole, _ = self.summed_and_whole(first, sizes)
        if self._sum_size and self.pool is not None:
            sums = into[: self.sums_size].view(torch.float32)[: len(self.sites) * self.width].fill_(self.pool.initial)
            for records in selected(runs, summed):
                self.pool.fold_rows(sums, self._states(records))
        start = self.sums_size
        for records in selected(runs, whole):
            stop = start + len(records) * self.packed_size
            self.pack_whole(records, into[start:stop].view(len(records), -1), pending)
            start = stop
        return start

    def pack_whole(self, records: torch.Tensor, target: torch.Tensor, pending: list[Pending]) -> None:
        """Write the values to send for whole records.

        Args:
            records: [n, elements].
            target: [n, at least `packed_size`].
            pending: gets the later writes of `read_all`.
        """
        if self.reading is None:
            target[:, : self.packed_size].copy_(records[:, self.offset : self.offset + self.record_size])
            return
        sites = len(self.sites)
        values = target[:, : sites * self._site_size].view(self.sent_dtype).unflatten(1, (sites, -1))
        pending.append((self.reading, tuple(self.names), self.site_states(records), values[..., : self.width]))

    def keep_records(
        self,
        runs: Sequence[torch.Tensor],
        first: int,
        sizes: np.ndarray,
        rows: torch.Tensor,
        pending: list[Pending],
    ) -> None:
        """Copy the states of records to rows that stay on the device; see `pack`.

        Args:
            rows: [rows, sites, width] on the same device.
        """
        _, whole, ordinal = self.summed_and_whole(first, sizes)
        for records in selected(runs, whole):
            target = rows[ordinal : ordinal + len(records)]
            ordinal += len(records)
            if self.reading is not None:
                pending.append((self.reading, tuple(self.names), self.site_states(records), target))
                continue
            own = records[:, self.offset : self.offset_of(len(self.sites))]
            target.copy_(own.unflatten(1, (len(self.sites), -1)).view(self.stored_dtype)[..., : self.width])

    def alike(self, packed: bool) -> tuple[Any, ...]:
        """A key, equal for groups of different requests with records that are packed, and copied, in the same way."""
        sizes = self.offset, self.sent_size, self.copied
        if not packed:
            return sizes
        places = [self._place(column) for column in range(len(self.sites))]
        reading = None if self.reading is None else self.reading.key
        own = self.record_size, self.sums_size, self.packed_size, self.kept_width
        return *sizes, *own, tuple(self.sites), tuple(places), reading

    def summed_and_whole(self, first: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Indexes of records with a size, among the records of positions from `first` on.
        Returns (records that are summed, records that are sent whole, the first ordinal of these or -1)."""
        ordinals = self.ordinals[first : first + len(sizes)][sizes > 0]
        whole = np.flatnonzero(self.sent_whole[first : first + len(sizes)][sizes > 0])
        summed = np.flatnonzero((ordinals >= 0) & (ordinals < self.of_prompt)) if self._sum_size else whole[:0]
        return summed, whole, int(ordinals[whole[0]]) if len(whole) else -1

    def sums_of(self, packed: np.ndarray) -> np.ndarray:
        """The sums at the front of a result of `pack`: [sites, width] float32."""
        return packed[: self.sums_size].view(np.float32)[: len(self.sites) * self.width].reshape(len(self.sites), -1)

    def states_of(self, parts: np.ndarray) -> np.ndarray:
        """States [n, sites, kept width], as integers of the sent width, at the front of parts [n, elements]."""
        parts = parts[:, : self.sent_size].reshape(len(parts), -1, self._site_size)
        return parts.view(self._sent_integer)[..., : self.kept_width]

    def _place(self, column: int) -> int:
        """First element of a column's source in a record."""
        group, of_group = self.sources[column] or (self, column)
        return group.offset_of(of_group)

    def site_states(self, records: torch.Tensor) -> torch.Tensor:
        """States [n, sites, width], in the ring's dtype."""
        sites = len(self.sites)
        if not any(self.sources):
            own = records[:, self.offset : self.offset + sites * self._state_size]
            return own.unflatten(1, (sites, -1))[..., : self._state_width]
        places = map(self._place, range(sites))
        return torch.stack([records[:, place : place + self._state_width] for place in places], 1)

    def _states(self, records: torch.Tensor) -> torch.Tensor:
        """States [n, sites * width], or the results of the group's reading."""
        if self.reading is None:
            return records[:, self.offset : self.offset + len(self.sites) * self._state_size]
        return self.reading([(tuple(self.names), self.site_states(records))])[0].flatten(1)


def _before(rows: np.ndarray, position: int) -> int:
    """The number of rows before a position, of rows up to each position, itself included."""
    return rows.item(min(position, len(rows)) - 1) if position > 0 and len(rows) else 0


def size_in(width: int, dtype: torch.dtype, of: torch.dtype) -> int:
    """Elements of dtype `of` that hold `width` values."""
    return -(-width * dtype.itemsize // of.itemsize)


def selected(runs: Sequence[torch.Tensor], records: np.ndarray) -> Iterator[torch.Tensor]:
    """Some of the records, [n, elements] each."""
    start = 0
    for run in runs:
        begin, end = np.searchsorted(records, (start, start + len(run)))
        for piece in _slices(records[begin:end] - start):
            yield run[piece]
        start += len(run)


def aligned(size: int) -> int:
    """The size, rounded up to whole `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def _slices(rows: np.ndarray) -> list[slice]:
    """Slices that select `rows`, integers in ascending order."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return [slice(int(rows[0]), int(rows[-1]) + 1)]
    return [slice(run.start, run.stop, run.step) for run in progressions(rows.tolist())]
