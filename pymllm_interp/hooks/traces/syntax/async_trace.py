"""``async with lm.trace(...)``: the event loop continues while the block is served."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from ..blocks.trace import RequestTrace
from ..nnsight_compat import ExitTracingException, skip_context, skippable


class SavedSteps:
    """What a trace has saved after each pass, as it comes. Another task than the trace's reads it.

        steps = SavedSteps()
        ... async with lm.generate(prompt, on_step=steps) as tracer: ...      # in one task
        async for step, saved in steps: ...                                   # in another; `saved` by name

    It ends with the trace. One object serves one ``async with``.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._notify: Callable[[], Any] = _nothing

    def __call__(self, step: int, saved: dict[str, Any]) -> None:
        """Take what is saved after a pass. Called on the engine's thread."""
        self._put((step, saved))

    def close(self) -> None:
        """The trace is over."""
        self._put(None)

    def _put(self, item: tuple[int, dict[str, Any]] | None) -> None:
        self._items.put(item)
        with suppress(RuntimeError):  # the loop is closed: nobody reads
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


class AsyncBlock:
    """Enters and leaves a traced block as an asynchronous context. Mixed into nnsight's tracers.

    The block is captured like that of a ``with``. A thread waits for its requests; the tracer's thread is the loop's.
    Cancelling the task ends the requests.
    """

    node: Any
    kwargs: dict[str, Any]
    served: list[RequestTrace]

    if TYPE_CHECKING:

        def capture(self) -> None: ...

        def __exit__(self, *exc: Any) -> bool: ...

    def __aenter__(self) -> Awaitable[Self]:
        # No coroutine: nnsight finds the block by the frame that calls this one.
        self.capture()
        if skippable(self.node):
            skip_context(self)  # pyright: ignore[reportArgumentType]
        return _done(self)

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if kind is ExitTracingException:
            sys.settrace(error.displaced)
        elif kind is not None:
            return False
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        raised: list[BaseException] = []
        steps = self.kwargs.get("on_step")

        def serve() -> None:
            try:
                self.__exit__(None, None, None)
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
                for trace in self.served:
                    trace.cancel()
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.05)
            raise
        if raised:
            raise raised[0]
        return True


def _nothing() -> None:
    pass


async def _done(value: Any) -> Any:
    return value
