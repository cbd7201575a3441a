"""Captures: hidden states of a request at declared sites, returned as one tensor for each site.

outs = lm.generate(prompts, params, capture=["resid_post.*", Capture("mlp_out.{3,4}", positions=[-1])])
outs[0].activations["resid_post.12"]            # [positions, hidden]
outs[0].activations.positions["resid_post.12"]  # [positions] int64, and .token_ids

`Captures` holds what one request captures. Sites with the same positions, dtype and reduction are a *group*. The captured states
of one position are its *record*: the states of its sites, concatenated, group after group.

On a CPU, a pass hands the rows of each site to `Group.capture`. On CUDA, kernels write records into a ring buffer (ring.py).
`Captures.copy` copies records from the ring to the result. Some records are reduced on the device: groups with a mean over prompt
positions or with a `StateReading`. `Captures.pack` reduces them, and `Captures.unpack` copies the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...utils.copies import shallow
from ...utils.integers import as_integers
from ..positions import Window
from ..site import Site
from .egress.result_memory import FRESH, Memory
from .kept_rows import KeptRows
from .records import aligned, selected, size_in
from .reductions.reading import Pending, StateReading
from .reductions.reduction import Reduced
from .spec import Capture

SmallRow = tuple[np.ndarray, int]
"""[rows] of whole rows, and the index of one."""


class Group:
    """Sites of one request that are captured alike: same positions, dtype and reduction.

    What is sent from the device for a state is

    - with a `StateReading`: what it makes of the state;
    - with the `probes` of a reduction: the state's dot products with them;
    - with a reduction that `sums`: the float32 sum over the prompt positions of a pass; the state itself for generated positions;
    - else the state, where it is `needed`; in `spec.dtype` if that is narrower than the model's, and the reduction `narrows`.

    Args:
        width: of a state.
        dtype: of states.
        longest: upper bound of the request's positions.
        reading: what the device makes of the states; None: they are sent, or what kernels stored in their place.

    Attributes:
        sites: numbers of the sites (layers/edits), a column each.
        names: the sites, by column.
        sources: by column, the other group and its column with the stored state; None: the own one.
        captured: [longest] bool, by position: whether it is captured.
        ordinals: [longest] int64, by position: its index among the positions that the result is made of, or -1.
        offset: first element in a record.
        probes: [n, width] float32, directions of dot products that the device computes; None for none.
        converted: narrower dtype that the device converts states to, or None.
        width: values sent for a state.
        in_order: positions must come in order, on one thread.
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
        self.captured = np.zeros(longest, dtype=np.bool_)
        for window in windows:
            self.captured[window.start : window.stop : window.step] = True
        reduction = spec.reduction
        in_result = reduction.needed(self.captured, prompt_len)
        # What all requests with these captures share: rows of the result among the first positions, and their positions.
        self._rows = np.cumsum(in_result)
        self._positions = np.flatnonzero(in_result)
        self._captured_rows = self._rows if np.array_equal(in_result, self.captured) else np.cumsum(self.captured)
        self.ordinals = np.where(in_result, self._rows - 1, -1)
        self._of_prompt = self.rows_before(prompt_len)  # ordinals before it are of the prompt
        self.offset = 0
        self.probes: torch.Tensor | None = None
        self.converted: torch.dtype | None = None
        asked = spec.dtype if isinstance(spec.dtype, torch.dtype) else None
        result_dtype = asked or (dtype if reduction.of_states else torch.float32)
        if reading is None:
            self.probes = reduction.probes
            self.converted = result_dtype if reduction.narrows and result_dtype.itemsize < dtype.itemsize else None
        stored_width = width if self.probes is None else len(self.probes)
        self._stored_dtype = torch.float32 if self.probes is not None else self.converted or dtype
        self._state_width, self._state_size = stored_width, size_in(stored_width, self._stored_dtype, dtype)
        self.width, self._sent_dtype = stored_width, self._stored_dtype
        if reading is not None:
            self.width, self._sent_dtype = reading.width, reading.dtype
        self._site_size = size_in(self.width, self._sent_dtype, dtype)  # elements that are sent for a state
        if reading is not None and reading.reduces:  # so that what is sent for a record is kept as it is
            self._site_size = aligned(self._site_size)
            self._kept_width = self._site_size * dtype.itemsize // self._sent_dtype.itemsize
        else:
            self._kept_width = self.width
        self._sent_integer = np.dtype(f"i{self._sent_dtype.itemsize}")
        self._is_dense = self._site_size * dtype.itemsize == self._kept_width * self._sent_dtype.itemsize
        self.in_order = reduction.pools
        self._sum_size = 0  # elements of a sum
        if reduction.sums and self._of_prompt:
            self._sum_size = self.width * torch.float32.itemsize // dtype.itemsize
        states = self.probes is None and (reading is None or not reading.reduces)
        self._kept = KeptRows(
            spec, self.num_positions, self._kept_width, self.width, self._sent_dtype, result_dtype, states
        )
        self._keeps_rows = self.reading is None and self.stores_states and self._kept.unchanged
        self._filled: dict[int, int] = defaultdict(
            int
        )  # by column: the ordinal after the last row that `capture` has kept
        self._num_kept: dict[int, int] = defaultdict(int)  # by column: rows that `capture` has kept

    def fresh(self) -> Group:
        """The same for another request: nothing is captured yet. Its `sources` are still this request's."""
        found = shallow(self)
        found._kept, found._filled, found._num_kept = self._kept.fresh(), defaultdict(int), defaultdict(int)
        return found

    @property
    def num_positions(self) -> int:
        """Positions that the result is made of at most."""
        return len(self._positions)

    def rows_before(self, position: int) -> int:
        """Rows that the result has of the positions before `position`."""
        return _before(self._rows, position)

    def captured_before(self, position: int) -> int:
        """Positions before `position` that are captured."""
        return _before(self._captured_rows, position)

    def only_row(self, positions: range) -> tuple[int, int] | None:
        """(position, ordinal) of the one row that `keep_row` takes of these positions; None for several, or none."""
        first = self.rows_before(positions.start)
        if not self._keeps_rows or self.rows_before(positions.stop) != first + 1:
            return None
        return self._positions.item(first), first

    @property
    def record_size(self) -> int:
        """Elements of the group in a record, aligned."""
        return aligned(len(self.sites) * self._state_size)

    @property
    def packed_size(self) -> int:
        """Elements that are sent for a record which is packed, aligned."""
        return aligned(len(self.sites) * self._site_size)

    @property
    def reads_weights(self) -> bool:
        """Whether what is sent for a state depends on weights."""
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
        """Elements of the sums that are sent for a pass with prompt positions; 0 where nothing is summed."""
        return aligned(len(self.sites) * self._sum_size)

    @property
    def sent_whole(self) -> np.ndarray:
        """[longest] bool, by position: whether its state is sent in a pass that sums prompt positions."""
        return self.ordinals >= (self._of_prompt if self._sum_size else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows take on the host."""
        return self._kept.num_bytes(len(self.sites))

    def offset_of(self, column: int) -> int:
        """First element of a site in a record."""
        return self.offset + column * self._state_size

    def capture(self, column: int, rows: torch.Tensor, ordinals: torch.Tensor) -> None:
        """Keep the states of a site, without the ring.

        Args:
            rows: [n, width].
            ordinals: [n] int64. Those that are -1, or were captured before, are left out.
        """
        new = ordinals >= self._filled[column]
        if new.any():
            self.prepare(FRESH)
            found, states = ordinals[new], rows.detach()[new]
            if self.reading is not None:
                sent = self.reading([((self.names[column],), states[:, None])])[0][:, 0]
                sent = F.pad(sent, (0, self._kept_width - self.width))
            else:
                sent = self._stored(states, None if self.probes is None else self.probes.to(states.device))
            sent = as_integers(sent.cpu())
            self._kept.keep(int(found[0]), sent[:, None], slice(column, column + 1))
            self._filled[column] = int(found[-1]) + 1
            self._num_kept[column] += len(found)

    @property
    def keeps_rows(self) -> bool:
        """Whether `keep_row` takes the states of a row."""
        return self._keeps_rows

    def keep_row(self, column: int, ordinal: int, row: np.ndarray) -> None:
        """`capture` of one row.

        Args:
            ordinal: not -1.
            row: [width], the state as integers.
        """
        if ordinal >= self._filled[column]:
            self.prepare(FRESH)
            self._kept.put_row(ordinal, column, row)
            self._filled[column] = ordinal + 1
            self._num_kept[column] += 1

    def begin_draft(self) -> None:
        """From here on rows may be taken back, until `settle`."""
        self._kept.begin_draft()

    def settle(self, num_positions: int) -> None:
        """Keep the rows of the first `num_positions` positions, and take back those behind them, which come again."""
        stay = self.rows_before(num_positions)
        self._kept.settle(stay)
        for column in range(len(self.sites)):
            taken_back = max(self._filled[column] - stay, 0)
            self._filled[column] -= taken_back
            self._num_kept[column] -= taken_back

    def write(
        self, states: torch.Tensor, probes: torch.Tensor | None, memory: torch.Tensor, place: int, stride: int
    ) -> None:
        """Write states into the ring, as kernels do.

        Args:
            states: [n, width].
            probes: of the group, on the device.
            memory: [elements], the ring.
            place: first element of the first state.
            stride: elements from one state to the next.
        """
        target = memory.as_strided((len(states), self._state_size), (stride, 1), place).view(self._stored_dtype)
        target[:, : self._state_width].copy_(self._stored(states, probes))

    def prepare(self, memory: Memory) -> None:
        """Allocate the rows; a second call does nothing."""
        if self._kept.rows is None:
            sent = self.record_size if self.reading is None else self.packed_size
            padded = not self._is_dense or len(self.sites) * self._site_size < sent
            as_records = self._kept.unchanged and not padded
            self._kept.prepare(memory, len(self.sites), as_records)

    def small_row(self, position: int) -> SmallRow | None:
        """Where the record of a position goes as it is; None where it does not, or is not small (`KeptRows.small`)."""
        ordinal = self.ordinals.item(position)
        return None if self._kept.small is None or ordinal < 0 else (self._kept.small, ordinal)

    def direct_rows(self, first: int, count: int) -> np.ndarray | None:
        """[count, words], the result's memory for the records of `count` positions; None where they are not kept unchanged."""
        ordinal = self.ordinals.item(first)
        if ordinal < 0 or (count > 1 and self.ordinals.item(first + count - 1) - ordinal != count - 1):
            return None
        return self._kept.records(ordinal, count)

    def copy(self, records: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Copy the group's part of the records of positions `first` and on; see `Captures.copy`."""
        ordinals = self.ordinals[first : first + len(sizes)]
        wanted = np.flatnonzero((ordinals >= 0) & (sizes > 0))
        if not len(wanted):
            return
        starts, sizes = (np.cumsum(sizes) - sizes)[wanted], sizes[wanted]
        cuts = np.flatnonzero((np.diff(starts) != sizes[:-1]) | (np.diff(sizes) != 0)) + 1
        for begin, end in pairwise((0, *cuts.tolist(), len(wanted))):
            count, size, start = end - begin, int(sizes[begin]), int(starts[begin])
            rows = records[start : start + count * size].reshape(count, size)
            self._kept.keep(int(ordinals[wanted[begin]]), self._states_of(rows[:, self.offset :]))

    def pack(
        self, runs: Sequence[torch.Tensor], into: torch.Tensor, first: int, sizes: np.ndarray, pending: list[Pending]
    ) -> int:
        """Write what is sent of the group to the front of `into`; see `Captures.pack`.

        Args:
            runs: [n, elements] each: the records of positions `first` and on that have a size, in order.
            pending: gets what `read_all` writes later.

        Returns:
            Elements written.
        """
        summed, whole, _ = self._summed_and_whole(first, sizes)
        width = len(self.sites) * self.width
        sums = into[: self.sums_size].view(torch.float32)[:width].zero_() if self._sum_size else into[:0]
        for records in selected(runs, summed):
            sums += self._states(records).sum(0, dtype=torch.float32)
        start = self.sums_size
        for records in selected(runs, whole):
            stop = start + len(records) * self.packed_size
            target = into[start:stop].view(len(records), -1)
            self.pack_whole(records, target, pending)
            start = stop
        return start

    def pack_whole(self, records: torch.Tensor, target: torch.Tensor, pending: list[Pending]) -> None:
        """Write what is sent for whole records.

        Args:
            records: [n, elements].
            target: [n, at least `packed_size`].
            pending: gets what `read_all` writes later.
        """
        if self.reading is None:
            target[:, : self.packed_size].copy_(records[:, self.offset : self.offset + self.record_size])
            return
        sites = len(self.sites)
        values = target[:, : sites * self._site_size].view(self._sent_dtype).unflatten(1, (sites, -1))
        pending.append((self.reading, tuple(self.names), self._site_states(records), values[..., : self.width]))

    def alike(self) -> tuple[Any, ...]:
        """A key, equal for groups of different requests that `pack_whole` packs in the same way."""
        places = [self._place(column) for column in range(len(self.sites))]
        reading = None if self.reading is None else self.reading.key
        sizes = self.offset, self.record_size, self.sums_size, self.packed_size, self._kept_width
        return *sizes, tuple(self.sites), tuple(places), reading

    def unpack(self, packed: np.ndarray, first: int, sizes: np.ndarray) -> int:
        """Keep what `pack` wrote. Returns the number of elements read."""
        summed, whole, ordinal = self._summed_and_whole(first, sizes)
        start = self.sums_size
        stop = start + len(whole) * self.packed_size
        if len(summed):
            sums = packed[:start].view(np.float32)[: len(self.sites) * self.width]
            self._kept.fold(sums.reshape(len(self.sites), -1))
        if len(whole):
            self._kept.keep(ordinal, self._states_of(packed[start:stop].reshape(len(whole), -1)))
        return stop

    def shortfalls(self, num_positions: int, copied: int) -> Iterator[tuple[Site, int, int]]:
        """(site, delivered rows, expected rows) of each site with too few rows of the first `num_positions` positions."""
        expected, copied_rows = self.rows_before(num_positions), self.rows_before(copied)
        for column, site in enumerate(self.names) if copied_rows < expected else ():
            delivered = max(self._num_kept[column], copied_rows)
            if delivered < expected:
                yield site, delivered, expected

    def finish(self, num_positions: int, copied: int) -> list[tuple[Reduced, torch.Tensor]]:
        """The result: (rows and what comes with them, positions) of each column.

        Args:
            num_positions: positions of the request. A row that was computed after them is left out.
            copied: positions before it were copied from the ring.
        """
        count, arrived, placed = self._arrived(num_positions, copied)
        return [(reduced, placed) for reduced in self._kept.results(count, arrived)]

    def finish_whole(self, num_positions: int, copied: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`finish` of a group of states: (rows of all columns side by side, [positions, columns * width], positions)."""
        count, arrived, placed = self._arrived(num_positions, copied)
        return self._kept.whole(count, arrived), placed

    def _arrived(self, num_positions: int, copied: int) -> tuple[int, list[int], torch.Tensor]:
        """(positions of the result, rows that were kept by column, positions that the result names)."""
        copied_rows = self.rows_before(copied)
        filled = self._filled
        arrived = [max(filled[column], copied_rows) if filled else copied_rows for column in range(len(self.sites))]
        count, newest = min(*arrived, self.rows_before(num_positions)), max(arrived)
        if self.in_order and count < newest - (newest > self._of_prompt):
            count = 0  # preempted, and ended before it was computed as far again: the kept rows are of later positions
        positions = torch.from_numpy(self._positions[:count].copy())
        placed = self.spec.reduction.placed(positions)
        self.prepare(FRESH)
        return count, arrived, placed

    def _summed_and_whole(self, first: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Indexes of records with a size, among the records of positions from `first` on.

        Returns:
            (records that are summed, records that are sent whole, the first ordinal of these or -1).
        """
        ordinals = self.ordinals[first : first + len(sizes)][sizes > 0]
        whole = np.flatnonzero(self.sent_whole[first : first + len(sizes)][sizes > 0])
        summed = np.flatnonzero((ordinals >= 0) & (ordinals < self._of_prompt)) if self._sum_size else whole[:0]
        return summed, whole, int(ordinals[whole[0]]) if len(whole) else -1

    def _stored(self, states: torch.Tensor, probes: torch.Tensor | None) -> torch.Tensor:
        """What is stored for states [n, state width]: [n, width]. `probes` are the group's, on the device of the states."""
        if probes is not None:
            states = torch.stack([(states.float() * probe).sum(-1) for probe in probes], -1)
        return states.to(self._stored_dtype)

    def _place(self, column: int) -> int:
        """First element in a record of what a column reads."""
        group, of_group = self.sources[column] or (self, column)
        return group.offset_of(of_group)

    def _site_states(self, records: torch.Tensor) -> torch.Tensor:
        """States [n, sites, width], in the ring's dtype."""
        sites = len(self.sites)
        if not any(self.sources):
            own = records[:, self.offset : self.offset + sites * self._state_size]
            return own.unflatten(1, (sites, -1))[..., : self._state_width]
        places = map(self._place, range(sites))
        return torch.stack([records[:, place : place + self._state_width] for place in places], 1)

    def _states(self, records: torch.Tensor) -> torch.Tensor:
        """States [n, sites * width], read where the group has a reading."""
        if self.reading is None:
            return records[:, self.offset : self.offset + len(self.sites) * self._state_size]
        return self.reading([(tuple(self.names), self._site_states(records))])[0].flatten(1)

    def _states_of(self, parts: np.ndarray) -> np.ndarray:
        """States [n, sites, kept width], as integers of the sent width, at the front of parts [n, elements]."""
        parts = parts[:, : len(self.sites) * self._site_size].reshape(len(parts), -1, self._site_size)
        return parts.view(self._sent_integer)[..., : self._kept_width]


def _before(rows: np.ndarray, position: int) -> int:
    """The number of rows before a position, of rows up to each position, itself included."""
    return rows.item(min(position, len(rows)) - 1) if position > 0 and len(rows) else 0
