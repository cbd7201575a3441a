"""A higher threshold for Python's cycle collector while many requests live.

CPython collects the young generation after each 700 new objects. It collects all objects once the young ones have grown by a
quarter. A traced request and its block have about a hundred objects, and one with eight interventions two hundred. They live until
it ends, and form no cycles. A thousand requests would cause full collections, each of a quarter of a second. So the threshold is
raised by the number of these objects while they live.
"""

from __future__ import annotations

import gc
import threading

MOST = 2**31 - 1
"""The highest threshold that the collector takes."""
_lock = threading.RLock()  # the collector may run inside, and free a `LiveObjects`
_usual: tuple[int, int, int] = gc.get_threshold()
_raised_by = 0


def raise_threshold(objects: int) -> None:
    """Raise the threshold of the young generation by `objects`. A disabled collector stays disabled."""
    global _raised_by, _usual
    with _lock:
        if _raised_by == 0:
            _usual = gc.get_threshold()
        _raised_by += objects
        _set()


def lower_threshold(objects: int) -> None:
    """Undo a `raise_threshold`. When all are undone, the process has its former threshold."""
    global _raised_by
    with _lock:
        _raised_by -= objects
        _set()


class LiveObjects:
    """Raises the threshold until it is freed. The objects that it stands for refer to it.

    Args:
        count: objects, about.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        raise_threshold(count)

    def __del__(self) -> None:
        if _lock is not None:  # pyright: ignore[reportUnnecessaryComparison]  # at the interpreter's exit it is
            lower_threshold(self._count)


def _set() -> None:
    young, *older = _usual
    if young:
        gc.set_threshold(min(young + _raised_by, MOST), *older)
