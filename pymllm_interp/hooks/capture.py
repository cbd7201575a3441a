"""Captures: a request's hidden states at declared sites, as they come, and as one tensor a site at its end.

outs = lm.generate(prompts, params, capture=["resid_post.*", Capture("mlp_out.{3,4}", positions=[-1])])
outs[0].activations["resid_post.12"]            # [positions, hidden]
outs[0].activations.positions["resid_post.12"]  # [positions] int64, and .token_ids

`Captures` is what one request asks for. Its sites come in *groups* that are captured alike, and what leaves the device of a
position is its *block*: of its sites behind each other, group after group. On a CPU a pass hands each site's rows to
`Group.take`; on CUDA the kernels write blocks into a ring (runner/capture_ring.py), from which `Captures.copy` copies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from ..layers.table_edits import ALIGNED
from .intervention import MAX_RANK, Bound, Capture, Project, Window, ordinals_of

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""(shape, dtype) -> a tensor on the CPU that nothing has been written to."""
INTEGERS = {2: torch.int16, 4: torch.int32}
"""By itemsize, what numpy sees states as: it knows no bfloat16."""
ALL = slice(None)


class CaptureError(RuntimeError):
    """What a request was to capture is lost."""


class Activations(Mapping[str, torch.Tensor]):
    """What was captured of one completion, by site: [positions, width], of `q`, `k`, `v` and `z` [positions, heads, head_dim]; on
    the CPU.

    A reduction leaves [1, width] (`mean`, `last`), or [positions, directions] (`Project`; with `top_k` the largest of them, whose
    places are in `indexes`). Sites that were captured alike share memory: keeping one keeps them all, a `clone()` does not.
    What lies in that memory outside of the tensors may be left from other results: save or send a `clone()`.

    Attributes:
        positions: by site, [positions] int64: of the input tokens that the rows belong to, in ascending order.
        token_ids: by site, [positions] int64: those tokens.
        indexes: by site, [positions, top_k] int64, for `Project(top_k=...)`.
        error: why the states were lost; reading any of them raises it. None where they were not.
    """

    def __init__(self) -> None:
        self._rows: dict[str, torch.Tensor] = {}
        self.positions: dict[str, torch.Tensor] = {}
        self.token_ids: dict[str, torch.Tensor] = {}
        self.indexes: dict[str, torch.Tensor] = {}
        self.error: CaptureError | None = None

    def add(self, site: str, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Put a site's rows in."""
        self._rows[site], self.positions[site], self.token_ids[site] = rows, positions, token_ids

    def __getitem__(self, site: str) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if site not in self._rows:
            raise KeyError(f"{site!r} was not captured; there is {', '.join(self._rows) or 'nothing'}")
        return self._rows[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Activations({ {site: list(rows.shape) for site, rows in self._rows.items()} })"


class Group:
    """Sites of one request that are captured alike: at the same positions, with the same dtype and reduction.

    What leaves the device of a state is its dot products with the directions of a `Project`, where those are `MAX_RANK` at most;
    the state in a narrower dtype than the model's, where that is asked for; else the state. What is kept of it lies side by side,
    [kept, sites, width], in memory that is taken when the first comes: a row for each position; of a `mean` the sum of the rows
    before the newest, and the newest; of the `last` the newest two. A row that was computed after the request's end can be
    left out then.

    Args:
        width: of a state.
        dtype: of states.
        longest: positions that the request may come to have.

    Attributes:
        sites: their numbers in layers/edits.py, a column each.
        ordinals: [longest] int64, by position: its place among those that are captured, or -1.
        offset: first element in a position's block.
        probes: [n, width] float32, the directions of the dot products; None where whole states leave the device.
        converted: the narrower dtype of what leaves the device, or None.
        width: values that leave the device at a site.
        dtype: of the result.
        in_order: the positions must come in their order.
    """

    def __init__(
        self, spec: Capture, windows: tuple[Window, ...], width: int, dtype: torch.dtype, longest: int
    ) -> None:
        self.spec, self.windows = spec, windows
        self.sites: list[int] = []
        self.ordinals = ordinals_of(windows, torch.arange(longest)).numpy()
        self.offset = 0
        self.probes: torch.Tensor | None = None
        self.converted: torch.dtype | None = None
        asked, reduce = spec.dtype if isinstance(spec.dtype, torch.dtype) else None, spec.reduce
        if isinstance(reduce, Project):
            self.dtype = asked or torch.float32
            if len(reduce.directions) <= MAX_RANK:
                self.probes, width = reduce.directions, len(reduce.directions)
        else:
            self.dtype = asked or dtype
            if reduce != "mean" and self.dtype.itemsize < dtype.itemsize:
                self.converted = self.dtype
        self.width, self.in_order = width, reduce in ("mean", "last")
        self._sent_dtype = torch.float32 if self.probes is not None else self.converted or dtype
        self._sent_integer = np.dtype(f"i{self._sent_dtype.itemsize}")
        self._site_size = -(-width * self._sent_dtype.itemsize // dtype.itemsize)  # elements of a block
        self._kept_dtype = self._sent_dtype if isinstance(reduce, Project) else self.dtype
        if reduce == "mean":
            self._kept_dtype = torch.float64
        self._filled: Counter[int] = Counter()  # by column: rows that it has of `take`
        self._rows: torch.Tensor | None = None
        self._into = np.empty(0)

    @property
    def num_positions(self) -> int:
        """Positions that are captured at most."""
        return int((self.ordinals >= 0).sum())

    @property
    def block_size(self) -> int:
        """Elements of what a position's block has of it. The next group's part is aligned as this one's is."""
        return -(-len(self.sites) * self._site_size // ALIGNED) * ALIGNED

    @property
    def num_bytes(self) -> int:
        """Of what is kept."""
        return prod(self._shape) * self._kept_dtype.itemsize

    def offset_of(self, column: int) -> int:
        """A site's first element in a position's block."""
        return self.offset + column * self._site_size

    def take(self, column: int, rows: torch.Tensor, ordinals: torch.Tensor) -> None:
        """Take a column's states [n, width] at `ordinals` [n] of the group's; those it has, or that are -1, are left out."""
        new = ordinals >= self._filled[column]
        if new.any():
            self.prepare(_empty)
            taken, states = ordinals[new], rows.detach()[new]
            if self.probes is not None:
                states = torch.stack([(states.float() * probe).sum(-1) for probe in self.probes.to(states.device)], -1)
            sent = _integers(states.to("cpu", self._sent_dtype))
            self._keep(int(taken[0]), sent[:, None], slice(column, column + 1))
            self._filled[column] = int(taken[-1]) + 1

    def prepare(self, empty: Empty) -> None:
        """Take the memory of what is kept; a second call does nothing."""
        if self._rows is None:
            self._rows = empty(self._shape, self._kept_dtype)
            if self.spec.reduce == "mean":
                self._into = self._rows.zero_().numpy()
            else:
                self._into = _integers(self._rows)

    def copy(self, blocks: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Copy the group's part of the blocks of positions `first` and on; see `Captures.copy`."""
        if len(sizes) == 1:  # without numpy's ado: of a decode step, a row for each request
            ordinal = self.ordinals.item(first)
            if ordinal >= 0 and sizes.item():
                self._keep(ordinal, self._part_of(blocks[None]))
            return
        ordinals = self.ordinals[first : first + len(sizes)]
        wanted = np.flatnonzero((ordinals >= 0) & (sizes > 0))
        if not len(wanted):
            return
        starts, sizes = (np.cumsum(sizes) - sizes)[wanted], sizes[wanted]
        cuts = np.flatnonzero((np.diff(starts) != sizes[:-1]) | (np.diff(sizes) != 0)) + 1
        for begin, end in pairwise((0, *cuts.tolist(), len(wanted))):
            count, size, start = end - begin, int(sizes[begin]), int(starts[begin])
            rows = blocks[start : start + count * size].reshape(count, size)
            self._keep(int(ordinals[wanted[begin]]), self._part_of(rows))

    def finish(self, num_positions: int, copied: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """For each column (rows, their positions, indexes of `Project`) of the first `num_positions`: a row that was computed
        after the request's end is left out. Positions before `copied` have come by `copy`."""
        captured = self.ordinals[:num_positions] >= 0
        copied_rows = int((self.ordinals[:copied] >= 0).sum())
        arrived = [max(self._filled[column], copied_rows) for column in range(len(self.sites))]
        count = min(*arrived, int(captured.sum()))
        if self.in_order and count < max(arrived) - 1:
            count = 0  # it gave way, and ended before it had come as far again: what is kept is of later rows
        positions = torch.from_numpy(np.flatnonzero(captured)[:count])
        placed = positions[-1:] if self.spec.reduce == "last" else positions
        results = [self._result(column, count, arrived[column]) for column in range(len(self.sites))]
        return [(rows, placed, indexes) for rows, indexes in results]

    @property
    def _shape(self) -> tuple[int, int, int]:
        return 2 if self.in_order else self.num_positions, len(self.sites), self.width

    def _part_of(self, blocks: np.ndarray) -> np.ndarray:
        """What the group has of blocks [n, elements]: [n, sites, width], whole numbers of the width of what is sent."""
        part = blocks[:, self.offset : self.offset_of(len(self.sites))].reshape(len(blocks), -1, self._site_size)
        return part.view(self._sent_integer)[..., : self.width]

    def _keep(self, ordinal: int, rows: np.ndarray, columns: slice = ALL) -> None:
        """Keep what is wanted of rows [n, columns, width] of consecutive ordinals from `ordinal` on."""
        if self.spec.reduce == "mean":
            before, newest = self._into[:, columns]
            with np.errstate(invalid="ignore"):  # infinite states come to NaN, as they do in torch
                for row in rows:  # one by one, so that the sum does not depend on which came together
                    before += newest
                    newest[:] = _numbers(row, self._sent_dtype)
        elif self.spec.reduce == "last":
            for i in range(max(0, len(rows) - 2), len(rows)):
                self._put((ordinal + i) % 2, rows[i : i + 1], columns)
        else:
            self._put(ordinal, rows, columns)

    def _put(self, place: int, rows: np.ndarray, columns: slice) -> None:
        if self._kept_dtype is self._sent_dtype:
            # torch would have its pool of threads come together for every row, with those of the model's passes on a CPU.
            self._into[place : place + len(rows), columns] = rows
        else:
            assert self._rows is not None
            self._rows[place : place + len(rows), columns].copy_(torch.from_numpy(rows).view(self._sent_dtype))

    def _result(self, column: int, count: int, arrived: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows, indexes of `Project`) of a column's first `count` positions, of which so many arrived."""
        self.prepare(_empty)
        assert self._rows is not None
        rows, indexes, reduce = self._rows[:, column], None, self.spec.reduce
        if reduce == "mean":
            sums = rows.sum(0, keepdim=True) if arrived == count else rows[:1]
            rows = sums[:count] / max(count, 1)
        elif reduce == "last":
            newest = (count - 1) % 2
            rows = rows[newest : newest + 1][:count]
        else:
            rows = rows[:count]
        if isinstance(reduce, Project):
            rows = rows if self.probes is not None else rows.float() @ reduce.directions.T
            if reduce.top_k is not None:
                rows, indexes = rows.topk(reduce.top_k, dim=-1)
        return rows.to(self.dtype), indexes


class Captures:
    """What one request captures.

    Args:
        bounds: (number of the site in layers/edits.py, what is captured there, shape of a position's state).
        dtype: of the model's states.
        longest: positions that the request may come to have.

    Attributes:
        next: positions before it are captured, or on their way: computed again, they are not captured again.
        error: why the states are lost; nothing is captured any more then.

    Raises:
        ValueError: a site that is named twice, or two names of one site that are captured differently.
    """

    def __init__(self, bounds: Iterable[tuple[int, Bound, tuple[int, ...]]], dtype: torch.dtype, longest: int) -> None:
        self.next = 0
        self.error: CaptureError | None = None
        self._copied = 0
        self.by_site: dict[int, tuple[Group, int]] = {}
        self._names: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        groups: dict[Any, Group] = {}
        for site, bound, shape in bounds:
            spec, name = bound.spec, str(bound.site)
            assert isinstance(spec, Capture)
            if name in self._names:
                raise ValueError(f"{name} is captured twice: name it once, with all positions that you want")
            alike = bound.windows, spec.dtype, spec.reduce, prod(shape)
            if alike not in groups:
                groups[alike] = Group(spec, bound.windows, prod(shape), dtype, longest)
            group = groups[alike]
            if self.by_site.setdefault(site, (group, len(group.sites)))[0] is not group:
                other = next(known for known, number in self._names.items() if number == site)
                raise ValueError(
                    f"{name} is the same state as {other}, captured differently: name one of them, with all positions that you "
                    "want"
                )
            if site not in group.sites:
                group.sites.append(site)
            self._names[name], self._shapes[name] = site, shape
        # A block ends behind the last group that its position is in: those with more positions come first.
        self.groups = sorted(groups.values(), key=lambda group: -group.num_positions)
        self._block_sizes = np.zeros(longest, dtype=np.int64)
        offset = 0
        for group in self.groups:
            group.offset, offset = offset, offset + group.block_size
            self._block_sizes[group.ordinals >= 0] = offset

    @property
    def in_order(self) -> bool:
        """Whether positions must come in their order, on one thread."""
        return any(group.in_order for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """That what is kept may come to take on the host."""
        return sum(group.num_bytes for group in self.groups)

    def positions(self, num_positions: int) -> list[tuple[str, np.ndarray]]:
        """(site, positions [rows] below `num_positions` that are captured there), by site."""
        return [
            (name, np.flatnonzero(self.by_site[site][0].ordinals[:num_positions] >= 0))
            for name, site in sorted(self._names.items(), key=lambda entry: entry[1])
        ]

    @property
    def largest_block(self) -> int:
        """Elements of the largest block of a position."""
        return int(self._block_sizes.max(initial=0))

    @property
    def offsets(self) -> dict[int, int]:
        """Site -> its first element in a position's block."""
        return {site: group.offset_of(column) for site, (group, column) in self.by_site.items()}

    def block_sizes(self, first: int, count: int) -> np.ndarray:
        """[count] int64: elements of the blocks of positions `first` and on; 0 for those that are not captured (again)."""
        sizes = self._block_sizes[first : first + count]
        if self.error is not None:
            return np.zeros_like(sizes)
        if first < self.next:
            sizes = sizes.copy()
            sizes[: self.next - first] = 0
        return sizes

    def size_of(self, first: int, count: int) -> int:
        """The sum of `block_sizes`."""
        if count != 1:
            return int(self.block_sizes(first, count).sum())
        return 0 if first < self.next or self.error is not None else self._block_sizes.item(first)

    def prepare(self, empty: Empty) -> None:
        """Take the memory of the results; a second call does nothing.

        Raises:
            Exception: what `empty` raises, where there is none.
        """
        for group in self.groups:
            group.prepare(empty)

    def copy(self, blocks: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Copy the states of positions `first` and on out of their blocks, which lie behind each other. After `prepare`, several
        threads may, of different positions, unless those must come `in_order`; then comes `copied`.

        Args:
            blocks: [elements], on the host, as whole numbers of the states' width (`INTEGERS`).
            sizes: [positions], of `block_sizes`.
        """
        for group in self.groups:
            group.copy(blocks, first, sizes)

    def copied(self, stop: int) -> None:
        """All positions before `stop` have been copied."""
        self._copied = stop

    def activations(self, token_ids: Sequence[int]) -> Activations:
        """What was captured of a request that computed the positions of `token_ids`."""
        found = Activations()
        found.error = self.error
        if self.error is not None:
            return found
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        try:
            columns = {id(group): group.finish(len(tokens), self._copied) for group in self.groups}
        except RuntimeError as error:  # no memory for them
            found.error = CaptureError(f"captured states are lost: {error}")
            return found
        tokens_at = {key: tokens[columns[key][0][1]] for key in columns}
        for name, site in sorted(self._names.items(), key=lambda entry: entry[1]):
            group, column = self.by_site[site]
            rows, positions, indexes = columns[id(group)][column]
            shape = self._shapes[name]
            if len(shape) > 1 and not isinstance(group.spec.reduce, Project):
                rows = rows.unflatten(-1, shape)
            found.add(name, rows, positions, tokens_at[id(group)])
            if indexes is not None:
                found.indexes[name] = indexes
        return found


def _integers(values: torch.Tensor) -> np.ndarray:
    """The same memory as whole numbers of the same width."""
    return values.view(INTEGERS[values.dtype.itemsize]).numpy()


def _numbers(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of such whole numbers, of `dtype` or float32."""
    if dtype is torch.bfloat16:  # the upper half of a float32
        return (values.astype(np.int32) << 16).view(np.float32)
    return values.view(np.float16 if dtype is torch.float16 else np.float32)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
