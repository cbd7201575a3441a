"""`CapturedRows`: the captured states of one request on the host, and its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange

from ...utils.integers import as_integers, as_numbers
from ...utils.out_of_memory import is_out_of_memory
from ..site import Site
from .activations import Activations, CaptureError, lost
from .by_site import SitePiece
from .egress.result_memory import FRESH, Memory
from .group import Group, SentRecords
from .layout import CapturedSite, CaptureLayout, CaptureProgress, runs_of
from .reductions.lens import Lens
from .reductions.reading import Pending
from .reductions.reduction import Reduced


class GroupRows:
    """The rows of a group, [rows, sites, width].

    There is a row for each position. With a `Pool` there are two: the newest, and the fold of all earlier ones. So a row can be
    left out that was computed after the request's end. Such a row is never one of the prompt's.

    Attributes:
        rows: None before `prepare`.
        error: an error of the reduction within a step. The result raises it, since other requests share the step.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rows: torch.Tensor | None = None
        self.address = 0
        self._as_it_is = group.reading is None and group.stores_states and group.unchanged  # `put` of a state
        self._filled = [0] * len(group.sites)  # by column: the ordinal after the last row that `put` has kept
        self._num_put = [0] * len(group.sites)  # by column: rows that `put` has kept
        self._drafted: list[tuple[int, np.ndarray, slice]] | None = None
        self._beside: list[torch.Tensor] = []  # states of the sites so far in this pass, of a reading that is joined
        self._memory: Memory = FRESH
        self.error: BaseException | None = None
        self._values = np.empty(0)  # the memory of `rows`, as NumPy sees it

    def prepare(self, memory: Memory) -> None:
        """Allocate the rows; a second call does nothing."""
        if self.rows is not None:
            return
        group = self.group
        shape = group.num_rows, len(group.sites), group.kept_width
        self._memory, self.rows = memory, memory.empty(shape, group.kept_dtype)
        self.address = self.rows.data_ptr()
        if self.rows.is_cuda:  # `Group.keep_records` or torch fills it
            return
        if group.pool is not None and not group.pool.narrows:
            self._values = self.rows.fill_(group.pool.initial).numpy()
        else:
            self._values = as_integers(self.rows)

    def put(
        self, column: int, first: int, states: torch.Tensor, integers: np.ndarray | None, row: int, count: int
    ) -> None:
        """Keep the states of a site in a pass, without the ring. Positions that were kept before are left out.

        Args:
            first: first position.
            states: [tokens, width] of all requests.
            integers: the same memory, as NumPy sees it; None on a device.
            row: first row of the request's `count` rows.
        """
        group, filled = self.group, self._filled[column]
        if count == 1:  # most steps have many of these
            ordinal, own = group.ordinals.item(first), None
            kept = ordinal >= filled
        else:
            found = group.ordinals[first : first + count]
            own = np.flatnonzero(found >= filled)
            kept = len(own)
            ordinal = found.item(own[0]) if kept else -1
        if not kept:
            return
        self.prepare(FRESH)
        if self._as_it_is and integers is not None:
            # By NumPy: torch would start its intra-op threads for each row, which the passes on a CPU use.
            if own is None:
                self._values[ordinal, column] = integers[row]
            else:
                self._values[ordinal : ordinal + kept, column] = integers[row + own]
        else:
            rows = states[row : row + count]
            rows = rows if kept == count else rows[torch.from_numpy(own).to(rows.device)]
            if group.reading is not None and group.reading.joined:
                return self._put_beside(column, ordinal, rows)
            own_column = slice(column, column + 1)
            if group.spec.stays and self.rows is not None:
                self.rows[ordinal : ordinal + kept, own_column] = self._read(own_column, rows[:, None])
            else:
                self._keep(ordinal, self._sent(own_column, rows[:, None]), own_column)
        self._filled[column] = ordinal + int(kept)
        self._num_put[column] += int(kept)

    def _put_beside(self, column: int, ordinal: int, rows: torch.Tensor) -> None:
        """`put` for a reading that is joined: rows [n, width] wait for the pass's last site."""
        self._beside = [*self._beside[:column], rows.clone()]
        if column + 1 < len(self.group.sites):
            return
        self._keep(ordinal, self._sent(slice(None), torch.stack(self._beside, 1)), slice(None))
        self._filled = [ordinal + len(rows)] * len(self._filled)
        self._num_put = [count + len(rows) for count in self._num_put]

    def _sent(self, columns: slice, states: torch.Tensor) -> np.ndarray:
        """[n, columns, kept width] of integers: the values that the device would have sent for states [n, columns, width]."""
        return as_integers(self._read(columns, states).cpu())

    def _read(self, columns: slice, states: torch.Tensor) -> torch.Tensor:
        """The values of `_sent`, on the device of the states."""
        group = self.group
        if group.reading is None:
            probes = None if group.probes is None else group.probes.to(states.device)
            return group.stored(states[:, 0], probes)[:, None]
        try:
            found = group.reading([(tuple(group.names[columns]), states)])[0]
        except BaseException as error:  # code of callers
            if is_out_of_memory(error):
                raise
            self.error = error
            found = states.new_zeros(*states.shape[:2], group.width, dtype=group.sent_dtype)
        return F.pad(found, (0, group.kept_width - group.width))

    def copy_rows(self, sent: SentRecords, first: int, sizes: np.ndarray, offset: int) -> None:
        """Keep the group's part of the records of positions `first` and on.

        Args:
            sizes: [positions], elements of each record; 0 for none.
            offset: first element of the first record.
        """
        group = self.group
        if len(sizes) == 1:
            if sizes.item() and (ordinal := group.ordinals.item(first)) >= 0:
                self.copy_block(sent, ordinal, offset + group.offset, 1, sizes.item())
            return
        wanted = np.flatnonzero((group.ordinals[first : first + len(sizes)] >= 0) & (sizes > 0))
        if not len(wanted):
            return
        starts, found = (np.cumsum(sizes) - sizes)[wanted], sizes[wanted]
        cuts = np.flatnonzero((np.diff(starts) != found[:-1]) | (np.diff(found) != 0)) + 1
        ordinal = group.ordinals.item(first + wanted[0])
        for begin, end in zip((0, *cuts.tolist()), (*cuts.tolist(), len(wanted)), strict=True):
            at = offset + starts.item(begin) + group.offset
            self.copy_block(sent, ordinal + begin, at, end - begin, found.item(begin))

    def copy_block(self, sent: SentRecords, ordinal: int, offset: int, count: int, stride: int) -> None:
        """Keep `count` rows of consecutive ordinals, or fold them.

        Args:
            offset: first element of the first one.
            stride: elements from one to the next.
        """
        group = self.group
        if group.copied:
            sent.add(self.address + ordinal * group.row_bytes, offset, count, group.row_bytes, stride)
            return
        span = sent.values(offset, (count - 1) * stride + group.sent_size)
        step = span.strides[0]
        parts = np.lib.stride_tricks.as_strided(span, (count, group.sent_size), (stride * step, step))
        self.keep(ordinal, parts)

    def copy_packed(self, sent: SentRecords, first: int, sizes: np.ndarray, offset: int) -> int:
        """Keep the results of `Group.pack`. Returns the number of elements read."""
        group = self.group
        summed, whole, ordinal = group.summed_and_whole(first, sizes)
        if len(summed):
            self._fold(group.sums_of(sent.values(offset, group.sums_size)), slice(None))
        if len(whole):
            self.copy_block(sent, ordinal, offset + group.sums_size, len(whole), group.packed_size)
        return group.sums_size + len(whole) * group.packed_size

    def keep(self, ordinal: int, parts: np.ndarray) -> None:
        """Keep rows that are sent, [n, `sent_size`], of consecutive ordinals."""
        self._keep(ordinal, self.group.states_of(parts), slice(None))

    def _keep(self, ordinal: int, rows: np.ndarray, columns: slice) -> None:
        """Keep rows [n, columns, width] of sent values as integers, or fold them."""
        group = self.group
        if group.pool is None:
            if group.unchanged:
                self._values[ordinal : ordinal + len(rows), columns] = rows
            else:
                assert self.rows is not None
                sent = torch.from_numpy(rows).view(group.sent_dtype)
                self.rows[ordinal : ordinal + len(rows), columns].copy_(sent)
            return
        for i, row in enumerate(rows):  # one by one: the result does not depend on which rows came together
            numbers = row if group.pool.narrows else as_numbers(row, group.sent_dtype)
            if self._drafted is not None:
                self._drafted.append((ordinal + i, numbers.copy(), columns))
            else:
                self._fold(numbers, columns)

    def _fold(self, row: np.ndarray, columns: slice) -> None:
        """Take the newest row of a pool, [columns, width]."""
        assert self.group.pool is not None
        before, newest = self._values[:, columns]
        try:
            self.group.pool.fold(before, newest)
        except BaseException as error:  # code of callers
            self.error = error
        newest[:] = row

    def begin_draft(self) -> None:
        """Begin rows that may be taken back. A pool folds them when they are settled; earlier unsettled rows are forgotten."""
        self._drafted = []

    def settle(self, num_positions: int) -> None:
        """Keep the rows of the first `num_positions` positions, and take back those behind them, which come again."""
        stay = self.group.rows_before(num_positions)
        drafted, self._drafted = self._drafted, None
        for ordinal, row, columns in drafted or ():
            if ordinal < stay:
                self._fold(row, columns)
        for column, filled in enumerate(self._filled):
            taken_back = max(filled - stay, 0)
            self._filled[column] -= taken_back
            self._num_put[column] -= taken_back

    def shortfalls(self, num_positions: int, copied: int) -> Iterator[tuple[Site, int, int]]:
        """(site, delivered rows, expected rows) of each site with too few rows of the first `num_positions` positions."""
        expected, copied_rows = self.group.rows_before(num_positions), self.group.rows_before(copied)
        for column, site in enumerate(self.group.names) if copied_rows < expected else ():
            delivered = max(self._num_put[column], copied_rows)
            if delivered < expected:
                yield site, delivered, expected

    def arrived(self, copied: int) -> list[int]:
        """Number of rows that have arrived, by column; the positions before `copied` were copied from the ring."""
        copied_rows = self.group.rows_before(copied)
        if not any(self._filled):
            return [copied_rows] * len(self._filled)
        return [max(filled, copied_rows) for filled in self._filled]

    def results(self, num_positions: int, copied: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [positions, sites, width], positions that the result names).

        Args:
            num_positions: positions of the request. A row that was computed after them is left out.
            copied: positions before it were copied from the ring.
        """
        group, arrived = self.group, self.arrived(copied)
        count, newest = min(*arrived, group.rows_before(num_positions)), max(arrived)
        if group.in_order and count < newest - (newest > group.of_prompt):
            count = 0  # preempted, and ended before it was computed as far again: the kept rows are of later positions
        positions = group.spec.reduction.placed(torch.from_numpy(group.positions[:count].copy()))
        self.prepare(FRESH)
        assert self.rows is not None
        if group.pool is not None:  # a result does not share memory with the fold
            return self._pooled(count, arrived), positions
        self._memory.clear(self.rows, min(count, len(self.rows)))
        return self.rows if count == len(self.rows) else self.rows[:count], positions

    def between(self, start: int, stop: int, copied: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows, their positions) of positions from `start` to `stop`, which are settled; None for none. The rows are copies.

        Rows that have not come are left out: their memory may hold another request's.

        Args:
            copied: positions before it were copied from the ring.
        """
        group = self.group
        first, last = group.rows_before(start), group.rows_before(stop)
        last = min(last, *self.arrived(copied))
        if self.rows is None or first >= last:
            return None
        return self.rows[first:last].clone(), torch.from_numpy(group.positions[first:last].copy())

    def _pooled(self, count: int, arrived: list[int]) -> torch.Tensor:
        """The result of a pool, [1, columns, width], or [0, columns, width] for no position."""
        pool = self.group.pool
        assert pool is not None
        before, newest = self._values[:, :]
        folded = before.copy()
        pool.fold(folded, newest)
        folded = np.where((np.array(arrived) > count)[:, None], before, folded)  # a newest row that is left out
        return pool.finished(torch.from_numpy(folded).view(self.group.kept_dtype), count)[None][:count]

    def in_columns(self, rows: torch.Tensor) -> torch.Tensor:
        """States of all columns side by side, [positions, columns * width], in the result's dtype."""
        dtype = self.group.result_dtype
        return (rows if rows.dtype is dtype else rows.to(dtype)).flatten(1)

    def by_column(self, rows: torch.Tensor) -> Iterable[Reduced]:
        """The result of each column."""
        group = self.group
        if group.spec.reduction.of_states:
            rows = self.in_columns(rows)  # not by `unbind`: autograd does not allow in-place operations on its outputs
            return map(Reduced, rows.unsafe_split(group.kept_width, 1) if len(group.sites) > 1 else (rows,))
        asked = group.spec.dtype if isinstance(group.spec.dtype, torch.dtype) else None
        values = rows[..., : group.width].detach()
        return [group.spec.reduction.results(values[:, i], asked, group.states) for i in range(values.shape[1])]


