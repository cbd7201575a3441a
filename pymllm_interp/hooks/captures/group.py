"""Captures: a request's hidden states at declared sites, as they come, and as one tensor a site at its end.

outs = lm.generate(prompts, params, capture=["resid_post.*", Capture("mlp_out.{3,4}", positions=[-1])])
outs[0].activations["resid_post.12"]            # [positions, hidden]
outs[0].activations.positions["resid_post.12"]  # [positions] int64, and .token_ids

`Captures` is what one request asks for. Its sites come in *groups* that are captured alike, and what is captured of a position
is its *block*: of its sites behind each other, group after group. On a CPU a pass hands each site's rows to `Group.take`; on
CUDA the kernels write blocks into a ring (runner/capture_ring.py). What leaves the device are these blocks, which
`Captures.copy` copies out of the ring; or, where the mean of prompt positions is wanted, what `Captures.pack` makes of a pass's
blocks, and `Captures.unpack` takes apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from math import prod

import numpy as np
import torch

from ...layers.edits.codes import ALIGNED
from ..interventions.specs import MAX_RANK
from ..positions import Window, progressions
from .result_memory import FRESH, Memory
from .spec import Capture, Project

INTEGERS = {2: torch.int16, 4: torch.int32}
"""By itemsize, what numpy sees states as: it knows no bfloat16."""
WORDS = torch.complex128
"""What copies see states as that leave them as they are: ALIGNED elements are a whole number of these."""
ALL = slice(None)
ROWS_AHEAD = 256
"""Rows of a result that are cut out together: each operation of torch gives Python's lock away, and who wants it back waits."""


