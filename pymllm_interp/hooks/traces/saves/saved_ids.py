"""`SavedIds`: which objects a block has saved."""

from __future__ import annotations

import weakref
from _ctypes import PyObj_FromPtr
from typing import Any


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

    def clear(self) -> None:
        """Forget all ids."""
        if self._held is not None:
            self._held.clear()  # the references in it hold their callback, which holds this dict
        super().clear()
