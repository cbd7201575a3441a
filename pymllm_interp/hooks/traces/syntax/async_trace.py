"""``async with lm.trace(...)``: the event loop continues while the block is served."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ..blocks.trace import RequestTrace
from ..nnsight_compat import ExitTracingException

T = TypeVar("T")


class SavedSteps:
    """Queue of a trace's saved values after each pass. Read by another task than the trace's.

        steps = SavedSteps()
        ... async with lm.generate(prompt, on_step=steps) as tracer: ...      # in one task
        async for step, saved in steps: ...                                   # in another; `saved` by name

    It ends with the trace. One object serves one ``async with``.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._notify: Callable[[], Any] = _nothing

    def __call__(self, step: int, saved: dict[str, Any]) -> None:
        """Take the values saved in a pass. Called on the engine's thread."""
        self._put((step, saved))

    def close(self) -> None:
        """Mark the end of the trace."""
        self._put(None)

    def _put(self, item: tuple[int, dict[str, Any]] | None) -> None:
        self._items.put(item)
        with suppress(RuntimeError):  # the loop is closed: no task reads
            self._notify()

    async def __aiter__(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(arrived.set)
        while True:
            arrived.clear()
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                await arrived.wait()
                continue
            if item is None:
                return
            yield item


class LeftTracer(Protocol):
    """Tracer that an ``async with`` block leaves."""

    kwargs: dict[str, Any]
    served: list[RequestTrace]

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> Any: ...


async def leave_async(tracer: LeftTracer, kind: Any, error: Any) -> bool:
    """Serve the block of an ``async with``: `__aexit__` of its tracer.

    A thread waits for the block's requests; the tracer's thread is the loop's. Cancelling the task ends the requests.
    """
    if kind is ExitTracingException:
        sys.settrace(error.displaced)
    elif kind is not None:
        return False
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    raised: list[BaseException] = []
    steps = tracer.kwargs.get("on_step")

    def serve() -> None:
        try:
            tracer.__exit__(None, None, None)
        except BaseException as found:
            raised.append(found)
        if isinstance(steps, SavedSteps):
            steps.close()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=serve, name="async-trace", daemon=True).start()
    try:
        await ended.wait()
    except asyncio.CancelledError:
        while not ended.is_set():  # the thread may not have submitted them yet
            for trace in tracer.served:
                trace.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.05)
        raise
    if raised:
        raise raised[0]
    return True


async def ready(value: T) -> T:
    """The value as an awaitable."""
    return value


def _nothing() -> None:
    pass
