"""Captures: hidden states of a request at declared sites, returned as one tensor for each site.

outs = lm.generate(prompts, params, capture=["resid_post.*", Capture("mlp_out.{3,4}", positions=[-1])])
outs[0].activations["resid_post.12"]            # [positions, hidden]
outs[0].activations.positions["resid_post.12"]  # [positions] int64, and .token_ids

A `CaptureLayout` has the captures of a request, and their places. Requests with equal captures and prompts of one length
share it. Sites with the same positions, dtype and reduction are a `Group`. The captured states of one position are its
*record*: the states of its sites, concatenated, group after group. `CapturedRows` (rows.py) are the states of one request.

On a CPU, a pass hands the rows of each site to `CapturedRows.put`. On CUDA, kernels write records into a ring buffer
(egress/ring.py), and `CapturedRows.copy_rows` copies them from there. Groups with a mean over prompt
positions, or with a `StateReading`, are packed on the device before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.model_spec import LOGITS, ModelSpec, site_index
from ..bind import Bound, at_logits, bind
from ..site import NORMED, stream_of
from .activations import CaptureError
from .group import Group
from .reductions.reading import Pending, reading_of
from .reductions.reduction import Readout
from .spec import Capture

MAX_GROUPS = 256
"""Most different positions, dtypes and reductions among the captures of a request: each takes memory for every position."""
MAX_RUNS = 16
"""Upper bound of the runs of equal record sizes in a packed prompt.

