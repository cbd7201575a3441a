"""Blocks run on the engine's thread: one that takes long holds up everybody. The watchdog reports it, then ends it.

An exception is raised in the engine's thread, and only while it is inside the block that overran. It arrives between two
steps of Python code; a block that sits in native code (a long matrix product, `time.sleep`) is reached when that returns.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

Visit = list[Any]
"""[the trace whose block runs, since when (`time.monotonic()`; None until the watchdog has seen it)]"""


class TraceTimeoutError(TimeoutError):
    """A block took longer than `trace_step_timeout`."""


class Watchdog:
    """Watches the block that runs.

    `Turn` calls `watch`; it sets `visit` when a block goes on and back when that parks, then calls `drain` if `posted`.

    Args:
        warn_after: seconds until a visit is reported.
        end_after: seconds until it is ended; None never.

    Attributes:
        visit: the block that runs now, or None.
        posted: an exception is under way to the engine's thread.
    """

    def __init__(self, warn_after: float, end_after: float | None) -> None:
        self.warn_after, self.end_after = warn_after, end_after
        self.visit: Visit | None = None
        self.posted = False
        self._engine_thread: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        # Instantiated where it arrives, and that is how we know that it did.
        self._exception = type("TraceTimeoutError", (TraceTimeoutError,), {"__init__": lambda _: self._arrived()})

    def watch(self) -> None:
        """Blocks are about to run on this thread: the engine's."""
        if self._thread is None and not self._closed.is_set():
            self._engine_thread = threading.get_ident()
            self._thread = threading.Thread(target=self._run, name="pymllm-interp-watchdog", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait, outside of the block, for an exception that was already under way, and drop it.

        It must arrive: one that is cleared before leaves CPython's interpreter with a signal that nobody takes back, and
        the next traced function call would spin on it for ever.
        """
        try:
            while self.posted:
                pass
        except TraceTimeoutError:
            pass

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _arrived(self) -> None:
        self.posted = False

    def _run(self) -> None:
        pause = min(0.25, self.warn_after / 4, (self.end_after or self.warn_after) / 4)
        while not self._closed.wait(pause):
            visit = self.visit
            if visit is not None:
                self._check(visit)

    def _check(self, visit: Visit) -> None:
        trace, since = visit
        if since is None:
            visit[1] = time.monotonic()
            return
        elapsed = time.monotonic() - since
        if elapsed > self.warn_after and not trace.reported_slow:
            trace.reported_slow = True
            text = f"request {trace.request_id}: its block has held up the engine for {elapsed:.1f} s"
            logger.warning("%s", text)
            trace.warn(text)
        if self.end_after is not None and elapsed > self.end_after and not self.posted:
            self.posted = True  # before the look at `visit`: a block that leaves now waits for what comes of it
            if self.visit is visit:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._engine_thread or 0), ctypes.py_object(self._exception)
                )
            else:
                self.posted = False
