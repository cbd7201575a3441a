"""`ProcessDoor`: the `Door` of one engine process on this machine, which is started again when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ...wire import messages as m
from ..settings import ServeSettings
from .call import Call, EngineDiedError
from .door import Door, encoded
from .liveness import Liveness, WatchedEngine
from .start import StartingProcess, process_settings
from .vector_orders import VectorOrder, numbered

logger = logging.getLogger(__name__)


class ProcessDoor(Door, WatchedEngine):
    """Starts the engine process, sends it messages, and starts it again when it ends.

    Args:
        on_exit: called when the engine process ended unasked, before it is started again.
    """

    starts = StartingProcess

    def __init__(self, settings: ServeSettings, on_exit: Callable[[], Any]) -> None:
        super().__init__(settings)
        self._on_exit = on_exit
        self._watchers: list[asyncio.Task[Any]] = []
        self._receiver: asyncio.Task[Any] | None = None
        self._starting: StartingProcess | None = None
        self._sockets: list[zmq.asyncio.Socket] = []
        self._ends: dict[str, str] = {}
        self._closing = False
        self._liveness = Liveness(self, settings.limits)

    @property
    def stuck(self) -> bool:
        return bool(self._liveness.stuck)

    async def start(self) -> None:
        await self._start()
        self._watchers = [asyncio.create_task(self._watch()), asyncio.create_task(self._liveness.watch())]

    async def _disconnect(self) -> None:
        """Close the sockets of the earlier engine process."""
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        if self._starting is not None:
            self._starting.close()
        for socket in self._sockets:
            socket.close(linger=0)
        for end in self._ends.values():
            Path(end.removeprefix("ipc://")).unlink(missing_ok=True)

    async def _start(self) -> None:
        await self._disconnect()
        number = next(self._numbers)
        ends = self._ends = {name: self._owned.address(f"{name}-{number}") for name in ("requests", "events")}
        self._out, incoming = self._sockets = [self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)]
        for socket in (self._out, incoming):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._out.bind(ends["requests"])
        incoming.bind(ends["events"])
        settings = process_settings(
            self.settings, self.folder, **ends, store=str(self.store), inline_bytes=self.settings.limits.inline_bytes,
            adapters=self.adapters, restarts=self.restarts,
        )  # fmt: skip
        starting = self._starting = await self.starts.start(settings, self.settings.limits.engine_start_seconds)
        self.process = process = starting.process
        ready = self._calls[0] = Call(0, 1 << 40)
        self._receiver = asyncio.create_task(self._receive(incoming))
        ended, answered = asyncio.create_task(process.wait()), asyncio.create_task(ready.next())
        await asyncio.wait((ended, answered), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            await asyncio.wait((answered,), timeout=1)  # its last message
        ended.cancel()
        if not answered.done():
            answered.cancel()
            raise EngineDiedError(f"the engine process ended with status {process.returncode} before it was ready")
        message = answered.result()
        starting.is_ready()
        assert isinstance(message, m.Ready)
        for order in self._orders.all():
            self._send(order)
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
        """Tell all calls when the engine process ends, and start it again if the operator wants that."""
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

    def _open(self, make: Callable[[int], m.ToEngine]) -> Call:
        call = Call(next(self._numbers), self.settings.limits.max_queued_bytes)
        self._send(make(call.number))
        self._calls[call.number] = call
        return call

    def close(self, call: Call, abort: bool) -> None:
        if self._calls.pop(call.number, None) is not None and abort:
            self._send(m.Abort(call.number))

    def abort(self, call: int, requests: list[int] | None) -> None:
        if call in self._calls:
            self._send(m.Abort(call, requests))

    def was_read(self, call: Call, size: int) -> None:
        if call.number in self._calls:
            self._send(m.ReadFrames(call.number, size))

    async def ask_all(self, make: Callable[[int], m.ToEngine], seconds: float | None = None) -> dict[str, Any]:
        return {"": await asyncio.wait_for(self.ask(make), seconds)}

    async def load_adapter(self, name: str, folder: str) -> None:
        await self.ask(lambda number: m.LoadAdapter(number, name, folder))
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        await self.ask(lambda number: m.UnloadAdapter(number, name))
        self.adapters.pop(name, None)

    async def control(self, order: str, **arguments: Any) -> Any:
        return await self.ask(lambda number: m.Control(number, order, arguments))

    async def _order(self, order: VectorOrder) -> Any:
        found = await self.ask(lambda number: numbered(order, number))
        self._orders.take(order)
        return found

    def _send(self, message: m.ToEngine) -> None:
        # The socket has no bound, so this does not wait; `send` of an asyncio socket keeps the order.
        self._out.send(encoded(message))

    async def shutdown(self) -> None:
        """End the engine process, and remove its files."""
        self._closing = True
        if self.process is not None and self.process.returncode is None:
            self._send(m.Stop(0))
            if not self.ready:  # it reads messages once its model is loaded
                self.process.kill()
            try:
                await asyncio.wait_for(self.process.wait(), 10)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._disconnect()
        await super().shutdown()
