"""`Intake`: which requests of an engine run. A pause closes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from ...core.request import Request
from ..request_ends import RequestEnds

RESUMED = "lm.resume() was called before the requests of lm.pause(mode='wait') had ended"
PAUSED_SECONDS = 0.25
"""Time between two looks at the time limits of paused requests."""


class Intake:
    """State of a pause. Used on the engine's thread; others read `paused` and `why_closed`.

    Args:
        ends: ends of the engine's requests.
        add: gives requests to the scheduler.

    Attributes:
        paused: no step is launched.
        held: new requests, while those before them run to their end; None otherwise.
        why_closed: error of a sleeping engine, for calls; None while it is awake.
    """

    def __init__(self, ends: RequestEnds, add: Callable[[Sequence[Request]], None]) -> None:
        self.paused = False
        self.held: list[Request] | None = None
        self.why_closed: Exception | None = None
        self._ends, self._add = ends, add
        self._drained: list[Future[None]] = []

    def take(self, requests: Sequence[Request]) -> None:
        """Take new requests in. They fail if the engine fell asleep since their caller looked: no pass may run."""
        if self.held is not None and self.why_closed is None:
            self.held += requests
            return
        self._add(requests)
        if self.why_closed is not None:
            self._ends.fail(list(requests), self.why_closed)

    def drain(self) -> Future[None]:
        """Hold new requests back until all others have ended; then pause."""
        self.paused, self.held = False, self.held or []
        done = Future[None]()
        self._drained.append(done)
        self.turn()
        return done

    def undo(self, paused: bool, drained: Future[None]) -> None:
        """Undo a `drain`, unless another call waits, too.

        Args:
            paused: whether the engine was paused before.
        """
        self._drained = [done for done in self._drained if done is not drained]
        if not self._drained:
            self.admit()
            self.paused = paused

    def stop(self) -> None:
        """Pause, with all requests as they are."""
        self.paused = True
        self.admit()
        if not self._ends.scheduler.has_work():
            self._answer(None)

    def end_all(self) -> None:
        """End all requests, also held ones, with "abort". Pauses that wait for them begin."""
        waits = self.held is not None
        self.admit()
        self._ends.end(self._ends.scheduler.live, "abort")
        if waits:
            self.paused = True
        self._answer(None)

    def resume(self) -> None:
        """Let all requests run."""
        self.admit()
        self.paused = False
        self._answer(RuntimeError(RESUMED))

    def turn(self) -> None:
        """Pause, if the last request has ended. Time limits of held ones count."""
        if not self._ends.scheduler.has_work():
            self.stop()
            self._answer(None)  # of those before it
        now = time.monotonic()
        late = [request.request_id for request in self.held or () if request.deadline and request.deadline < now]
        if late:
            self.find(late)
            self._ends.expire()

    def admit(self) -> None:
        """Give the held requests to the scheduler."""
        held, self.held = self.held, None
        if held:
            self._add(held)

    def find(self, request_ids: Collection[str]) -> None:
        """Give these of the held requests to the scheduler, which is to end them."""
        found = [request for request in self.held or () if request.request_id in request_ids]
        if found and self.held is not None:
            self.held = [request for request in self.held if request not in found]
            self._add(found)

    def close(self, error: Exception) -> None:
        """The engine ends: so do waits."""
        self._answer(error)

    def _answer(self, error: Exception | None) -> None:
        waiting, self._drained = self._drained, []
        for done in waiting:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
