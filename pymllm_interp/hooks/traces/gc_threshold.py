"""Room for what many requests are made of, before Python looks for cycles.

CPython's collector goes through the young objects after each 700 new ones, and through all that live once a quarter has been
added. A traced request is some sixty objects that live until its ``with`` is over, and leave no cycles: two thousand of them are
a quarter of what lives in a process that has imported torch, and to go through all that takes as long as their steps. So while
they live, the young ones may be more, by as many as they are.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_usual: tuple[int, int, int] = gc.get_threshold()
_room = 0


def make_room(objects: int) -> None:
    """Let so many more young objects live before they are gone through; `give_back` as many. Where the collector is off, it
    stays off."""
    global _room, _usual
    with _lock:
        if _room == 0:
            _usual = gc.get_threshold()
        _room += objects
        _set()


def give_back(objects: int) -> None:
    """Those objects are no more. With the last of them the process has the threshold that it had before the first."""
    global _room
    with _lock:
        _room -= objects
        _set()


def _set() -> None:
    young, *older = _usual
    if young:
        gc.set_threshold(young + _room, *older)
