"""`FairThreads`: threads for work on clients' texts. No client holds all of them, and clients that wait take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
THREADS, THREADS_EACH = 4, 2
"""Threads in all, and most threads of one client. They share Python's lock with the event loop, so they are few."""


class FairThreads:
    """Reads, renders and tokenizes clients' texts, off the event loop.

    Args:
        count: Number of threads.
        each: Most threads of one client at a time.
    """

    def __init__(self, count: int = THREADS, each: int = THREADS_EACH) -> None:
        self._pool = ThreadPoolExecutor(count, "text")
        self._free, self._each = count, each
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Turns that clients wait for, the client that comes next first."""

    async def run(self, client: str, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of `work(*args, **kwargs)` on a thread. Started work is not interrupted if the caller is cancelled, and
        holds its thread until it ends.
        """
        loop = asyncio.get_running_loop()
        await self._turn(client)
        future = self._pool.submit(work, *args, **kwargs)

        def ended(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._give_back, client)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def _turn(self, client: str) -> None:
        """Wait for a thread, and take it."""
        if self._free and self._running[client] < self._each:
            self._take(client)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the thread came at the same time
                self._give_back(client)
            raise

    def _take(self, client: str) -> None:
        self._free -= 1
        self._running[client] += 1

    def _give_back(self, client: str) -> None:
        """A thread is free: it goes to the client that has waited longest, of those that may have one more."""
        self._free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        while self._free:
            following = next((name for name in self._waiting if self._running[name] < self._each), None)
            if following is None:
                return
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            if turns:
                self._waiting[following] = turns  # behind the others
            if not turn.cancelled():
                self._take(following)
                turn.set_result(None)
