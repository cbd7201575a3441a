"""`Callbacks`: runs callers' functions outside the engine's thread, which must not wait for them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np

from ..hooks.monitors.request_monitors import RequestMonitors
from ..hooks.monitors.scores import MonitorFire

logger = logging.getLogger(__name__)

MAX_THREADS = 8
"""Owners with functions that run at the same time."""


class EngineThread(threading.Thread):
    """The thread of an engine. Nothing that runs on it may wait for a request, of whichever engine."""


class Callbacks:
    """Runs functions on its own daemon threads. Functions of one owner run in order, those for several owners concurrently.

    Threads start when they are first needed. Whatever a function raises is logged, and goes no further.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self._ready: queue.SimpleQueue[Hashable | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def put(self, owner: Hashable, function: Callable[[], None]) -> None:
        """Run a function after the earlier functions of the same owner."""
        with self._lock:
            if self._closed and owner not in self._waiting:
                threading.Thread(target=guarded, args=(function,), daemon=True).start()
                return
            if owner in self._waiting:
                self._waiting[owner].append(function)
                return
            self._waiting[owner] = deque([function])
            if len(self._threads) < min(len(self._waiting), MAX_THREADS):
                thread = threading.Thread(target=self._run, name="pymllm-interp-callbacks", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._ready.put(owner)

    @property
    def on_thread(self) -> bool:
        """Whether the caller is one of the functions."""
        return threading.current_thread() in self._threads

    def num_waiting(self, owner: Hashable) -> int:
        """Functions of an owner that have not ended."""
        with self._lock:
            return len(self._waiting.get(owner, ()))

    def close(self, timeout: float) -> None:
        """Run queued functions, and end the threads; give up after `timeout` seconds. A second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            threads = list(self._threads)
        if closed:
            return
        deadline = time.monotonic() + timeout
        for _ in threads:
            self._ready.put(None)
        for thread in threads:
            if not self.on_thread:
                thread.join(max(0.0, deadline - time.monotonic()))
        if not self.on_thread and any(thread.is_alive() for thread in threads):
            logger.warning("a callback still runs %.1f s after the engine's end: it is left to itself", timeout)

    def _run(self) -> None:
        while (owner := self._ready.get()) is not None:
            left = self._waiting[owner]
            while left:
                guarded(left[0])
                with self._lock:
                    left.popleft()
                    if not left:
                        del self._waiting[owner]


def guarded(function: Callable[[], Any]) -> None:
    """Call a function, and log whatever it raises."""
    try:
        function()
    except BaseException:
        logger.exception("a callback failed")


def call_for_fires(
    monitors: RequestMonitors,
    function: Callable[[MonitorFire], Any],
    name: str,
    positions: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Call a monitor's function for each position at which it fired."""
    for position, score in zip(positions.tolist(), scores.tolist(), strict=True):
        guarded(partial(function, MonitorFire(monitors.request_id, name, position, score)))
        monitors.num_called += 1
