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
    from .trace import RequestTrace

logger = logging.getLogger(__name__)


Visit = list[Any]
"""[the trace whose block runs, since when as the watchdog knows (`time.monotonic()`), or None]"""


class TraceTimeoutError(TimeoutError):
    """A block took longer than `trace_step_timeout`."""


class Watchdog:
    """Watches the block that runs.

    Args:
        warn_after: seconds until a visit is reported.
        end_after: seconds until it is ended; None never.
    """

    def __init__(self, warn_after: float, end_after: float | None) -> None:
        self.warn_after, self.end_after = warn_after, end_after
        self._lock = threading.Lock()
        self.thread_id: int | None = None
        self._visit: Visit | None = None
        self._posted = False
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def enter(self, trace: RequestTrace) -> Visit | None:
        """A block of `trace` begins to run on this thread. Returns what `leave` takes."""
        outer, self._visit = self._visit, [trace, None]  # its time is taken when the watchdog first sees it
        if self._thread is None and not self._closed:
            self.thread_id = threading.get_ident()
            self._thread = threading.Thread(target=self._run, name="pymllm-interp-watchdog", daemon=True)
            self._thread.start()
        return outer

    def leave(self, outer: Visit | None) -> None:
        """It has parked or ended: nothing is raised from here on, also where it was under way."""
        visit, self._visit = self._visit, outer
        if self._posted and visit is not None:
            with self._lock:
                self._posted = False
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread_id or 0), None)

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self._awake.set()

    def _run(self) -> None:
        pause = min(0.25, self.warn_after / 4, (self.end_after or self.warn_after) / 4)
        while not self._awake.wait(pause):
            visit = self._visit
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
        if self.end_after is not None and elapsed > self.end_after and not self._posted:
            with self._lock:
                if self._visit is visit:
                    self._posted = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self.thread_id or 0), ctypes.py_object(TraceTimeoutError)
                    )
