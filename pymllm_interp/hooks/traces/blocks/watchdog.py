"""`Watchdog`: reports a block that runs too long, then ends it. A block runs on the engine's thread, and holds up every request.

The watchdog raises an exception in the engine's thread, and only while the block that overran is running. The exception
arrives between two bytecodes; native code (a long matrix product, `time.sleep`, a wait for a lock) returns first. A block that
cannot be ended holds up every request until then. It holds up neither a caller with a time limit nor its own caller.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable
from math import inf
from typing import Any

from .errors import TraceTimeoutError
from .trace import RequestTrace

logger = logging.getLogger(__name__)

_Run = list[Any]
"""[trace of the running block, when the watchdog first saw it (`time.monotonic()`) or None]"""


def _ignore(*_: Any) -> None:
    pass


class Watchdog:
    """Watches the block that runs now.

    `BlockScope` calls `watch`. It sets `running` when it resumes a block, and resets it when the block waits. Then it calls `drain`
    if an exception is `posted`.

    Args:
        warn_after: seconds after which a run is reported, once for each trace.
        end_after: seconds after which a run is ended with a `TraceTimeoutError`; None for never.
        held_up: called again and again while a block runs on, on the watchdog's thread.
        stuck: called on the watchdog's thread, with the trace of a block that cannot be ended, and its error.

    Attributes:
        running: the block that runs now, or None.
        posted: an exception is on its way to the engine's thread.
    """

    def __init__(
        self,
        warn_after: float,
        end_after: float | None,
        held_up: Callable[[], None] = _ignore,
        stuck: Callable[[RequestTrace, BaseException], None] = _ignore,
    ) -> None:
        self._held_up, self._stuck = held_up, stuck
        self._posted_at = 0.0
        self.warn_after, self.end_after = warn_after, end_after
        self.running: _Run | None = None
        self.posted = False
        self._engine_thread: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._reported: weakref.WeakSet[RequestTrace] = weakref.WeakSet()
        # CPython instantiates it on arrival, which shows that it has arrived.
        self._exception = type("TraceTimeoutError", (TraceTimeoutError,), {"__init__": lambda _: self._arrived()})

    @property
    def culprit(self) -> str:
        """Description of what holds up the engine's thread."""
        run = self.running
        return "a step runs" if run is None else f"the block of request {run[0].request_id} runs, or waits for a lock"

    def watch(self) -> None:
        """Start watching. Called on the engine's thread, before blocks run on it."""
        if self._thread is None and not self._closed.is_set():
            self._engine_thread = threading.get_ident()
            self._thread = threading.Thread(target=self._run, name="pymllm-interp-watchdog", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait for a posted exception, outside of the block, and drop it.

        It has to arrive. Clearing it would leave CPython's eval loop with a signal that is never reset. The next traced function
        call would spin forever.
        """
        try:
            while self.posted:
                pass
        except TraceTimeoutError:
            pass

    def close(self) -> None:
        """Stop watching. References to the engine are dropped: it holds the runner, which holds this watchdog."""
        self._closed.set()
        self._held_up, self._stuck = _ignore, _ignore

    def _arrived(self) -> None:
        self.posted = False

    def _run(self) -> None:
        pause = min(0.25, self.warn_after / 4, (self.end_after or self.warn_after) / 4)
        while not self._closed.wait(pause):
            run = self.running
            if run is not None:
                self._check(run)

    def _check(self, run: _Run) -> None:
        trace, since = run
        if since is None:
            run[1] = time.monotonic()
            return
        elapsed = time.monotonic() - since
        self._held_up()
        if elapsed > self.warn_after and trace not in self._reported:
            self._reported.add(trace)
            text = f"request {trace.request_id}: its block has held up the engine for {elapsed:.1f} s"
            logger.warning("%s", text)
            trace.warn(text)
        if self.end_after is not None and elapsed > self.end_after and not self.posted:
            self._posted_at = time.monotonic()
            self.posted = True  # before the look at `running`: a block that stops running now waits in `drain`
            if self.running is run:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._engine_thread or 0), ctypes.py_object(self._exception)
                )
            else:
                self.posted = False
        elif self.end_after is not None and self.posted and time.monotonic() - self._posted_at > self.end_after:
            self._posted_at = inf  # once
            self._stuck(trace, TraceTimeoutError(
                f"request {trace.request_id}: its block ran for more than trace_step_timeout={self.end_after} s, and cannot be "
                "ended: it waits for a lock, or runs native code. The engine goes on when that returns"
            ))  # fmt: skip
