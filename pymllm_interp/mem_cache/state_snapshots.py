"""`StateSnapshots`: copies of recurrent states at the ends of pages, so that later prompts start behind them.

A state cannot be cut at a page. So a prefix is reused only up to a page that has a snapshot: the states behind it. A snapshot is
found by the number of its page in the prefix cache. There, the path to a page stands for all tokens and edits before it. A snapshot
goes when its page goes. It also goes when another needs its place, and it is the least recently used one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch


class StateSnapshots:
    """Up to `size` snapshots of the slots of a pool, in memory on its device.

    Args:
        states: the pool's, [slots, *shape] each.

    Attributes:
        memory: [size, *shape] of each state.
        num_kept, num_reused: snapshots so far.
    """

    def __init__(self, states: list[torch.Tensor], size: int) -> None:
        self._states, self.size = states, size
        self.memory = [state.new_zeros(size, *state.shape[1:]) for state in states]
        self._places: OrderedDict[int, int] = OrderedDict()  # page -> place, the least recently used first
        self._free = list(range(size))
        self.num_kept = self.num_reused = 0

    @property
    def pages(self) -> set[int]:
        """Pages with a snapshot."""
        return set(self._places)

    def close(self) -> None:
        """Free the memory. Later snapshots are not kept."""
        self._states, self.memory, self._free, self.size = [], [], [], 0
        self._places.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(memory.nbytes for memory in self.memory)

    def longest(self, pages: Sequence[int]) -> int:
        """Number of leading pages of a sequence up to the last one with a snapshot."""
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self._places), 0)

    def keep(self, page: int, slot: int) -> None:
        """Copy a slot's states, which are those at the end of `page`."""
        if page not in self._places and self.size:
            place = self._places[page] = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            own = [memory[place] for memory in self.memory]
            torch._foreach_copy_(own, [state[slot] for state in self._states])
            self.num_kept += 1
        elif page in self._places:
            self._places.move_to_end(page)

    def restore(self, page: int, slot: int) -> None:
        """Copy the snapshot of a page to a slot."""
        place = self._places[page]
        self._places.move_to_end(page)
        own = [state[slot] for state in self._states]
        torch._foreach_copy_(own, [memory[place] for memory in self.memory])
        self.num_reused += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Forget the snapshots of pages that leave the prefix cache."""
        for page in pages:
            if (place := self._places.pop(page, None)) is not None:
                self._free.append(place)

    def clear(self) -> None:
        """Forget all snapshots."""
        self.drop(list(self._places))

    def stats(self) -> dict[str, int]:
        """Places, snapshots there are, and those kept and reused so far."""
        return {
            "places": self.size, "bytes": self.nbytes, "held": len(self._places), "kept": self.num_kept, "reused": self.num_reused,
        }  # fmt: skip
