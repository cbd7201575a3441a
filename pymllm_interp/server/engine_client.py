"""`EngineClient`: the engine process, as the HTTP process sees it. Used on one event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ..core.closed import EngineClosedError
from ..wire import messages as m
from ..wire.failures import EngineError
from .settings import ServeSettings

logger = logging.getLogger(__name__)


class EngineDiedError(EngineClosedError):
    """The engine process ended."""


class SlowReaderError(RuntimeError):
    """Results wait for a client that does not read them."""


class Call:
    """The messages that answer one call, in order.

    Args:
        number: of the call.
        limit: bytes that may wait here.
    """

    def __init__(self, number: int, limit: int) -> None:
        self.number, self._limit = number, limit
        self._messages: asyncio.Queue[m.FromEngine | BaseException] = asyncio.Queue()
        self._sizes: deque[int] = deque()  # of the message that the client reads, and of those behind it
        self._total, self._reading = 0, False
        self.overrun = False

    def put(self, message: m.FromEngine | BaseException) -> None:
        """Take the next message. One message may be larger than the limit; those behind it may not."""
        if self.overrun:
            return
        size = _size(message)
        self._sizes.append(size)
        self._total += size
        if self._total - self._sizes[0] > self._limit:
            self.overrun = True
            message = SlowReaderError(f"more than {self._limit} bytes wait for a client that does not read them")
        self._messages.put_nowait(message)

    async def next(self) -> m.FromEngine:
        """The next message. The one before it was passed on to the client.

        Raises:
            Exception: what the engine process answered with, or how it ended.
        """
        if self._reading:
            self._total -= self._sizes.popleft()
        self._reading = False
        message = await self._messages.get()
        self._reading = True
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, m.Failed):
            raise EngineError(message.failure)
        return message


ENTRY_BYTES = 64
"""Bytes of a token or a log probability that waits, about."""


def _size(message: Any) -> int:
    if isinstance(message, m.Frame):
        return len(message.header) + len(message.body)
    if isinstance(message, m.Token):
        return ENTRY_BYTES * (1 + len(message.logprobs or ()))
    if not isinstance(message, m.Finished):
        return 0
    entries = [*(message.logprobs or ()), *(message.prompt_logprobs or ())]
    states = message.captured.data if message.captured is not None else None
    return ENTRY_BYTES * (len(message.token_ids) + sum(len(entry or ()) for entry in entries)) + len(states or b"")


class EngineClient:
    """Starts the engine process, sends it messages, and starts it again when it ends.

    Args:
        settings: of the server.
        on_exit: called when the engine process ended by itself, before it is started again.

    Attributes:
        info: what the engine process said of itself (`ServedModel.describe`); None until it is ready.
        schemas: of interventions and captures, for the OpenAPI document.
        folder: for sockets and files; only this user can read it.
        restarts: how often the engine process was started again.
        adapters: loaded LoRA adapters, name -> folder; also for the engine processes that follow this one.
    """

    def __init__(self, settings: ServeSettings, on_exit: Callable[[], Any]) -> None:
        self.settings, self._on_exit = settings, on_exit
        self.info: dict[str, Any] | None = None
        self.schemas: dict[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="pymllm-interp-"))
        self.store = settings.store or self.folder / "store"
        self.tokenizer_folder = self.folder / "tokenizer"
        self.restarts = 0
        self.adapters: dict[str, str] = dict(settings.adapters)
        self.process: asyncio.subprocess.Process | None = None
        self._context = zmq.asyncio.Context()
        self._calls: dict[int, Call] = {}
        self._numbers = count(1)
        self._watcher: asyncio.Task[Any] | None = None
        self._receiver: asyncio.Task[Any] | None = None
        self._sockets: list[zmq.asyncio.Socket] = []
        self._ends: dict[str, str] = {}
        self._closing = False
        self._vectors: dict[tuple[str, str], m.PutVector] = {}

    async def start(self) -> None:
        """Start the engine process, and wait until it is ready.

        Raises:
            Exception: what its model or engine raised; EngineDiedError where it just ended.
        """
        await self._start()
        self._watcher = asyncio.create_task(self._watch())

    async def _disconnect(self) -> None:
        """Close what the engine process before this one was reached by."""
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        for end in self._ends.values():
            Path(end.removeprefix("ipc://")).unlink(missing_ok=True)

    async def _start(self) -> None:
        await self._disconnect()
        number = next(self._numbers)
        ends = self._ends = {name: f"ipc://{self.folder}/{name}-{number}" for name in ("requests", "events")}
        self._out, incoming = self._sockets = [self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)]
        for socket in (self._out, incoming):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._out.bind(ends["requests"])
        incoming.bind(ends["events"])
        settings = {
            **ends, "model": self.settings.model, "server": self.settings.server, "store": str(self.store),
            "tokenizer": str(self.tokenizer_folder), "inline_bytes": self.settings.limits.inline_bytes,
            "queued_bytes": self.settings.limits.max_queued_bytes, "log_level": self.settings.log_level, "parent": os.getpid(),
            "shared_prefix_cache": self.settings.shared_prefix_cache,
            "chat_template": self.settings.chat_template, "vllm": self.settings.vllm, "adapters": self.adapters,
            "restarts": self.restarts,
        }  # fmt: skip
        self.process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pymllm_interp.server.process.engine_process", stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        await process.stdin.drain()
        process.stdin.close()
        ready = self._calls[0] = Call(0, 1 << 40)
        self._receiver = asyncio.create_task(self._receive(incoming))
        ended, answered = asyncio.create_task(process.wait()), asyncio.create_task(ready.next())
        await asyncio.wait((ended, answered), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            await asyncio.wait((answered,), timeout=1)  # what it said last
        ended.cancel()
        if not answered.done():
            answered.cancel()
            raise EngineDiedError(f"the engine process ended with status {process.returncode} before it was ready")
        message = answered.result()
        assert isinstance(message, m.Ready)
        for vector in self._vectors.values():
            self._send(vector)
        self.info, self.schemas = message.info, message.schemas
        self.adapters = dict(message.info["adapters"])

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            for message in m.from_engine.decode(await socket.recv()):
                call = self._calls.get(message.call)
                if call is not None:
                    call.put(message)
                elif isinstance(message, m.Finished) and message.captured and message.captured.file:
                    (self.store / message.captured.file).unlink(missing_ok=True)  # its client is gone

    async def _watch(self) -> None:
        """Tell all calls when the engine process ends; start it again, where the operator wants that."""
        while not self._closing:
            assert self.process is not None
            status = await self.process.wait()
            if self._closing:
                return
            self.info = None
            logger.error("the engine process ended with status %s", status, extra={"event": "engine_exit"})
            self.fail_calls(EngineDiedError(f"the engine process ended with status {status}; the request is lost"))
            self._on_exit()
            if self.settings.on_engine_exit == "exit":
                return
            self.restarts += 1
            try:
                await self._start()
            except Exception:
                logger.exception("the engine process could not be started again")
                await asyncio.sleep(5)

    @property
    def ready(self) -> bool:
        """Whether calls can be made."""
        return self.info is not None

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def open(self, make: Callable[[int], m.ToEngine]) -> Call:
        """Start a call with the message that `make` makes of its number. `close` it at the end.

        Raises:
            EngineDiedError: the engine process is not ready.
        """
        if not self.ready:
            raise EngineDiedError("the engine is starting; try again in some seconds")
        call = Call(next(self._numbers), self.settings.limits.max_queued_bytes)
        message = make(call.number)
        self._send(message)
        self._calls[call.number] = call
        return call

    def close(self, call: Call, abort: bool) -> None:
        """End a call.

        Args:
            abort: it may still run, and is ended.
        """
        if self._calls.pop(call.number, None) is not None and abort:
            self._send(m.Abort(call.number))

    def abort(self, call: int, requests: list[int] | None) -> None:
        """End a call, or some of its requests. Its last messages still come."""
        if call in self._calls:
            self._send(m.Abort(call, requests))

    def was_read(self, call: Call, size: int) -> None:
        """The client has read frames of a trace."""
        if call.number in self._calls:
            self._send(m.ReadFrames(call.number, size))

    def fail_calls(self, error: EngineClosedError) -> None:
        """End all calls with an error."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.put(error)

    async def ask(self, make: Callable[[int], m.ToEngine]) -> Any:
        """The answer to a call that has one.

        Raises:
            Exception: what the engine process answered with.
        """
        call = self.open(make)
        try:
            message = await call.next()
            assert isinstance(message, m.Answer)
            return message.value
        finally:
            self.close(call, abort=False)

    async def put_vector(self, owner: str, name: str, body: bytes, kind: str) -> Any:
        """Store a vector, also for the engine processes that follow this one."""
        found = await self.ask(lambda number: m.PutVector(number, owner, name, body, kind))
        self._vectors[owner, name] = m.PutVector(0, owner, name, body, kind)
        return found

    async def drop_vector(self, owner: str, name: str) -> None:
        """Forget a vector."""
        self._vectors.pop((owner, name), None)
        await self.ask(lambda number: m.DropVector(number, owner, name))

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter from a folder of this machine."""
        await self.ask(lambda number: m.LoadAdapter(number, name, folder))
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""
        await self.ask(lambda number: m.UnloadAdapter(number, name))
        self.adapters.pop(name, None)

    def vectors(self, owner: str) -> dict[str, m.PutVector]:
        """An owner's vectors by name, as they were uploaded."""
        return {name: message for (whose, name), message in self._vectors.items() if whose == owner}

    def _send(self, message: m.ToEngine) -> None:
        # The socket has no bound, so this does not wait; `send` of an asyncio socket keeps the order.
        try:
            self._out.send(m.encoder.encode(message))
        except OverflowError as error:
            raise ValueError("a whole number of the request has more than 64 bits") from error
        except RecursionError as error:
            raise ValueError("the request is nested too deeply") from error

    def kill(self) -> None:
        """End the engine process at once. What follows is as where it ends by itself."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    async def shutdown(self) -> None:
        """End the engine process, and remove its files."""
        self._closing = True
        if self.process is not None and self.process.returncode is None:
            self._send(m.Stop(0))
            try:
                await asyncio.wait_for(self.process.wait(), 10)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._disconnect()
        self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


def settings_of_limits(settings: ServeSettings) -> dict[str, Any]:
    """The server's limits, as clients see them."""
    return asdict(settings.limits)
