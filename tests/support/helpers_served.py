"""Servers of tests on threads of this process: HTTP, messages and engine as in `serving`, without the start of two processes.

Each start of those takes about 15 seconds of CPU, nearly all of it for imports. What looks into a process, ends one, or runs a
client's code where the client is not, is for `serving`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import helpers_server
import pytest
from helpers_server import KEY_FILE, SECONDS, Server, arguments_of, serving

from pymllm_interp.cli import make_parser
from pymllm_interp.server import serve
from pymllm_interp.server.command import settings_of
from pymllm_interp.server.engines import process_door
from pymllm_interp.server.engines.start import StartingProcess
from pymllm_interp.server.process import engine_process
from pymllm_interp.server.settings import ServeSettings
from pymllm_interp.utils.log_lines import log_handler


class ThreadProcess(StartingProcess):
    """Stands for an engine process and its start: the same function on a thread."""

    returncode: int | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        itself: Any = self
        self.process, self._pool = itself, ThreadPoolExecutor(1, "engine")
        self._end = self._pool.submit(self._run, settings | {"parent": os.getppid()})

    @classmethod
    async def start(cls, settings: dict[str, Any], seconds: float, **options: Any) -> ThreadProcess:
        return cls(settings)

    def _run(self, settings: dict[str, Any]) -> None:
        lifeline: Any = SimpleNamespace(ready=False)
        try:
            engine_process.serve(settings, lifeline)
            self.returncode = 0
        except SystemExit as ended:
            self.returncode = int(ended.code or 0)

    async def wait(self) -> int | None:
        await asyncio.shield(asyncio.wrap_future(self._end))
        return self.returncode

    def kill(self) -> None:
        """A thread ends by itself: it has been told to."""

    def is_ready(self) -> None:
        """Nobody watches the start."""

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class ThreadDoor(process_door.ProcessDoor):
    """`ProcessDoor` over a thread."""

    starts = ThreadProcess


class ThreadLoop(asyncio.SelectorEventLoop):
    """An event loop of a thread, which gets no signals: they are given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[int, Callable[[], Any]] = {}

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # pyright: ignore
        self.handlers[sig] = lambda: callback(*args)

    def terminate(self) -> None:
        """What SIGTERM does. Called on any thread."""
        self.call_soon_threadsafe(lambda: self.handlers[signal.SIGTERM]())


class Log(logging.Handler):
    """Lines as a server writes them, into a list."""

    def __init__(self, settings: ServeSettings, lines: list[str]) -> None:
        super().__init__(settings.log_level.upper())
        self.setFormatter(log_handler(settings.log_format, "http").formatter)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


@contextmanager
def served(
    model: str | Path, *options: str, keys: str | None = KEY_FILE, folder: Path | None = None
) -> Iterator[Server]:
    """A server of a model on threads, until the end of the body. Arguments: as of `serving`. Its `process` is a future.

    With PYMLLM_TEST_REPLICAS, it is `serving`.
    """
    if helpers_server.REPLICAS:
        with serving(model, *options, keys=keys, folder=folder) as found:
            yield found
        return
    with heap_stays_frozen(), _on_threads(arguments_of(model, options, keys, folder)) as found:
        yield found


@contextmanager
def heap_stays_frozen() -> Iterator[None]:
    """That of the tests: each engine's end collects what is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "gc", SimpleNamespace(collect=int, freeze=int))
        yield


@contextmanager
def _on_threads(arguments: list[str]) -> Iterator[Server]:
    settings = settings_of(make_parser().parse_args(arguments))
    bound, loop = serve.listen(settings.host, settings.port), ThreadLoop()
    scheme = "https" if settings.ssl_certfile else "http"
    lines: list[str] = []
    log, root = Log(settings, lines), logging.getLogger()
    level = root.level
    root.addHandler(log)
    root.setLevel(min(level, log.level))
    pool = ThreadPoolExecutor(1, "http")
    ended: Any = pool.submit(asyncio.Runner(loop_factory=lambda: loop).run, serve._serve(settings, bound, ThreadDoor))
    server = Server(f"{scheme}://127.0.0.1:{bound.getsockname()[1]}", ended, Queue(), lines)
    try:
        deadline = time.monotonic() + SECONDS
        while not _listens(bound):
            assert time.monotonic() < deadline
            if ended.done():
                ended.result()
            time.sleep(0.01)
        yield server
    finally:
        if not ended.done():
            loop.terminate()
        pool.shutdown()
        loop.close()
        bound.close()
        root.removeHandler(log)
        root.setLevel(level)


def _listens(bound: socket.socket) -> bool:
    """Whether connections are accepted, which is so once the model is loaded."""
    return bool(bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
