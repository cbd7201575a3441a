"""`BlockSaves`: the names that a request's block bound, and which of their values it saved."""

from __future__ import annotations

import itertools
import weakref
from _ctypes import PyObj_FromPtr
from collections.abc import Mapping
from typing import Any

import torch

from ..blocks.block_analysis import augmented
from ..blocks.loops import PREFIX
from ..nnsight_compat import Mediator, mark
from .save_transfer import SaveTransfer
from .saved import batch_views, find_tensors, give_own_storage


class BlockSaves:
    """Names and saves of a request's own block. Blocks of persistent edits save nothing.

    Args:
        block: None for a request that has persistent edits only.

    Attributes:
        transfer: copies saves to the caller's device.
        ids: ids of the objects that ``.save()`` marked.
        outer: values that were saved above the block, by the name that they had there.
        collected: values that the engine delivered when the requests had ended, by name (`Request.saves`).
        changed: a block of the request has run since the saves were last searched.
    """

    __slots__ = ("_block", "_done", "_seen", "changed", "collected", "ids", "outer", "transfer")

    def __init__(self, block: Mediator | None, transfer: SaveTransfer) -> None:
        self._block, self.transfer = block, transfer
        self.ids = SavedIds()
        self.outer: dict[str, Any] = {}
        self.collected: dict[str, Any] = {}
        self.changed = True
        self._seen: dict[int, int] = {}
        self._done: torch.cuda.Event | None = None

    def names(self) -> dict[str, Any]:
        """The values that the block bound, by name."""
        if self._block is None:
            return {}
        return {name: value for name, value in self._block.lcls.writes().items() if not name.startswith(PREFIX)}

    def saved_names(self) -> dict[str, Any]:
        """The values that the block saved, by name."""
        return {name: value for name, value in self.names().items() if id(value) in self.ids}

    def unsaved_containers(self) -> list[str]:
        """Names of containers that hold saved values, and that are not saved themselves: after the block they are gone."""
        found = [
            (name, value) for name, value in self.names().items() if self.ids and isinstance(value, list | tuple | dict)
        ]
        parts = {
            name: value.values() if isinstance(value, dict) else value
            for name, value in found
            if id(value) not in self.ids
        }
        return sorted(name for name, values in parts.items() if any(id(value) in self.ids for value in values))

    def stale_names(self, outer: Mapping[str, Any]) -> list[str]:
        """Names of unsaved values that are meant to replace the caller's: by ``name += value``, or in place of None.

        Args:
            outer: the caller's variables, after the block.
        """
        block, bound = self._block, self.names()
        names = [n for n in bound if n in outer and outer[n] is not bound[n] and id(bound[n]) not in self.ids]
        if not names or block is None or block.node is None:
            return []
        added = augmented(block.node)
        return sorted(name for name in names if name in added or outer[name] is None)

    # -- while the request runs ------------------------------------------------

    def find(self, found: list[torch.Tensor], searched: set[int]) -> None:
        """Append the saved tensors to `found`, if a block has run since the last call.

        Args:
            searched: ids of values of `outer` that were searched after this pass. Searched ones are added.
        """
        if self.changed:
            self.changed = False
            self._find(found)
            for value in self.outer.values():
                if id(value) not in searched:
                    searched.add(id(value))
                    find_tensors(value, found, self.transfer.seen)

    def _find(self, found: list[torch.Tensor]) -> None:
        if self._block is not None:
            for value in self.ids.objects():
                find_tensors(value, found, self._seen)

    def end(self) -> None:
        """Give storage to the saves of the ended blocks' last lines, and record when the device has computed them."""
        if self.changed:  # lists that those lines filled are found after the next pass, or by `SaveTransfer.finish`
            found: list[torch.Tensor] = []
            self._find(found)
            give_own_storage(batch_views(found, self.transfer.pieces))
        if torch.cuda.is_initialized():
            self._done = torch.cuda.Event()
            self._done.record()

    # -- when it is over, on the caller's thread -------------------------------

    def settle(self, into: list[torch.Tensor]) -> None:
        """Give each tensor of a list separate storage, so that it does not change."""
        self._seen[id(into)] = len(into)
        self.transfer.settle(into)

    def queue(self) -> None:
        """Queue the saves that `deliver` will deliver."""
        if self._done is not None:
            torch.cuda.current_stream(self._done.device).wait_event(self._done)
        if self.transfer.device is not None:
            self.transfer.collect()
            for value in itertools.chain(self.collected.values(), self.outer.values()):
                self.transfer.queue(value)

    def deliver(self, delivered: dict[int, Any]) -> dict[str, Any]:
        """The values that the block bound, by name. `collected` ones are on the caller's device, and marked.

        `queue` and `SaveTransfer.flush` come before, `SaveTransfer.finish` after.

        Args:
            delivered: values that outlive the trace are added, by id.
        """
        for value in self.outer.values():
            value = mark(self.transfer.deliver(value))
            delivered[id(value)] = value
        names = {name: value for name, value in self.names().items() if id(value) not in self.ids}
        if self.transfer.device is None:  # a session keeps every name
            delivered |= {id(value): value for value in names.values()}
        for name, value in self.collected.items():
            value = names[name] = mark(self.transfer.deliver(value))
            delivered[id(value)] = value
        return names

    def release(self) -> None:
        """Drop the references to the block and to the values above it."""
        self._block, self.outer, self.collected = None, {}, {}
        self.ids.clear()


class _Saved(weakref.ref[Any]):
    """A saved object that may be gone, with the id that it had."""

    __slots__ = ("number",)
    number: int


class SavedIds(set[int]):
    """Ids of the saved objects that are alive.

    nnsight's set keeps the ids of objects that are gone. A later object may have such an id, and counts as saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Any] | None = None  # from the first save on: many blocks save nothing

    def _hold(self) -> dict[int, Any]:
        """The empty `_held`, and the callback of its references."""
        self._held = held = {}
        ids = weakref.ref(self)

        def forget(saved: _Saved) -> None:
            held.pop(saved.number, None)
            if (own := ids()) is not None:
                own.discard(saved.number)

        self._forget = forget  # one for all of them: each save of a pass calls `add`
        return held

    def add(self, number: int, /) -> None:
        """Add the id of an object that is alive now, until it is gone."""
        set.add(self, number)
        held = self._hold() if self._held is None else self._held
        saved = PyObj_FromPtr(number)
        try:
            held[number] = alive = _Saved(saved, self._forget)
        except TypeError:  # a list, or a number
            held[number] = saved
        else:
            alive.number = number

    def objects(self) -> list[Any]:
        """The saved objects that are alive."""
        if not self._held:
            return []
        return [
            own for saved in self._held.values() if (own := saved() if type(saved) is _Saved else saved) is not None
        ]

    def clear(self) -> None:
        """Forget all ids."""
        if self._held is not None:
            self._held.clear()  # the references in it hold their callback, which holds this dict
        super().clear()
