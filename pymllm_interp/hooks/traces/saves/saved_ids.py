"""`SavedIds`: which objects a block has saved."""

from __future__ import annotations

import weakref
from _ctypes import PyObj_FromPtr
from typing import Any


class SavedIds(set[int]):
    """Ids of the saved objects that are alive.

    nnsight's set keeps the ids of objects that are gone. A later object may have such an id, and counts as saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Any] = {}

    def add(self, number: int, /) -> None:
        """Add the id of an object that is alive now, until it is gone."""
        super().add(number)
        saved = PyObj_FromPtr(number)
        try:
            self._held[number] = weakref.ref(saved, lambda _: self._forget(number))
        except TypeError:  # a list, or a number
            self._held[number] = saved

    def clear(self) -> None:
        """Forget all of them."""
        self._held.clear()  # the callbacks in it hold this set
        super().clear()

    def _forget(self, number: int) -> None:
        self.discard(number)
        self._held.pop(number, None)
