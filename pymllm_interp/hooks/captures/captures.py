"""`Captures`: all that one request captures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from ..binding import Bound
from .activations import Activations, CaptureError
from .group import Group
from .result_memory import Memory
from .spec import Capture, Project

MAX_RUNS = 16
"""Of a prompt whose blocks have other sizes more often than this, all have the largest: what is wanted of them is found with few
slices then."""


class Captures:
    """What one request captures.

    Args:
        bounds: (number of the site in layers/edits.py, what is captured there, shape of a position's state).
        dtype: of the model's states.
        prompt_len: positions of the prompt.
        longest: positions that the request may come to have.
        num_layers: of the model.

    Attributes:
        next: positions before it are captured, or on their way: computed again, they are not captured again.
        error: why the states are lost; nothing is captured any more then.

    Raises:
        ValueError: a site that is named twice, or two names of one site that are captured differently.
    """

    def __init__(
        self,
        bounds: Iterable[tuple[int, Bound, tuple[int, ...]]],
        dtype: torch.dtype,
        prompt_len: int,
        longest: int,
        num_layers: int,
    ) -> None:
        self.next = 0
        self._num_layers = num_layers
        self._prompt_len = prompt_len
        self.error: CaptureError | None = None
        self._copied = 0
        self.by_site: dict[int, tuple[Group, int]] = {}
        self._names: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        groups: dict[Any, Group] = {}
        spec = group = None
        for site, bound, shape in bounds:
            name = str(bound.site)
            if name in self._names:
                raise ValueError(f"{name} is captured twice: name it once, with all positions that you want")
            if group is None or bound.spec is not spec:  # else it is one of the same spec's layers
                spec = bound.spec
                assert isinstance(spec, Capture)
                alike = bound.windows, spec.dtype, spec.reduce, prod(shape)
                if alike not in groups:
                    groups[alike] = Group(spec, bound.windows, prod(shape), dtype, prompt_len, longest)
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
        self._sums_size = sum(group.sums_size for group in groups.values())
        # A block ends behind the last group that its position is in: those with more positions come first, above all of
        # positions whose blocks leave as they are.
        since = prompt_len if self._sums_size else 0
        self.groups = sorted(groups.values(), key=lambda group: _counts(group.ordinals, since), reverse=True)
        self._block_sizes = np.zeros(longest, dtype=np.int64)
        offset = 0
        for group in self.groups:
            group.offset, offset = offset, offset + group.block_size
            self._block_sizes[group.ordinals >= 0] = offset
        if self._sums_size:
            self._sizes_to_pack = self._block_sizes
            if np.count_nonzero(np.diff(self._block_sizes[:prompt_len])) > MAX_RUNS:
                self._sizes_to_pack = np.where(self._block_sizes > 0, self._block_sizes.max(), 0)
            self._packed_sizes = np.sum([group.left_whole * group.block_size for group in self.groups], axis=0)

    @property
    def in_order(self) -> bool:
        """Whether positions must come in their order, on one thread."""
        return any(group.in_order for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """That what is kept may come to take on the host."""
        return sum(group.num_bytes for group in self.groups)

    def counts(self, num_positions: int) -> list[tuple[str, int, int]]:
        """(site, rows of the prompt, rows of generated tokens) among the first `num_positions`, by site."""
        of_group = {}
        for group in self.groups:
            prompt, generated = np.split(group.captured[:num_positions], [self._prompt_len])
            of_group[id(group)] = int(prompt.sum()), int(generated.sum())
        by_site = sorted(self._names.items(), key=lambda entry: entry[1])
        return [(name, *of_group[id(self.by_site[site][0])]) for name, site in by_site]

    @property
    def largest_room(self) -> int:
        """What one position takes of the ring at most."""
        packed = self._sizes_to_pack + self._packed_sizes + self._sums_size if self._sums_size else self._block_sizes
        return int(max(packed[: self._prompt_len].max(initial=0), self._block_sizes.max(initial=0)))

    @property
    def offsets(self) -> dict[int, int]:
        """Site -> its first element in a position's block."""
        return {site: group.offset_of(column) for site, (group, column) in self.by_site.items()}

    def packs(self, first: int) -> bool:
        """Whether what leaves of a pass from position `first` on is packed: it has prompt positions, which are summed up."""
        return self._sums_size > 0 and max(first, self.next) < self._prompt_len

    def block_sizes(self, first: int, count: int) -> np.ndarray:
        """[count] int64: elements of the blocks of positions `first` and on; 0 for those that are not captured (again)."""
        sizes = (self._sizes_to_pack if self.packs(first) else self._block_sizes)[first : first + count]
        if self.error is not None:
            return np.zeros_like(sizes)
        if first < self.next:
            sizes = sizes.copy()
            sizes[: self.next - first] = 0
        return sizes

    def rooms(self, first: int, count: int) -> np.ndarray:
        """[count] int64: what these positions take of the ring in one pass: their blocks, and what those are packed to."""
        sizes = self.block_sizes(first, count)
        if not self.packs(first) or not sizes.any():
            return sizes
        rooms = sizes + np.where(sizes > 0, self._packed_sizes[first : first + count], 0)
        rooms[0] += self._sums_size
        return rooms

    def packed_size(self, first: int, sizes: np.ndarray) -> int:
        """Elements that blocks of such sizes, of positions `first` and on, are packed to. Whatever `error` has become since."""
        return self._sums_size + int(self._packed_sizes[first : first + len(sizes)][sizes > 0].sum())

    def room_of(self, first: int, count: int) -> int:
        """The sum of `rooms`."""
        if count != 1 or self.packs(first):
            return int(self.rooms(first, count).sum())
        return 0 if first < self.next or self.error is not None else self._block_sizes.item(first)

    def prepare(self, memory: Memory) -> None:
        """Take the memory of the results; a second call does nothing.

        Raises:
            Exception: what `memory.empty` raises, where there is none.
        """
        for group in self.groups:
            group.prepare(memory)

    def rows_of(self, first: int, count: int) -> torch.Tensor | None:
        """[words]: where the blocks of `count` positions, copied as they are, are kept; None where they have to be taken apart
        (`copy`)."""
        return self.groups[0].rows_of(first, count) if len(self.groups) == 1 else None

    def copy(self, blocks: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Copy the states of positions `first` and on out of their blocks, which lie behind each other. After `prepare`, several
        threads may, of different positions, unless those must come `in_order`; then comes `copied`.

        Args:
            blocks: [elements], on the host, as whole numbers of the states' width (`INTEGERS`).
            sizes: [positions], of `block_sizes`.
        """
        for group in self.groups:
            group.copy(blocks, first, sizes)

    def pack(self, blocks: torch.Tensor, into: torch.Tensor, first: int, sizes: np.ndarray) -> None:
        """Make what leaves the device of a pass that `packs`: group after group, the sums over prompt positions, then the states of
        the positions that are wanted as they are.

        Args:
            blocks, into: [elements] of the ring; the blocks, and the rest of their `rooms`.
            first: position.
            sizes: [positions], of `block_sizes`.
        """
        found = sizes[sizes > 0]
        cuts = np.flatnonzero(np.diff(found)) + 1
        counts = np.diff(cuts, prepend=0, append=len(found)).tolist()
        pieces = blocks.split([int(part.sum()) for part in np.split(found, cuts)])
        runs = [piece.view(count, -1) for piece, count in zip(pieces, counts, strict=True)]
        for group in self.groups:
            into = into[group.pack(runs, into, first, sizes) :]

    def unpack(self, packed: np.ndarray, first: int, sizes: np.ndarray) -> None:
        """Take what `pack` made, as `copy` does with blocks."""
        for group in self.groups:
            packed = packed[group.unpack(packed, first, sizes) :]

    def copied(self, stop: int) -> None:
        """All positions before `stop` have been copied."""
        self._copied = stop

    def activations(self, token_ids: Sequence[int]) -> Activations:
        """What was captured of a request that computed the positions of `token_ids`."""
        found = Activations(self._num_layers)
        found.error = self.error
        if self.error is not None:
            return found
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        try:
            columns = {id(group): group.finish(len(tokens), self._copied) for group in self.groups}
        except (MemoryError, RuntimeError) as error:  # no memory for them
            found.error = CaptureError(f"captured states are lost: {error}")
            return found
        tokens_at = {key: tokens[columns[key][0][1]] for key in columns}
        for name, site in sorted(self._names.items(), key=lambda entry: entry[1]):
            group, column = self.by_site[site]
            rows, positions, indexes = columns[id(group)][column]
            shape = self._shapes[name]
            if len(shape) > 1 and not isinstance(group.spec.reduce, Project):
                rows = rows.unflatten(-1, shape)
            found.add(name, rows, positions, tokens_at[id(group)], indexes)
        return found


def _counts(ordinals: np.ndarray, since: int) -> tuple[int, int]:
    """How many positions from `since` on are captured, and how many in all."""
    return int((ordinals[since:] >= 0).sum()), int((ordinals >= 0).sum())
