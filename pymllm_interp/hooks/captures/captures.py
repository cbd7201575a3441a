"""`Captures`: what one request captures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from einops import rearrange

from ...utils.copies import shallow
from ..binding import Bound
from ..site import Site
from .activations import Activations, CaptureError, lost
from .egress.result_memory import Memory
from .group import Group, SmallRow
from .pieces import SitePiece
from .record_sizes import RecordSizes
from .reductions.reading import Pending, reading_of
from .reductions.reduction import Readout
from .spec import NORMED, Capture

MAX_GROUPS = 256
"""Most different positions, dtypes and reductions among the captures of a request: each takes memory for every position."""


class RecordLayout:
    """The layout of the records of a generated position, one object for requests that have the same.

    Attributes:
        record_size: elements of a record.
        packed_size: elements that it is packed to; 0 where it is sent as it is.
    """

    _known: ClassVar[WeakValueDictionary[Any, RecordLayout]] = WeakValueDictionary()

    def __init__(self, record_size: int, packed_size: int) -> None:
        self.record_size, self.packed_size = record_size, packed_size

    @classmethod
    def of(cls, record_size: int, packed_size: int, groups: tuple[Any, ...]) -> RecordLayout:
        """The one object. `groups`: `Group.alike` of each that is packed."""
        return cls._known.setdefault((record_size, packed_size, groups), cls(record_size, packed_size))

    @property
    def sent_size(self) -> int:
        """Elements that are sent."""
        return self.packed_size or self.record_size


class Captures(RecordSizes):
    """What one request captures.

    Args:
        bounds: (number of the site (layers/edits), what is captured there, shape of a position's state).
        dtype: of the model's states.
        prompt_len: positions of the prompt.
        longest: upper bound of the request's positions.
        num_layers: of the model.
        readout: of the model, for reductions and normed sites.

    Attributes:
        by_site: number of a site -> (its group, its column).
        groups: in the order of a record.
        cut: by site, values that limits of reductions left out; after `activations`.

    Raises:
        ValueError: a site is captured in two ways. One that is named twice, alike, is captured once.
    """

    def __init__(
        self,
        bounds: Iterable[tuple[int, Bound, tuple[int, ...]]],
        dtype: torch.dtype,
        prompt_len: int,
        longest: int,
        num_layers: int,
        readout: Readout | None = None,
    ) -> None:
        self.cut: dict[str, int] = {}
        self._num_layers = num_layers
        self._copied = 0
        self.by_site: dict[int, tuple[Group, int]] = {}
        self._columns: dict[str, tuple[Group, int]] = {}
        self._numbers: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._heads: dict[str, tuple[int, ...] | None] = {}
        self._missing: dict[str, int] = {}
        groups: dict[Any, Group] = {}
        spec = group = None
        asked: dict[str, Bound] = {}
        for site, bound, shape in bounds:
            name = str(bound.site)
            if _is_repeated(name, bound, asked):
                continue
            normed = bound.site.kind in NORMED
            if group is None or bound.spec is not spec:  # else another layer of the same spec
                spec = bound.spec
                assert isinstance(spec, Capture)
                alike = bound.windows, spec.dtype, spec.reduce, prod(shape), normed
                if alike not in groups:
                    if len(groups) == MAX_GROUPS:
                        raise ValueError(
                            f"{spec.name}: the captures of a request have more than {MAX_GROUPS} different positions, dtypes and "
                            "reductions: capture more of them alike"
                        )
                    reading = reading_of(spec, normed, prod(shape), dtype, readout)
                    groups[alike] = Group(spec, bound.windows, prod(shape), dtype, prompt_len, longest, reading)
                group = groups[alike]
            column = group.add(site, bound.site)
            self._share(name, site, group, column)
            self._columns[name], self._numbers[name], self._shapes[name] = (group, column), site, shape
            self._heads[name], self._missing[name] = bound.spec.heads, bound.missing
        # A record ends after the last group that its position is in, so groups with more positions come first. Groups with more
        # unpacked positions come first of all.
        packs = any(group.sums_size for group in groups.values()) and all(g.reading is None for g in groups.values())
        since = prompt_len if packs else 0
        self.groups = sorted(groups.values(), key=lambda group: _counts(group.ordinals, since), reverse=True)
        super().__init__(self.groups, prompt_len, longest)
        self._alike = self._alike_when_generated()
        self._order = tuple(
            sorted(self._columns, key=lambda name: (self._numbers[name], self._columns[name][0].reading is not None))
        )  # in that of a forward pass
        self._whole = self._sites_of_whole()

    def _sites_of_whole(self) -> list[tuple[str, ...]]:
        """The sites of each group by column, where all results are states of one width; else empty."""
        sites: dict[int, dict[int, str]] = {id(group): {} for group in self.groups}
        for name, (group, column) in self._columns.items():
            if not group.spec.reduction.of_states or len(self._shapes[name]) > 1 or column in sites[id(group)]:
                return []
            sites[id(group)][column] = name
        return [tuple(name for _, name in sorted(sites[id(group)].items())) for group in self.groups]

    @property
    def counts_alike(self) -> bool:
        """Whether `counts` depends on the number of positions only, and not on values."""
        return all(group.spec.reduction.of_states for group in self.groups)

    def fresh(self) -> Captures:
        """The same captures for another request with a prompt of this length: nothing is captured yet."""
        found = shallow(self)
        if len(self.groups) == 1:  # most often
            (group,) = found.groups = [self.groups[0].fresh()]
            found.by_site = {site: (group, column) for site, (_, column) in self.by_site.items()}
            found._columns = {name: (group, column) for name, (_, column) in self._columns.items()}
            found.cut = {}
            return found
        own = {id(group): group.fresh() for group in self.groups}

        def place(of: tuple[Group, int]) -> tuple[Group, int]:
            return own[id(of[0])], of[1]

        found.groups = list(own.values())
        for group in found.groups:
            group.sources = [source and place(source) for source in group.sources]
        found.by_site = {site: place(of) for site, of in self.by_site.items()}
        found._columns = {name: place(of) for name, of in self._columns.items()}
        found.cut = {}
        return found

    def _alike_when_generated(self) -> RecordLayout | None:
        """What `alike` returns for generated positions; None where some group has not all of them."""
        if self._prompt_len == len(self._record_sizes):
            return None
        if not all((group.ordinals[self._prompt_len :] >= 0).all() for group in self.groups):
            return None
        if not self._reads:
            return RecordLayout.of(self._record_sizes.item(-1), 0, ())
        sizes = self._sizes_to_pack.item(-1), self._packed_sizes.item(-1) + self._sums_size
        return RecordLayout.of(*sizes, tuple(group.alike() for group in self.groups))

    def alike(self, first: int) -> RecordLayout | None:
        """The layout of a position's record, one object for requests that `pack_rows` takes together. None: it is of its own."""
        return self._alike if first >= self._prompt_len else None

    @property
    def table_bytes(self) -> int:
        """Bytes of the groups' tables, which have an entry for each position."""
        return sum(group.ordinals.nbytes for group in self.groups)

    @property
    def in_order(self) -> bool:
        """Whether positions must be copied in order, on one thread."""
        return any(group.in_order for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Upper bound of the results' bytes on the host."""
        return sum(group.num_bytes for group in self.groups)

    def counts(self, num_positions: int) -> list[tuple[str, int, int, int, int]]:
        """(site, rows of the prompt, rows of generated tokens, missing positions, cut values) of the first `num_positions`."""
        of_group = {}
        for group in self.groups:
            prompt = group.captured_before(min(num_positions, self._prompt_len))
            of_group[id(group)] = prompt, group.captured_before(num_positions) - prompt
        return [
            (name, *of_group[id(self._columns[name][0])], self._missing[name], self.cut.get(name, 0))
            for name in self._order
        ]

    @property
    def offsets(self) -> dict[int, int]:
        """Number of a site -> its first element in a record."""
        return {site: group.offset_of(column) for site, (group, column) in self.by_site.items()}

    def prepare(self, memory: Memory) -> None:
        """Allocate the results; a second call does nothing.

        Raises:
            MemoryError, OSError, RuntimeError: `memory` has no room.
        """
        for group in self.groups:
            group.prepare(memory)

    def small_row(self, position: int) -> SmallRow | None:
        """Where the record of a position is copied, if it is small; None: it needs `direct_rows` or `copy`."""
        return self.groups[0].small_row(position) if len(self.groups) == 1 else None

    def direct_rows(self, first: int, count: int) -> np.ndarray | None:
        """[count, words], the result's memory for the records of `count` positions; None where they need `copy`."""
        return self.groups[0].direct_rows(first, count) if len(self.groups) == 1 else None

    def copy(self, records: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Copy records to the result, after `prepare`. Threads may copy different positions, unless the captures are `in_order`.

        Args:
            records: [elements], concatenated, on the host, as integers of the states' width (`INTEGERS`).
            first: first position.
            sizes: [positions], of `record_sizes`.
        """
        for group in self.groups:
            group.copy(records, first, sizes)

    def pack(self, records: torch.Tensor, into: torch.Tensor, first: int, sizes: np.ndarray) -> list[Pending]:
        """Write the results of a pass that `packs`: for each group the sums over prompt positions, then the other states.

        Args:
            records: [elements] of the ring, concatenated.
            into: [`packed_size`] of the ring.
            first: first position.
            sizes: [positions], of `record_sizes`.

        Returns:
            What `read_all` must write, together with that of other requests.
        """
        pending: list[Pending] = []
        found = sizes[sizes > 0]
        cuts = np.flatnonzero(np.diff(found)) + 1
        counts = np.diff(cuts, prepend=0, append=len(found)).tolist()
        pieces = records.split([int(part.sum()) for part in np.split(found, cuts)])
        runs = [piece.view(count, -1) for piece, count in zip(pieces, counts, strict=True)]
        for group in self.groups:
            into = into[group.pack(runs, into, first, sizes, pending) :]
        return pending

    def pack_rows(self, records: torch.Tensor, into: torch.Tensor) -> list[Pending]:
        """`pack` of generated positions of requests that are `alike`, one of each.

        Args:
            records: [requests, elements].
            into: [requests, `packed_size`].
        """
        pending: list[Pending] = []
        for group in self.groups:
            group.pack_whole(records, into[:, group.sums_size :], pending)
            into = into[:, group.sums_size + group.packed_size :]
        return pending

    def unpack(self, packed: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Copy what `pack` wrote to the result, as `copy` does with records."""
        for group in self.groups:
            packed = packed[group.unpack(packed, first, sizes) :]

    def begin_draft(self) -> None:
        """The next pass computes rows that may be taken back, until `settle`."""
        for group in self.groups:
            group.begin_draft()

    def settle(self, num_positions: int) -> None:
        """Keep the rows of the first `num_positions` positions, and take back those behind them, which come again.

        Rows that left through the ring stay where they are until then.
        """
        self.next_position = min(self.next_position, num_positions)
        for group in self.groups:
            group.settle(num_positions)

    def mark_copied(self, stop: int) -> None:
        """All positions before `stop` were copied."""
        self._copied = stop

    def shortfalls(self, num_positions: int) -> Iterator[tuple[Site, int, int]]:
        """(site, delivered rows, expected rows) of each site with too few rows of the first `num_positions` positions."""
        return chain.from_iterable(group.shortfalls(num_positions, self._copied) for group in self.groups)

    def activations(self, token_ids: Sequence[int]) -> Activations:
        """The result.

        Args:
            token_ids: of the positions that the request computed.
        """
        if self.error is not None:
            return lost(self.error)
        found = Activations(self._num_layers)
        tokens = np.array(token_ids, dtype=np.int64)
        try:
            if self._whole:
                pieces = []
                for group, sites in zip(self.groups, self._whole, strict=True):
                    rows, positions = group.finish_whole(len(tokens), self._copied)
                    at = torch.from_numpy(tokens[positions.numpy()])
                    pieces.append(SitePiece(sites, rows, positions, at, {}))
                return Activations.of_pieces(self._num_layers, pieces, self._order)
            columns = {id(group): group.finish(len(tokens), self._copied) for group in self.groups}
        except (MemoryError, RuntimeError) as error:  # out of memory
            return lost(CaptureError(f"captured states are lost: {error}"))
        tokens_at = {key: torch.from_numpy(tokens[columns[key][0][1].numpy()]) for key in columns}
        for name in self._order:
            group, column = self._columns[name]
            reduced, positions = columns[id(group)][column]
            rows, shape, self.cut[name] = reduced.rows, self._shapes[name], reduced.cut
            if len(shape) > 1 and group.spec.reduction.of_states:
                heads = self._heads[name]
                rows = rearrange(rows, "rows (heads dim) -> rows heads dim", heads=shape[0])
                rows = rows if heads is None else rows[:, list(heads)]
            found.add(name, rows, positions, tokens_at[id(group)], reduced.others)
        return found

    def _share(self, name: str, site: int, group: Group, column: int) -> None:
        """Let groups that capture one state differently read the one that is stored, which `by_site` has.

        Raises:
            ValueError: what is stored is not the state, or both store it.
        """
        stored, of_stored = self.by_site.setdefault(site, (group, column))
        if stored is group:
            return
        if (
            group.reading is None and stored.reading is not None
        ):  # what is sent as it is stored is stored in its own place
            for other in {id(found): found for found, _ in self._columns.values()}.values():
                if site in other.sites and other.reading is not None:
                    other.sources[other.sites.index(site)] = group, column
            self.by_site[site] = owner = group, column
        else:
            owner = stored, of_stored
            group.sources[column] = owner
        if not owner[0].stores_states or (group.reading is None and stored.reading is None):
            other = next(known for known, number in self._numbers.items() if number == site)
            raise ValueError(
                f"{name} is the same state as {other}, captured differently: name one of them, with all positions that you want"
            )


def _counts(ordinals: np.ndarray, since: int) -> tuple[int, int]:
    """(captured positions from `since` on, all captured positions)."""
    return int((ordinals[since:] >= 0).sum()), int((ordinals >= 0).sum())


def _is_repeated(name: str, bound: Bound, asked: dict[str, Bound]) -> bool:
    """Whether an earlier capture reads the same of the site. Otherwise it is added to `asked`.

    Raises:
        ValueError: an earlier capture reads the site in another way.
    """
    first = asked.setdefault(name, bound)
    if first is bound:
        return False
    if _way(first) != _way(bound):
        raise ValueError(
            f"{name} is captured twice, with different positions, dtype, heads or reduction: name it once, with all positions that "
            "you want"
        )
    return True


def _way(bound: Bound) -> tuple[Any, ...]:
    """What a capture reads of its site."""
    spec = bound.spec
    return bound.windows, bound.missing, spec.dtype, spec.reduce, spec.heads