class Group:
    """Sites of one request that are captured alike: at the same positions, with the same dtype and reduction.

    What leaves the device of a state is its dot products with the directions of a `Project`, where those are `MAX_RANK` at most;
    the state in a narrower dtype than the model's, where that is asked for; else the state. Of a `mean` it is the sum of a pass's
    prompt positions, in float32, and the states of the others; of the `last`, the prompt's last position and those behind it.
    What is kept of it lies side by side, [kept, sites, width], in memory that is taken when the first comes: a row for each
    position; of a `mean` the sum of the rows before the newest, and the newest; of the `last` the newest two. A row that was
    computed after the request's end can be left out then; it is never one of the prompt's.

    Args:
        width: of a state.
        dtype: of states.
        longest: positions that the request may come to have.

    Attributes:
        sites: their numbers in layers/edits.py, a column each.
        captured: [longest] bool, by position: whether it is captured.
        ordinals: [longest] int64, by position: its place among those that the result is made of, or -1.
        offset: first element in a position's block.
        probes: [n, width] float32, the directions of the dot products; None where whole states leave the device.
        converted: the narrower dtype of what leaves the device, or None.
        width: values that leave the device at a site.
        dtype: of the result.
        in_order: the positions must come in their order.
    """

    def __init__(
        self, spec: Capture, windows: tuple[Window, ...], width: int, dtype: torch.dtype, prompt_len: int, longest: int
    ) -> None:
        self.spec = spec
        self.sites: list[int] = []
        self.captured = np.zeros(longest, dtype=np.bool_)
        for window in windows:
            self.captured[window.start : window.stop : window.step] = True
        taken = self.captured.copy()
        if spec.reduce == "last":
            taken[np.flatnonzero(taken[:prompt_len])[:-1]] = False
        self.ordinals = np.where(taken, np.cumsum(taken) - 1, -1)
        self._of_prompt = int(taken[:prompt_len].sum())
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
        self._sum_size = 0  # the same of a sum
        if reduce == "mean" and self._of_prompt:
            self._sum_size = width * torch.float32.itemsize // dtype.itemsize
        self._kept_dtype = self._sent_dtype if isinstance(reduce, Project) else self.dtype
        if reduce == "mean":
            self._kept_dtype = torch.float64
        self._kept_as_sent = (
            self._kept_dtype is self._sent_dtype
            and self._site_size * dtype.itemsize == width * self._sent_dtype.itemsize
        )
        self._blocks: torch.Tensor | None = None  # [kept, words], where what is kept of a position is its block
        self._rows_ahead: tuple[torch.Tensor, ...] = ()  # of `_blocks`, from this ordinal on
        self._rows_from = 0
        self._filled: Counter[int] = Counter()  # by column: rows that it has of `take`
        self._rows: torch.Tensor | None = None
        self._into = np.empty(0)

    @property
    def num_positions(self) -> int:
        """Positions that the result is made of at most."""
        return int((self.ordinals >= 0).sum())

    @property
    def block_size(self) -> int:
        """Elements of what a position's block has of it. The next group's part is aligned as this one's is."""
        return _aligned(len(self.sites) * self._site_size)

    @property
    def sums_size(self) -> int:
        """Elements of the sums that leave in a pass with prompt positions; 0 where none do."""
        return _aligned(len(self.sites) * self._sum_size)

    @property
    def left_whole(self) -> np.ndarray:
        """[longest] bool, by position: whether its state leaves the device in such a pass, too."""
        return self.ordinals >= (self._of_prompt if self._sum_size else 0)

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
            self.prepare(FRESH)
            taken, states = ordinals[new], rows.detach()[new]
            probes = None if self.probes is None else self.probes.to(states.device)
            sent = _integers(self._sent(states, probes).cpu())
            self._keep(int(taken[0]), sent[:, None], slice(column, column + 1))
            self._filled[column] = int(taken[-1]) + 1

    def write(
        self, states: torch.Tensor, probes: torch.Tensor | None, memory: torch.Tensor, place: int, stride: int
    ) -> None:
        """Write what leaves the device of states [n, width], as kernels do.

        Args:
            probes: the group's, on the device.
            memory: [elements] of the ring.
            place: the first one's first element.
            stride: elements from one to the next.
        """
        target = memory.as_strided((len(states), self._site_size), (stride, 1), place).view(self._sent_dtype)
        target[:, : self.width].copy_(self._sent(states, probes))

    def prepare(self, memory: Memory) -> None:
        """Take the memory of what is kept; a second call does nothing."""
        if self._rows is None:
            self._memory, self._rows = memory, memory.empty(self._shape, self._kept_dtype)
            if self.spec.reduce == "mean":
                self._into = self._rows.zero_().numpy()
            else:
                self._into = _integers(self._rows)
                padded = len(self.sites) * self._site_size < self.block_size
                if self._kept_as_sent and not self.in_order and not padded:
                    self._blocks = self._rows.flatten(1).view(WORDS)

    def rows_of(self, first: int, count: int) -> torch.Tensor | None:
        """[words], where the group's part of the blocks of `count` positions is kept as it is; None where it is not."""
        ordinal, last = self.ordinals.item(first), self.ordinals.item(first + count - 1)
        if self._blocks is None or ordinal < 0 or last - ordinal != count - 1:
            return None
        if count > 1:
            return self._blocks[ordinal : ordinal + count].flatten()
        place = ordinal - self._rows_from
        if not 0 <= place < len(self._rows_ahead):
            self._rows_ahead = self._blocks[ordinal : ordinal + ROWS_AHEAD].unbind()
            self._rows_from, place = ordinal, 0
        return self._rows_ahead[place]

    def copy(self, blocks: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Copy the group's part of the blocks of positions `first` and on; see `Captures.copy`."""
        ordinals = self.ordinals[first : first + len(sizes)]
        wanted = np.flatnonzero((ordinals >= 0) & (sizes > 0))
        if not len(wanted):
            return
        starts, sizes = (np.cumsum(sizes) - sizes)[wanted], sizes[wanted]
        cuts = np.flatnonzero((np.diff(starts) != sizes[:-1]) | (np.diff(sizes) != 0)) + 1
        for begin, end in pairwise((0, *cuts.tolist(), len(wanted))):
            count, size, start = end - begin, int(sizes[begin]), int(starts[begin])
            rows = blocks[start : start + count * size].reshape(count, size)
            self._keep(int(ordinals[wanted[begin]]), self._part_of(rows[:, self.offset :]))

    def pack(self, runs: Sequence[torch.Tensor], into: torch.Tensor, first: int, sizes: np.ndarray) -> int:
        """Put together what leaves of the group; see `Captures.pack`. Returns how many elements of `into` that takes.

        Args:
            runs: [n, elements] each, the blocks of positions `first` and on that have a size, in order.
        """
        summed, whole, _ = self._places(first, sizes)
        width = len(self.sites) * self.width
        sums = into[: self.sums_size].view(torch.float32)[:width].zero_() if self._sum_size else into[:0]
        for states in self._selected(runs, summed):
            sums += states[:, :width].sum(0, dtype=torch.float32)
        start = self.sums_size
        for parts in self._selected(runs, whole):
            into[start : start + parts.numel()].view_as(parts).copy_(parts)
            start += parts.numel()
        return start

    def unpack(self, packed: np.ndarray, first: int, sizes: np.ndarray) -> int:
        """Take what `pack` put together. Returns how many elements that was."""
        summed, whole, ordinal = self._places(first, sizes)
        start = self.sums_size
        stop = start + len(whole) * self.block_size
        if len(summed):
            sums = packed[:start].view(np.float32)[: len(self.sites) * self.width]
            self._add(sums.reshape(len(self.sites), -1), ALL)
        if len(whole):
            self._keep(ordinal, self._part_of(packed[start:stop].reshape(len(whole), -1)))
        return stop

    def finish(self, num_positions: int, copied: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """For each column (rows, their positions, indexes of `Project`) of the first `num_positions`: a row that was computed
        after the request's end is left out. Positions before `copied` have come by `copy`."""
        captured = self.ordinals[:num_positions] >= 0
        copied_rows = int((self.ordinals[:copied] >= 0).sum())
        arrived = [max(self._filled[column], copied_rows) for column in range(len(self.sites))]
        count, newest = min(*arrived, int(captured.sum())), max(arrived)
        if self.in_order and count < newest - (newest > self._of_prompt):
            count = 0  # it gave way, and ended before it had come as far again: what is kept is of later rows
        positions = torch.from_numpy(np.flatnonzero(captured)[:count])
        placed = positions[-1:] if self.spec.reduce == "last" else positions
        self.prepare(FRESH)
        assert self._rows is not None
        if self.spec.reduce != "mean":  # whose sums nobody gets
            self._memory.clear(self._rows, min(count, len(self._rows)))
        return [(rows, placed, indexes) for rows, indexes in self._results(count, arrived)]

    @property
    def _shape(self) -> tuple[int, int, int]:
        return 2 if self.in_order else self.num_positions, len(self.sites), self.width

    def _places(self, first: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Of the blocks of positions `first` and on, those that have a size: which the group sums up, which it wants as they are,
        and the first ordinal of these, or -1."""
        ordinals = self.ordinals[first : first + len(sizes)][sizes > 0]
        whole = np.flatnonzero(self.left_whole[first : first + len(sizes)][sizes > 0])
        summed = np.flatnonzero((ordinals >= 0) & (ordinals < self._of_prompt)) if self._sum_size else whole[:0]
        return summed, whole, int(ordinals[whole[0]]) if len(whole) else -1

    def _sent(self, states: torch.Tensor, probes: torch.Tensor | None) -> torch.Tensor:
        """What leaves the device of states [n, width]: [n, `width`]. `probes` are those of the group, on their device."""
        if probes is not None:
            states = torch.stack([(states.float() * probe).sum(-1) for probe in probes], -1)
        return states.to(self._sent_dtype)

    def _selected(self, runs: Sequence[torch.Tensor], rows: np.ndarray) -> Iterator[torch.Tensor]:
        """The group's parts [n, block_size] of some of the blocks, piece by piece."""
        start = 0
        for run in runs:
            begin, end = np.searchsorted(rows, (start, start + len(run)))
            for piece in _slices(rows[begin:end] - start):
                yield run[piece, self.offset : self.offset + self.block_size]
            start += len(run)

    def _part_of(self, parts: np.ndarray) -> np.ndarray:
        """States [n, sites, width], as whole numbers of the width of what is sent, at the front of parts [n, elements]."""
        parts = parts[:, : len(self.sites) * self._site_size].reshape(len(parts), -1, self._site_size)
        return parts.view(self._sent_integer)[..., : self.width]

    def _keep(self, ordinal: int, rows: np.ndarray, columns: slice = ALL) -> None:
        """Keep what is wanted of rows [n, columns, width] of consecutive ordinals from `ordinal` on."""
        if self.spec.reduce == "mean":
            for row in rows:  # one by one, so that the sum does not depend on which came together
                self._add(_numbers(row, self._sent_dtype), columns)
        elif self.spec.reduce == "last":
            for i in range(max(0, len(rows) - 2), len(rows)):
                self._put((ordinal + i) % 2, rows[i : i + 1], columns)
        else:
            self._put(ordinal, rows, columns)

    def _add(self, row: np.ndarray, columns: slice) -> None:
        """Add a row [columns, width] to the sums, as the newest."""
        before, newest = self._into[:, columns]
        with np.errstate(invalid="ignore"):  # infinite states come to NaN, as they do in torch
            before += newest
        newest[:] = row

    def _put(self, place: int, rows: np.ndarray, columns: slice) -> None:
        if self._kept_dtype is self._sent_dtype:
            # torch would have its pool of threads come together for every row, with those of the model's passes on a CPU.
            self._into[place : place + len(rows), columns] = rows
        else:
            assert self._rows is not None
            self._rows[place : place + len(rows), columns].copy_(torch.from_numpy(rows).view(self._sent_dtype))

    def _results(self, count: int, arrived: list[int]) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        """For each column (rows, indexes of `Project`) of the first `count` positions, of which so many arrived."""
        assert self._rows is not None
        rows, reduce = self._rows, self.spec.reduce
        if isinstance(reduce, Project):
            return [self._projected(rows[:count, column].detach(), reduce) for column in range(len(self.sites))]
        if reduce == "mean":
            without = torch.tensor(arrived) > count  # leave out the newest
            rows = torch.where(without[:, None], rows[:1], rows.sum(0, keepdim=True))[:count] / max(count, 1)
        elif reduce == "last":
            newest = (count - 1) % 2
            rows = rows[newest : newest + 1][:count]
        else:
            rows = rows[:count]
        # All columns at once. Not by `unbind`: autograd keeps its tensors from being edited in place.
        return zip(rows.to(self.dtype).flatten(1).unsafe_split(self.width, 1), repeat(None))

    def _projected(self, rows: torch.Tensor, reduce: Project) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what `reduce` leaves of rows [n, width] of one column, indexes)."""
        indexes = None
        rows = rows if self.probes is not None else rows.float() @ reduce.directions.T
        if reduce.top_k is not None:
            rows, indexes = rows.topk(reduce.top_k, dim=-1)
        return rows.to(self.dtype), indexes


def _integers(values: torch.Tensor) -> np.ndarray:
    """The same memory as whole numbers of the same width."""
    return values.view(INTEGERS[values.dtype.itemsize]).numpy()


def _numbers(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of such whole numbers, of `dtype` or float32."""
    if dtype is torch.bfloat16:  # the upper half of a float32
        return (values.astype(np.int32) << 16).view(np.float32)
    return values.view(np.float16 if dtype is torch.float16 else np.float32)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _slices(rows: np.ndarray) -> list[slice]:
    """Slices that select `rows`, whole numbers in ascending order."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return [slice(int(rows[0]), int(rows[-1]) + 1)]
    return [slice(run.start, run.stop, run.step) for run in progressions(rows.tolist())]
