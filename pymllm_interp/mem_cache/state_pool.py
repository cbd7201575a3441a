"""`StatePool`: the convolution and recurrent states of layers without KV, a slot for each running request; and their snapshots.

A state-space or linear-attention layer keeps one state of fixed size in place of K and V of every position. A slot holds the states
of all such layers. Its number is the request's row in the `ReqToTokenPool`. Slot 0 is padding's: no request reads it.

A slot is not cleared when it changes hands. The first chunk of a request starts without a state, and writes its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from ..core.model_spec import StatePlace

StateKind = Literal["conv", "recurrent"]


@dataclass(frozen=True)
class StateLayout:
    """Layout of one state of a layer, which its code in transformers keeps for each sequence.

    Attributes:
        kind: "conv" for the last inputs of a convolution.
        shape: shape of one request's state.
        dtype: dtype that the layer's code reads and writes.
        layer: index of the decoder layer, or None if unknown.
    """

    kind: StateKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: int | None = None

    def stored(self, recurrent: torch.dtype) -> torch.dtype:
        """The pool's dtype of it: `recurrent` for recurrent states. Convolutions keep inputs, in the dtype that these have."""
        return recurrent if self.kind == "recurrent" else self.dtype


@dataclass(frozen=True)
class HostState:
    """The states of one slot on the host, from `StatePool.swap_out`."""

    states: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return sum(state.nbytes for state in self.states)


def recurrent_places(layouts: Sequence[StateLayout], num_layers: int) -> tuple[StatePlace | None, ...]:
    """The recurrent state of each layer; None for a layer without, or with several."""
    found: dict[int | None, list[StatePlace]] = {}
    for number, layout in enumerate(layouts):
        if layout.kind == "recurrent":
            found.setdefault(layout.layer, []).append(StatePlace(number, layout.shape))
    return tuple(own[0] if len(own := found.get(layer, [])) == 1 else None for layer in range(num_layers))


def slot_bytes(layouts: Sequence[StateLayout], dtype: torch.dtype) -> int:
    """Bytes of one slot.

    Args:
        dtype: dtype of recurrent states in the pool.
    """
    return sum(prod(layout.shape) * layout.stored(dtype).itemsize for layout in layouts)


class StatePool:
    """States of all layers, an allocation for each.

    Args:
        layouts: layout of each state of each layer; their order numbers them.
        size: slots to hand out, numbered 1..size; slot 0 comes on top.
        dtype: dtype of recurrent states.
        device: device of the memory.
        num_snapshots: number of slot snapshots that fit.

    Attributes:
        states: [size + 1, *shape] of each state.
        snapshots: slot snapshots for the prefix cache.
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        num_snapshots: int = 0,
    ) -> None:
        self.layouts, self.size, self.dtype = tuple(layouts), size, dtype
        self.states = [
            torch.zeros(size + 1, *layout.shape, dtype=layout.stored(dtype), device=device) for layout in self.layouts
        ]
        self.snapshots = StateSnapshots(self.states, num_snapshots)

    def close(self) -> None:
        """Free the memory, whoever still holds the pool."""
        self.snapshots.close()
        self.states = []

    def tensors(self) -> list[torch.Tensor]:
        """The memory of slots and snapshots."""
        return [*self.states, *self.snapshots.memory]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(state.nbytes for state in self.states)

    def memory(self, index: int) -> torch.Tensor:
        """A state of all slots, [slots, *shape]: the pool's own memory."""
        return self.states[index]

    def read(self, index: int, slots: torch.Tensor) -> torch.Tensor:
        """A copy of a state of some slots, in the dtype of the layer's code.

        Args:
            slots: [batch] int64.

        Returns:
            [batch, *shape].
        """
        return self.states[index].index_select(0, slots).to(self.layouts[index].dtype)

    def write(self, index: int, slots: torch.Tensor, value: torch.Tensor) -> None:
        """Write a state [batch, *shape] to `slots` [batch] int64. Slot 0 may come more than once.
        Raises ValueError: a state of another shape."""
        own = self.states[index]
        if value.shape[1:] != own.shape[1:]:
            raise ValueError(f"a state of shape {tuple(value.shape[1:])}, but the slots have {tuple(own.shape[1:])}")
        own.index_copy_(0, slots, value.to(own.dtype))

    def swap_out(self, slot: int) -> HostState:
        """A copy of a slot on the host, bit for bit."""
        return HostState(tuple(state[slot].to("cpu", copy=True) for state in self.states))

    def swap_in(self, slot: int, host: HostState) -> None:
        """Write the states from `swap_out` to a slot, bit for bit."""
        for state, saved in zip(self.states, host.states, strict=True):
            state[slot].copy_(saved)

    def stats(self) -> dict[str, Any]:
        """Slots to hand out, bytes of all, and snapshots."""
        return {"slots": self.size, "bytes": self.nbytes, "snapshots": self.snapshots.stats()}


class StateSnapshots:
    """Up to `size` copies of recurrent states at the ends of pages, on the pool's device. Later prompts start behind them.

    A state cannot be cut at a page. So a prefix is reused only up to a page that has a snapshot: the states behind it. A snapshot
    is found by the number of its page in the prefix cache. There, the path to a page stands for all tokens and edits before it.
    A snapshot goes when its page goes. It also goes when another needs its place, and it is the least recently used one.

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