class CapturedRows(CaptureProgress):
    """The captured states of one request.

    Attributes:
        groups: the rows of each group of the layout.
        cut: site -> values omitted by limits of reductions; set by `result`.
    """

    def __init__(self, layout: CaptureLayout) -> None:
        super().__init__(layout)
        self.groups = [GroupRows(group) for group in layout.groups]
        self.cut: dict[str, int] = {}
        self._copied = 0

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self.layout.num_layers

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the sites, in the order of a forward pass."""
        return self.layout.order

    @property
    def pooled_sites(self) -> list[str]:
        """Sites that stream, with one row of all positions."""
        sites = self.layout.sites
        return [site.name for site in sites if site.group.spec.stream and not site.group.streams]

    @property
    def lens_sites(self) -> list[str]:
        """Sites with token ids in `Activations.indexes`."""
        return [site.name for site in self.layout.sites if isinstance(site.group.spec.reduction, Lens)]

    @property
    def streamed_bytes(self) -> int:
        """Bytes of a position's rows in a stream."""
        return sum(group.row_bytes for group in self.layout.groups if group.streams)

    def prepare(self, memory: Memory) -> None:
        """Allocate the results; a second call does nothing. Raises MemoryError, OSError, RuntimeError: `memory` has no room."""
        for rows in self.groups:
            rows.prepare(memory)

    def put(self, position: int, site: int, states: torch.Tensor) -> None:
        """Keep states [n, width] of a site, of the positions from `position` on."""
        states = states.detach()
        integers = None if states.is_cuda else as_integers(states)
        for rows in self.groups:
            for column in [i for i, number in enumerate(rows.group.sites) if number == site]:
                rows.put(column, position, states, integers, 0, len(states))

    def copy_rows(self, sent: SentRecords, first: int, sizes: np.ndarray, offset: int, packed: bool) -> None:
        """Keep records, after `prepare`. Values kept as they were sent arrive with the copies of `sent`.

        Args:
            first: first position.
            sizes: [positions] of `record_sizes`.
            offset: first element of the records, or of their packed results.
        """
        for rows in () if self.layout.stays else self.groups:  # else `pack` has kept them
            if packed:
                offset += rows.copy_packed(sent, first, sizes, offset)
            else:
                rows.copy_rows(sent, first, sizes, offset)

    def pack(self, records: torch.Tensor, into: torch.Tensor, first: int, sizes: np.ndarray) -> list[Pending]:
        """`CaptureLayout.pack`. States that stay on the device are copied to their rows there, and nothing is sent."""
        if not self.layout.stays:
            return self.layout.pack(records, into, first, sizes)
        pending, runs = list[Pending](), runs_of(records, sizes)
        for own in self.groups:
            assert own.rows is not None, "`Declarations.hold` prepares them"
            own.group.keep_records(runs, first, sizes, own.rows, pending)
        return pending

    def fail(self, error: BaseException) -> None:
        """A reduction raised within a step: `result` raises `error`."""
        for own in self.groups:
            own.error = error

    def mark_copied(self, stop: int) -> None:
        """All positions before `stop` were copied."""
        self._copied = stop

    def begin_draft(self) -> None:
        """The next pass computes rows that may be taken back, until `settle`."""
        for rows in self.groups:
            rows.begin_draft()

    def settle(self, num_positions: int) -> None:
        """Keep the rows of the first `num_positions` positions, and take back those behind them, which come again.

        Rows that left through the ring stay in their memory until then.
        """
        self.next_position = min(self.next_position, num_positions)
        for rows in self.groups:
            rows.settle(num_positions)

    def counts(self, num_positions: int) -> list[tuple[str, int, int, int, int]]:
        """(site, rows of the prompt, rows of generated tokens, missing positions, cut values) of the first `num_positions`."""
        of_group = []
        for group in self.layout.groups:
            prompt = group.captured_before(min(num_positions, self.layout.prompt_len))
            of_group.append((prompt, group.captured_before(num_positions) - prompt))
        return [
            (site.name, *of_group[site.group.index], site.missing, self.cut.get(site.name, 0))
            for site in self.layout.sites
        ]

    def shortfalls(self, num_positions: int) -> Iterator[tuple[Site, int, int]]:
        """(site, delivered rows, expected rows) of each site with too few rows of the first `num_positions` positions."""
        for rows in self.groups:
            yield from rows.shortfalls(num_positions, self._copied)

    def arrived(self) -> list[int]:
        """Number of rows that have arrived for all sites, by group. Any thread may call it."""
        return [min(own.arrived(self._copied)) for own in self.groups]

    def result(self, token_ids: Sequence[int]) -> Activations:
        """The captured states as `Activations`.

        Args:
            token_ids: tokens of the positions that the request computed.
        """
        if self.error is not None:
            return lost(self.error)
        for own in self.groups:
            if own.error is not None:
                raise own.error
        layout, tokens, pieces = self.layout, np.array(token_ids, dtype=np.int64), list[SitePiece]()
        try:
            for own, sites in zip(self.groups, layout.by_group, strict=True):
                rows, positions = own.results(len(tokens), self._copied)
                pieces += self._pieces(
                    own, sites, rows, positions, torch.from_numpy(tokens[positions.numpy()]), self.cut
                )
        except (MemoryError, RuntimeError) as error:  # out of memory
            return lost(CaptureError(f"captured states are lost: {error}"))
        return Activations(layout.num_layers, pieces, layout.order)

    def rows_since(self, start: int, stop: int, token_ids: Sequence[int]) -> list[SitePiece]:
        """Rows of the sites that stream, of positions from `start` to `stop`. Any thread may call it, also after the result.

        Args:
            token_ids: tokens of these positions.
        """
        tokens = np.array(token_ids, dtype=np.int64)
        pieces: list[SitePiece] = []
        for own, sites in zip(self.groups, self.layout.by_group, strict=True):
            if self.error is not None or own.error is not None or not own.group.streams:
                continue
            if (found := own.between(start, stop, self._copied)) is not None:
                rows, positions = found
                pieces += self._pieces(
                    own, sites, rows, positions, torch.from_numpy(tokens[positions.numpy() - start]), {}
                )
        return pieces

    def _pieces(
        self,
        own: GroupRows,
        sites: Sequence[CapturedSite],
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        cut: dict[str, int],
    ) -> Iterator[SitePiece]:
        """The result of some rows of a group.

        Args:
            cut: gets the values that limits of reductions left out, by site.
        """
        if (names := self.layout.whole[own.group.index]) is not None:
            yield SitePiece(names, own.in_columns(rows), positions, token_ids, {})
            return
        columns = list(own.by_column(rows))
        for site in sites:
            reduced = columns[site.column]
            cut[site.name] = reduced.cut
            yield SitePiece((site.name,), _shaped(reduced.rows, site), positions, token_ids, reduced.others)


def _shaped(rows: torch.Tensor, site: CapturedSite) -> torch.Tensor:
    """States by heads, at sites that have them."""
    if len(site.shape) == 1 or not site.group.spec.reduction.of_states:
        return rows
    rows = rearrange(rows, "rows (heads dim) -> rows heads dim", heads=site.shape[0])
    return rows if site.heads is None else rows[:, list(site.heads)]
