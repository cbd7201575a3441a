"""`Link`: a front's session with one replica, opened again whenever it breaks. Used on one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ...wire import messages as m
from .call import Call, EngineDiedError
from .door import encoded
from .roster import LinkKeys, Replica
from .vector_orders import VectorOrder, VectorOrders, numbered

logger = logging.getLogger(__name__)
PULSES = 8
"""Pulses in the time that a replica may be silent."""
BROKEN = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events of a connection that could not be made, or broke."""
RETRY_SECONDS = 0.2
"""Seconds between attempts to open a session."""


class LinkOwner(ABC):
    """Callbacks of a link, and the state that it reads."""

    def vector_orders(self) -> Iterable[VectorOrder]:
        """Orders that the replica must have before it takes calls. By default none."""
        return ()

    def learned(self, order: VectorOrder) -> None:  # noqa: B027
        """Handle an order that the replica has. By default nothing."""

    def came_up(self, link: Link) -> None:  # noqa: B027
        """Handle a link that accepts calls. By default nothing."""

    @abstractmethod
    async def opened(self, link: Link) -> None:
        """Handle the begin of a session; vectors follow. Raises LinkBrokenError to refuse the replica."""

    @abstractmethod
    def lost(self, link: Link, calls: list[Call], why: str) -> None:
        """Handle the end of a session with these calls."""

    @abstractmethod
    def deliver(self, call: Call, message: m.FromEngine) -> None:
        """Handle a message of a call."""


class LinkBrokenError(Exception):
    """The session ended before the answer."""


class Link:
    """A session with one replica.

    Args:
        replica: an engine process. Another process of the same name needs another link.
        keys: keys of the cluster's fronts.
        silence: seconds without a message, after which the replica counts as gone.
        most_unread: bytes on their way to the replica, above which `send` refuses more.

    Attributes:
        up: takes calls.
        ready: replica's description of itself in this session.
        why_down: reason that it is down, as text; empty while `up`.
    """

    def __init__(
        self, replica: Replica, keys: LinkKeys, owner: LinkOwner, context: zmq.asyncio.Context, silence: float, most_unread: int
    ) -> None:  # fmt: skip
        self.replica, self._keys, self._owner, self._context = replica, keys, owner, context
        self._silence, self._most_unread = silence, most_unread
        self.up, self.why_down = False, "it has not answered yet"
        self.calls: dict[int, Call] = {}
        self.load = 0
        self.ready: m.Ready | None = None
        self._has = VectorOrders()
        self._own_numbers = 0
        self._socket: zmq.asyncio.Socket | None = None
        self._again = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.replica.name

    @property
    def is_open(self) -> bool:
        """Whether the replica answers questions. It need not take calls yet."""
        return self._socket is not None and self.ready is not None

    def look_again(self) -> None:
        """Take no new calls until the owner has opened the session again."""
        self.up, self.why_down = False, "its state is looked at"
        self._again.set()

    # -- calls -------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send a message. Does not wait. Raises EngineDiedError: no session is open, or the replica does not read."""
        if self._socket is None:
            raise EngineDiedError(f"replica {self.name} cannot be reached: {self.why_down}")
        if self._sent - self._acknowledged + len(data) > self._most_unread and self._sent > self._acknowledged:
            raise EngineDiedError(
                f"replica {self.name} has not read {self._sent - self._acknowledged} bytes: try again later"
            )
        self._sent += len(data)
        self._socket.send(data)

    async def ask(self, make: Callable[[int], m.ToEngine]) -> Any:
        """The answer to a question, also before the link is up. Raises Exception: the replica's answer, or EngineDiedError."""
        self._own_numbers += 1
        call = Call(1 << 39 | self._own_numbers, 1 << 40)
        self.send(encoded(make(call.number)))
        self.calls[call.number] = call
        try:
            message = await call.next()
            assert isinstance(message, m.Answer)
            return message.value
        finally:
            self.calls.pop(call.number, None)

    async def order(self, order: VectorOrder) -> Any:
        """Have the replica take an order of a vector. Returns its answer.

        Raises:
            As `ask`.
        """
        found = await self.ask(lambda number: numbered(order, number))
        self._has.take(order)
        return found

    async def bring(self, orders: Iterable[VectorOrder]) -> bool:
        """Have the replica take the orders that it has not. Returns whether there were any."""
        missing = [order for order in orders if self._has.is_news(order)]
        for order in missing:
            await self.order(order)
        return bool(missing)

    # -- the session -------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._session()
            except (LinkBrokenError, EngineDiedError, zmq.ZMQError) as error:
                self._end(str(error))
            except Exception as error:  # a defect costs a session, not the replica
                logger.exception("the session with replica %s failed", self.name)
                self._end(f"the front failed: {error!r}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _session(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a broken connection ends the session
            if "[" in self.replica.address:
                socket.setsockopt(zmq.IPV6, 1)
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
            socket.curve_serverkey = self.replica.key.encode()
            monitor = socket.get_monitor_socket(BROKEN)
            socket.connect(self.replica.address)
            self._sent = self._received = self._acknowledged = 0
            self._heard, self._has, self.ready, self._socket = time.monotonic(), VectorOrders(), None, socket
            self._greeted = asyncio.Event()
            self.send(encoded(m.Hello(0)))
            work = (self._receive(socket), self._beat(), self._begin(), self._watch(monitor))
            tasks = [asyncio.create_task(one) for one in work]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in tasks:
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
            raise next(one for one in found if isinstance(one, Exception))
        finally:
            self._socket = None
            socket.disable_monitor()
            socket.close(linger=0)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        try:
            await monitor.recv_multipart()
        finally:
            monitor.close(linger=0)
        raise LinkBrokenError("its connection broke")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._silence / PULSES)
            silent = time.monotonic() - self._heard
            if silent > self._silence:
                raise LinkBrokenError(f"it was silent for {silent:.1f} s")
            if self._socket is not None:  # even if the replica does not read
                data = encoded(m.Pulse(0, self._received))
                self._sent += len(data)
                self._socket.send(data)

    async def _begin(self) -> None:
        await self._greeted.wait()
        while True:
            self._again.clear()
            await self._owner.opened(self)
            while await self.bring(self._owner.vector_orders()):
                pass
            if not self._again.is_set():
                self.up, self.why_down = True, ""
                logger.info("replica %s serves, at %s", self.name, self.replica.address)
                self._owner.came_up(self)
            await self._again.wait()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            self._heard = time.monotonic()
            self._received += len(data)
            try:
                messages = m.from_engine.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                raise LinkBrokenError(f"it sent a message that cannot be read: {error}") from error
            for message in messages:
                self._take(message)

    def _take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Pulse):
            self._acknowledged = message.received
        elif isinstance(message, m.Gone):
            raise LinkBrokenError(f"it ended the session: {message.why}")
        elif isinstance(message, m.Spread):
            self._has.take(message.order)
            self._owner.learned(message.order)
        elif isinstance(message, m.Ready):
            self.ready = message
            self._greeted.set()
        elif (call := self.calls.get(message.call)) is not None:
            self._owner.deliver(call, message)

    def _end(self, why: str) -> None:
        if self.up:
            logger.error("replica %s is lost: %s", self.name, why, extra={"event": "replica_lost"})
        self.up, self.why_down = False, why
        calls, self.calls, self.load = list(self.calls.values()), {}, 0
        self._owner.lost(self, calls, why)

    async def close(self, why: str) -> None:
        """End the session for good, with its calls."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.up = False  # not a loss
        self._end(why)
