"""`FairThreads` and `Turns`: threads for clients' work. No client holds all of them, and clients that wait take turns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
THREADS, THREADS_EACH = 4, 2
"""Threads in all, and most threads of one client. They share Python's lock with the event loop, so they are few."""


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool with all of its threads running. `submit` need not start one: a start that fails leaves the work in the queue.
    Raises RuntimeError: the system starts no thread."""
    pool, everyone = ThreadPoolExecutor(count, name), threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(everyone.wait)
        everyone.wait()
    except BaseException:
        everyone.abort()
        pool.shutdown(wait=False)
        raise
    return pool


class Turns:
    """Places that clients take and give back. Safe for threads.

    Args:
        count: number of places.
        each: most places of one client at a time.
    """

    def __init__(self, count: int, each: int) -> None:
        self._free, self._each, self._lock = count, each, threading.Lock()
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[Callable[[], bool]]] = {}
        """Starts that clients wait for, the client that comes next first."""

    def take(self, client: str, start: Callable[[], bool]) -> None:
        """Call `start` once the client has a place: at once, or when another gives one back.

        Args:
            start: false if the place is not needed.
        """
        with self._lock:
            self._waiting.setdefault(client, deque()).append(start)
            self._start_next()

    def give_back(self, client: str) -> None:
        """A place is free: it goes to the client that has waited longest, of those that may have one more."""
        with self._lock:
            self._free += 1
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
            self._start_next()

    def _start_next(self) -> None:
        while self._free:
            following = next((name for name in self._waiting if self._running[name] < self._each), None)
            if following is None:
                return
            starts = self._waiting.pop(following)
            start = starts.popleft()
            if starts:
                self._waiting[following] = starts  # behind the others
            if start():
                self._free -= 1
                self._running[following] += 1


class FairThreads:
    """Reads, renders and tokenizes clients' texts, off the event loop.

    Args:
        each: Most threads of one client at a time.
    """

    def __init__(self, count: int = THREADS, each: int = THREADS_EACH) -> None:
        self._pool, self._turns = started_pool(count, "text"), Turns(count, each)

    async def run(self, client: str, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of `work(*args, **kwargs)` on a thread. Started work is not interrupted if the caller is cancelled, and
        holds its thread until it ends.
        """
        loop = asyncio.get_running_loop()
        await self._turn(client)
        try:
            future = self._pool.submit(work, *args, **kwargs)
        except RuntimeError:  # it was closed meanwhile
            self._turns.give_back(client)
            raise

        def ended(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._turns.give_back, client)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def _turn(self, client: str) -> None:
        """Wait for a thread, and take it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def start() -> bool:
            if turn.cancelled():
                return False
            turn.set_result(None)
            return True

        self._turns.take(client, start)
        if turn.done():
            return
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the thread came at the same time
                self._turns.give_back(client)
            raise