With more runs all records get the largest size, so that few slices select the states.
"""


class CapturedSite(NamedTuple):
    """A site that is captured.

    Attributes:
        number: number of the site (layers/edits).
        group, column: group and column that keep it.
        shape: shape of a position's state.
        missing: positions that the prompt does not have.
    """

    name: str
    number: int
    group: Group
    column: int
    shape: tuple[int, ...]
    heads: Any
    missing: int


class RecordKind(NamedTuple):
    """The records of generated positions: one object for records that are packed, and copied, together.

    Attributes:
        record_size: elements of a record.
        packed_size: elements of the packed record; 0 if it is sent unpacked.
        groups: `Group.alike` of each.
    """

    record_size: int
    packed_size: int
    groups: tuple[Any, ...]

    @property
    def sent_size(self) -> int:
        """Number of elements sent."""
        return self.packed_size or self.record_size


@lru_cache(maxsize=1024)
def _known_kind(*fields: Any) -> RecordKind:
    return RecordKind(*fields)


@dataclass(frozen=True, eq=False)
class CaptureLayout:
    """Captures of a request, and the layout of each position's record.

    Attributes:
        groups: groups in the order of a record.
        by_site: number of a site -> (the group that stores its states, its column).
        sites: all sites, in the order of a forward pass.
        longest: upper bound of the request's positions.
        captured: [longest] bool, positions that are captured.
        record_sizes, sizes_to_pack: [longest] int64, elements of a position's record that is sent, or that is packed.
        packed_sizes: [longest] int64, elements that it is packed to, without the sums.
        sums_size: elements of the sums over prompt positions.
        reads: whether some states are read on the device.
        stays: whether the states stay on the device: they are packed into nothing that is sent.
        generated: kind of generated positions; None if some group does not capture all of them.
    """

    groups: tuple[Group, ...]
    by_site: dict[int, tuple[Group, int]]
    sites: tuple[CapturedSite, ...]
    num_layers: int
    prompt_len: int
    longest: int
    captured: np.ndarray
    record_sizes: np.ndarray
    sizes_to_pack: np.ndarray
    packed_sizes: np.ndarray
    sums_size: int
    reads: bool
    generated: RecordKind | None
    stays: bool = False

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of the sites."""
        return tuple(site.name for site in self.sites)

    @cached_property
    def by_group(self) -> list[tuple[CapturedSite, ...]]:
        """The sites of each group, by column."""
        of = [[site for site in self.sites if site.group is group] for group in self.groups]
        return [tuple(sorted(found, key=lambda site: site.column)) for found in of]

    @cached_property
    def whole(self) -> list[tuple[str, ...] | None]:
        """Names of the sites of each group. None for a group with other results than states, a column for each site."""
        return [
            tuple(site.name for site in sites)
            if len(sites) == len(group.sites)
            and all(group.spec.reduction.of_states and len(site.shape) == 1 for site in sites)
            else None
            for group, sites in zip(self.groups, self.by_group, strict=True)
        ]

    @property
    def table_bytes(self) -> int:
        """Bytes of the groups' tables, which have an entry for each position."""
        return sum(group.ordinals.nbytes for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Upper bound of the results' bytes on the host."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def in_order(self) -> bool:
        """Whether positions must be copied in order."""
        return any(group.in_order for group in self.groups)

    @cached_property
    def copied(self) -> bool:
        """Whether all that is sent is kept as it is."""
        return self.stays or all(group.copied for group in self.groups)

    @property
    def counts_alike(self) -> bool:
        """Whether `counts` depends on the number of positions only, and not on values."""
        return all(group.spec.reduction.of_states for group in self.groups)

    @property
    def offsets(self) -> dict[int, int]:
        """Number of a site -> its first element in a record."""
        return {site: group.offset_of(column) for site, (group, column) in self.by_site.items()}

    @property
    def max_reserved_size(self) -> int:
        """Upper bound of the ring elements for one position."""
        if not self.sums_size and not self.reads:
            return int(self.record_sizes.max(initial=0))
        packed = self.sizes_to_pack + self.packed_sizes + self.sums_size
        packed = packed if self.reads else packed[: self.prompt_len]
        return int(max(packed.max(initial=0), self.record_sizes.max(initial=0)))

    def packed_size(self, first: int, sizes: np.ndarray) -> int:
        """Elements that records are packed to.

        Args:
            first: first position.
            sizes: [positions] of `CaptureProgress.record_sizes`.
        """
        if len(sizes) == 1:  # decode steps have hundreds of these
            return self.sums_size + self.packed_sizes.item(first) * (sizes.item() > 0)
        return self.sums_size + int(self.packed_sizes[first : first + len(sizes)][sizes > 0].sum())

    def pack(self, records: torch.Tensor, into: torch.Tensor, first: int, sizes: np.ndarray) -> list[Pending]:
        """Write the results of a pass that `packs`: for each group the sums over prompt positions, then the other states.

        Args:
            records: [elements] of the ring, concatenated.
            into: [`packed_size`] of the ring.
            first: first position.
            sizes: [positions] of `CaptureProgress.record_sizes`.

        Returns:
            pending writes, which `read_all` makes together with other requests'.
        """
        pending: list[Pending] = []
        runs = runs_of(records, sizes)
        for group in self.groups:
            into = into[group.pack(runs, into, first, sizes, pending) :]
        return pending

    def pack_rows(self, records: torch.Tensor, into: torch.Tensor) -> list[Pending]:
        """`pack` of generated positions of requests with records of one kind, one of each.

        Args:
            records: [requests, elements].
            into: [requests, `packed_size`].
        """
        pending: list[Pending] = []
        for group in self.groups:
            group.pack_whole(records, into[:, group.sums_size :], pending)
            into = into[:, group.sums_size + group.packed_size :]
        return pending

    def sent_places(self, packed: bool) -> Iterator[tuple[Group, int]]:
        """(group, first element among the values sent of a generated position's record) of each group."""
        start = 0
        for group in self.groups:
            yield group, start + group.sums_size if packed else group.offset
            start += group.sums_size + group.packed_size


def runs_of(records: torch.Tensor, sizes: np.ndarray) -> list[torch.Tensor]:
    """Concatenated records as runs [n, elements] of equal sizes; `sizes` has their elements, or 0 for none."""
    found = sizes[sizes > 0]
    cuts = np.flatnonzero(np.diff(found)) + 1
    counts = np.diff(cuts, prepend=0, append=len(found)).tolist()
    pieces = records.split([int(part.sum()) for part in np.split(found, cuts)])
    return [piece.view(count, -1) for piece, count in zip(pieces, counts, strict=True)]


class CaptureProgress:
    """Progress of a request's captures: the worker's `CapturedRows`, or the scheduler's own.

    Attributes:
        next_position: positions before it were sent. They are not captured again when they are computed again.
        error: reason that the states are lost and capturing stopped, or None.
    """

    def __init__(self, layout: CaptureLayout) -> None:
        self.layout = layout
        self.next_position = 0
        self.error: CaptureError | None = None

    def was_sent(self, stop: int) -> None:
        """The positions before `stop` were sent."""
        self.next_position = max(self.next_position, stop)

    def lose(self, why: str) -> None:
        """Stop capturing. A second call does nothing."""
        if self.error is None:
            self.error = CaptureError(why)

    def first_position(self, start: int) -> int | None:
        """The first captured position from `start` on; None if there is none, or the captures are lost."""
        own = self.layout.captured[start:]
        return None if self.error is not None or not own.any() else start + int(own.argmax())

    def packs(self, first: int) -> bool:
        """Whether the records of a pass from position `first` on are packed.

        So they are where states are read, or stay on the device, or where prompt positions are summed.
        """
        layout = self.layout
        return (
            layout.reads
            or layout.stays
            or (layout.sums_size > 0 and max(first, self.next_position) < layout.prompt_len)
        )

    def record_sizes(self, first: int, count: int) -> np.ndarray:
        """[count] int64: elements of the records of positions `first` and on; 0 for positions that are not captured (again)."""
        layout = self.layout
        sizes = (layout.sizes_to_pack if self.packs(first) else layout.record_sizes)[first : first + count]
        if self.error is not None:
            return np.zeros_like(sizes)
        if first < self.next_position:
            sizes = sizes.copy()
            sizes[: self.next_position - first] = 0
        return sizes

    def reserved_sizes(self, first: int, count: int) -> np.ndarray:
        """[count] int64: ring elements for these positions in one pass: their records, and the packed results."""
        sizes = self.record_sizes(first, count)
        if not self.packs(first) or not sizes.any():
            return sizes
        reserved = sizes + np.where(sizes > 0, self.layout.packed_sizes[first : first + count], 0)
        reserved[0] += self.layout.sums_size
        return reserved

    def reserved_size(self, first: int, count: int) -> int:
        """Sum of `reserved_sizes`."""
        if count != 1 or self.packs(first):
            return int(self.reserved_sizes(first, count).sum())
        return 0 if first < self.next_position or self.error is not None else self.layout.record_sizes.item(first)

    def kind(self, first: int) -> RecordKind | None:
        """The kind of a position's record; None if it is unique, or the position is not captured (again)."""
        known = first >= self.layout.prompt_len and first >= self.next_position and self.error is None
        return self.layout.generated if known else None


def layout_of(
    specs: Sequence[Capture],
    model: ModelSpec,
    prompt_len: int,
    longest: int,
    logits_from: int = 0,
    readout: Readout | None = None,
) -> CaptureLayout:
    """The layout of a request's captures.

    Args:
        specs: captures in any order.
        model: spec with sites and dtype.
        prompt_len: positions of the prompt.
        longest: upper bound of the request's positions.
        logits_from: the first position with logits.
        readout: readout of the model, for reductions and normed sites.

    Raises:
        ValueError: an error of `bind`, or a site with two different captures. Two equal captures of a site become one.
    """
    groups: dict[Any, Group] = {}
    sites: dict[str, CapturedSite] = {}
    by_site: dict[int, tuple[Group, int]] = {}
    asked: dict[str, Bound] = {}
    for spec in specs:
        found = bind(spec, model, prompt_len)
        shape = model.shape(found[0].site.kind)  # all sites of a spec have one kind
        normed = found[0].site.kind in NORMED
        group: Group | None = None
        for bound in found:
            if bound.site.kind == LOGITS:
                bound = at_logits(bound, logits_from)
            name = str(bound.site)
            if _is_repeated(name, bound, asked):
                continue
            if group is None or spec.stays:  # else another layer of the same spec
                own = name if spec.stays else None  # a tensor for each site, freed by itself
                alike = bound.windows, bound.spec.dtype, bound.spec.reduce, prod(shape), normed, bound.spec.stream, own
                if alike not in groups:
                    if len(groups) == MAX_GROUPS:
                        raise ValueError(
                            f"{spec.name}: the captures of a request have more than {MAX_GROUPS} different positions, dtypes and "
                            "reductions: capture more of them alike"
                        )
                    reading = reading_of(bound.spec, normed, prod(shape), model.dtype, readout)
                    groups[alike] = Group(
                        bound.spec, bound.windows, prod(shape), model.dtype, prompt_len, longest, reading
                    )
                group = groups[alike]
            stream = stream_of(bound.site, model) if normed else bound.site
            number = site_index(stream, model.num_hidden_layers)
            column = group.add(number, bound.site)
            _share(name, number, group, column, by_site, sites)
            sites[name] = CapturedSite(name, number, group, column, shape, bound.spec.heads, bound.missing)
    return _laid_out(list(groups.values()), by_site, list(sites.values()), model.num_hidden_layers, prompt_len, longest)


def _laid_out(
    groups: list[Group],
    by_site: dict[int, tuple[Group, int]],
    sites: list[CapturedSite],
    num_layers: int,
    prompt_len: int,
    longest: int,
) -> CaptureLayout:
    # A record ends after the last group that its position is in, so groups with more positions come first. Groups with more
    # unpacked positions come first of all.
    sums, reads = any(group.sums_size for group in groups), any(group.reading is not None for group in groups)
    since = prompt_len if sums and not reads else 0
    groups.sort(key=lambda group: _counts(group.ordinals, since), reverse=True)
    sizes = np.zeros(longest, dtype=np.int64)
    offset = 0
    for index, group in enumerate(groups):
        group.index, group.offset = index, offset
        offset += group.record_size
        sizes[group.ordinals >= 0] = offset
    for group in groups:  # a record has the states of other groups that its own read
        stops = [source[0].offset + source[0].record_size for source in group.sources if source is not None]
        if stops:
            np.maximum(sizes, max(stops), out=sizes, where=group.ordinals >= 0)
    to_pack = packed = sizes
    if sums or reads:
        if np.count_nonzero(np.diff(sizes[: longest if reads else prompt_len])) > MAX_RUNS:
            to_pack = np.where(sizes > 0, sizes.max(), 0)
        packed = np.sum([group.sent_whole * group.packed_size for group in groups], axis=0)
    stays = any(group.spec.stays for group in groups)
    packed = np.zeros_like(sizes) if stays else packed
    sums_size = sum(group.sums_size for group in groups)
    generated = None
    if not stays and prompt_len < longest and all((group.ordinals[prompt_len:] >= 0).all() for group in groups):
        alike = tuple(group.alike(reads) for group in groups)
        generated = _known_kind(
            *(to_pack.item(-1), packed.item(-1) + sums_size) if reads else (sizes.item(-1), 0), alike
        )
    return CaptureLayout(
        tuple(groups), by_site, tuple(sorted(sites, key=lambda site: (site.number, site.group.reading is not None))), num_layers,
        prompt_len, longest, reduce(np.logical_or, [group.captured for group in groups], np.zeros(longest, dtype=np.bool_)),
        sizes, to_pack, packed, sums_size, reads, generated, stays,
    )  # fmt: skip


def _share(
    name: str,
    number: int,
    group: Group,
    column: int,
    by_site: dict[int, tuple[Group, int]],
    sites: dict[str, CapturedSite],
) -> None:
    """Let groups that capture one state differently read the one that is stored, which `by_site` has.
    Raises ValueError: the stored value is not the state, or both store it."""
    stored, of_stored = by_site.setdefault(number, (group, column))
    if stored is group:
        return
    owner = stored, of_stored
    if group.reading is None and stored.reading is not None:  # values sent as stored need their own place
        for other in {id(site.group): site.group for site in sites.values()}.values():
            if number in other.sites and other.reading is not None:
                other.sources[other.sites.index(number)] = group, column
        by_site[number] = owner = group, column
    else:
        group.sources[column] = owner
    if not owner[0].stores_states or (group.reading is None and stored.reading is None):
        other = next(site.name for site in sites.values() if site.number == number)
        raise ValueError(
            f"{name} is the same state as {other}, captured differently: name one of them, with all positions that you want"
        )


def _counts(ordinals: np.ndarray, since: int) -> tuple[int, int]:
    """(captured positions from `since` on, all captured positions)."""
    return int((ordinals[since:] >= 0).sum()), int((ordinals >= 0).sum())


def _is_repeated(name: str, bound: Bound, asked: dict[str, Bound]) -> bool:
    """Whether an earlier capture reads the same of the site. Otherwise it is added to `asked`.
    Raises ValueError: an earlier capture reads the site in another way."""
    first = asked.setdefault(name, bound)
    if first is bound:
        return False
    if _way(first) != _way(bound):
        raise ValueError(
            f"{name} is captured twice, with different positions, dtype, heads, reduction, stream or device: name it once, with "
            "all positions that you want"
        )
    return True


def _way(bound: Bound) -> tuple[Any, ...]:
    """Grouping key of a capture's options."""
    spec = bound.spec
    return bound.windows, bound.missing, spec.dtype, spec.reduce, spec.heads, spec.stream, spec.device
