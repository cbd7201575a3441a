"""A server's HTTP application on an event loop of the test's own thread, over an engine process's work on another thread."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from helpers_served import ThreadDoor, heap_stays_frozen

from pymllm_interp.server.http.app import create_app
from pymllm_interp.server.http.state import ServerState
from pymllm_interp.server.http.trust import Key, Keys, Trust
from pymllm_interp.server.settings import ServeLimits, ServeSettings


class Calls:
    """Number of Python and C functions that a thread has called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        self.count += event in ("call", "c_call")


@contextmanager
def counted() -> Iterator[Calls]:
    """Counts the calls of the body, in its thread."""
    calls = Calls()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class App:
    """The application, and the loop that it runs on.

    Attributes:
        calls: number of functions that the last `counted` request called on the event loop.
    """

    def __init__(self, folder: Path, **limits: Any) -> None:
        keys = Keys([Key.of(name, f"key-of-{name}", Trust.DECLARED) for name in ("ada", "bob", "eve")])
        settings = ServeSettings(
            model={"model": str(folder), "dtype": "float32"}, server={"device": "cpu", "kv_cache_tokens": 2048},
            name="served", keys=keys, limits=ServeLimits(**limits),
        )  # fmt: skip
        self.runner = asyncio.Runner()
        self.state = self.runner.run(self._state(settings))
        self.app = create_app(self.state)
        self.calls = 0

    async def _state(self, settings: ServeSettings) -> ServerState:
        state = ServerState(settings, ThreadDoor)
        await state.start()
        return state

    async def post(
        self, path: str, content: bytes | AsyncIterable[bytes], key: str = "ada", **headers: str
    ) -> httpx.Response:
        """Send a body of JSON."""
        headers |= {"Authorization": f"Bearer key-of-{key}", "Content-Type": "application/json"}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600) as client:
            return await client.post(path, content=content, headers=headers)

    def counted(self, path: str, content: bytes) -> httpx.Response:
        """Send a body of JSON, and count what it costs the event loop."""
        with counted() as calls:
            answer = self.runner.run(self.post(path, content))
        self.calls = calls.count
        return answer

    def together(self, *requests: Any) -> Sequence[Any]:
        """The results of coroutines that run at the same time."""

        async def gathered() -> Sequence[Any]:
            return await asyncio.gather(*requests)

        return self.runner.run(gathered())

    def close(self) -> None:
        self.runner.run(self.state.engine.shutdown())
        self.state.store.close()
        self.runner.close()


@contextmanager
def app_over(folder: Path, **limits: Any) -> Iterator[App]:
    """The application over an engine of a folder's model, until the end of the body."""
    with heap_stays_frozen():
        app = App(folder, **limits)
        try:
            yield app
        finally:
            app.close()
