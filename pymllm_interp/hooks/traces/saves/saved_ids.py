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
        self._held: dict[int, Any] = {}
        ids, held = weakref.ref(self), self._held

        def forget(saved: _Saved) -> None:
            held.pop(saved.number, None)
            if (own := ids()) is not None:
                own.discard(saved.number)

        self._forget = forget  # one for all of them: each save of a pass calls `add`

    def add(self, number: int, /) -> None:
        """Add the id of an object that is alive now, until it is gone."""
        set.add(self, number)
        saved = PyObj_FromPtr(number)
        try:
            self._held[number] = alive = _Saved(saved, self._forget)
        except TypeError:  # a list, or a number
            self._held[number] = saved
        else:
            alive.number = number

    def clear(self) -> None:
        """Forget all of them."""
        self._held.clear()  # the references in it hold their callback, which holds this dict
        super().clear()
