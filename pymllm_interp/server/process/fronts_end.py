"""`FrontsEnd`: an engine process that serves several HTTP processes (fronts) over TCP, encrypted and authenticated (CURVE).

A front says `Hello`, and has a session until it is silent, does not read, or its connection breaks. The end of a session aborts
its calls. Calls are numbered by each front: here the session's number stands before them.

Sockets belong to threads. The main thread has the ROUTER; the outbox's thread passes messages to it by a pipe.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...wire import messages as m
from .ends import POLL_MS
from .engine_server import EngineServer

logger = logging.getLogger(__name__)
CALL_BITS = 40
"""Bits of a front's own number of a call."""
EVERYBODY = 0
"""The session number of messages to all fronts, and of the first one, which is for the process's parent."""
AT_ONCE = 256
"""Messages that are taken from one socket before the other is looked at."""
BUFFERED = 16
"""A session ends if this multiple of `queued_bytes` was sent to its front, and not received."""


@dataclass
class FrontSession:
    """One front, from its `Hello` on. Bytes count from then on."""

    number: int
    heard: float
    """`time.monotonic()` of its last message."""
    sent: int = 0
    acknowledged: int = 0
    received: int = 0


class FrontKey:
    """Admits fronts with one public key.

    Args:
        key: key as Z85 text.
    """

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a connection with this public key may be made. Called by pyzmq."""
        return key == self._key


class FrontsEnd:
    """Sessions with fronts.

    Args:
        settings: settings of the engine process. Its `replica` has `host` to listen on, and `front_key`, the fronts'
            public key. `announce` is a file descriptor: one JSON line says how the start went. After `silence` seconds
            without a message a front is considered lost.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        own = settings["replica"]
        self._parent, self._announce, self._silence = settings["parent"], own["announce"], own["silence"]
        self._most_unread = BUFFERED * settings["queued_bytes"]
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=FrontKey(own["front_key"]))
        public, secret = zmq.curve_keypair()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)  # bytes are bounded here, by session
        self._router.setsockopt(zmq.LINGER, 1000)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.curve_server, self._router.curve_secretkey, self._router.curve_publickey = True, secret, public
        if ":" in own["host"]:
            self._router.setsockopt(zmq.IPV6, 1)
        port = self._router.bind_to_random_port(f"tcp://{own['host']}")
        self._place = {"address": f"tcp://{own['host']}:{port}", "key": public.decode()}
        self._in, self._out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for pipe in (self._in, self._out):
            pipe.set_hwm(0)
        self._in.bind("inproc://outbox")
        self._out.connect("inproc://outbox")
        self._sessions: dict[bytes, FrontSession] = {}
        self._identities: dict[int, bytes] = {}
        self._numbers = itertools.count(1)
        self._ready: m.Ready | None = None

    # -- the outbox's thread -----------------------------------------------------------------

    def send(self, messages: list[m.FromEngine]) -> None:
        """Pass messages to the main thread, by session."""
        by_session: dict[int, list[m.FromEngine]] = {}
        for message in messages:
            if self._ready is None:
                self._tell_parent(message)
                continue
            by_session.setdefault(message.call >> CALL_BITS, []).append(message)
            message.call &= (1 << CALL_BITS) - 1
        for number, own in by_session.items():
            self._out.send_multipart([str(number).encode(), m.encoded(own)])

    def _tell_parent(self, message: m.FromEngine) -> None:
        """The first message: whether the model was loaded."""
        if isinstance(message, m.Ready):
            self._ready, found = message, self._place | message.info["replica"]
        else:
            assert isinstance(message, m.Failed)
            found = {"failure": msgspec.to_builtins(message.failure)}
        with os.fdopen(self._announce, "w") as file:
            file.write(json.dumps(found) + "\n")

    # -- the main thread ---------------------------------------------------------------------

    def messages(self, server: EngineServer) -> Iterator[m.ToEngine]:
        """The messages of all fronts, until the parent has ended."""
        self._server = server
        poller = zmq.Poller()
        for socket in (self._router, self._in):
            poller.register(socket, zmq.POLLIN)
        while os.getppid() == self._parent:
            found = dict(poller.poll(POLL_MS))
            if self._in in found:
                self._pass_on()
            if self._router in found:
                yield from self._taken()
            now = time.monotonic()
            for identity, session in list(self._sessions.items()):
                if now - session.heard > self._silence:
                    self._end(identity, f"it was silent for {self._silence:g} s")

    def _pass_on(self) -> None:
        for _ in range(AT_ONCE):
            try:
                number, data = self._in.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if int(number) == EVERYBODY:
                receivers = list(self._sessions)
            else:
                receivers = [one for one in (self._identities.get(int(number)),) if one is not None]
            for identity in receivers:
                self._send(identity, data)

    def _send(self, identity: bytes, data: bytes) -> None:
        session = self._sessions[identity]
        if session.sent - session.acknowledged > self._most_unread:
            self._end(identity, f"more than {self._most_unread} bytes wait for it")
            return
        session.sent += len(data)
        try:
            self._router.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.ZMQError:  # its connection is gone
            self._end(identity, "its connection broke")

    def _taken(self) -> Iterator[m.ToEngine]:
        for _ in range(AT_ONCE):
            try:
                identity, data = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = m.to_engine.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                self._refuse(identity, f"a message cannot be read: {error}")
                self._end(identity, "it sent a message that cannot be read")
                continue
            if isinstance(message, m.Hello):
                self._begin(identity)
                continue
            if (session := self._sessions.get(identity)) is None:
                self._refuse(identity, "it has no session: it was silent, did not read, or its connection broke")
                continue
            session.heard = time.monotonic()
            session.received += len(data)
            if isinstance(message, m.Pulse):
                session.acknowledged = message.received
                self._send(identity, m.encoder.encode([m.Pulse(0, session.received)]))
            elif not isinstance(message, m.Stop):  # which is the parent's to say
                message.call = session.number << CALL_BITS | message.call & ((1 << CALL_BITS) - 1)
                yield message

    def _begin(self, identity: bytes) -> None:
        if identity in self._sessions:
            self._end(identity, "it began anew")
        assert self._ready is not None
        session = self._sessions[identity] = FrontSession(next(self._numbers), time.monotonic())
        self._identities[session.number] = identity
        for message in (*(m.Spread(0, order) for order in self._server.orders), self._ready):
            if identity in self._sessions:
                self._send(identity, m.encoder.encode([message]))

    def _end(self, identity: bytes, why: str) -> None:
        session = self._sessions.pop(identity, None)
        if session is None:
            return
        del self._identities[session.number]
        logger.warning("a front is gone, and its calls end: %s", why)
        self._server.end_calls(lambda call: call >> CALL_BITS == session.number)
        self._refuse(identity, why)

    def _refuse(self, identity: bytes, why: str) -> None:
        try:
            self._router.send_multipart([identity, m.encoder.encode([m.Gone(0, why)])], zmq.NOBLOCK)
        except zmq.ZMQError:  # no front is connected
            pass

    def close(self) -> None:
        """Send queued messages for a second, and end."""
        while self._in.poll(0):
            number, data = self._in.recv_multipart()
            if (identity := self._identities.get(int(number))) is not None:
                try:
                    self._router.send_multipart([identity, data], zmq.NOBLOCK)
                except zmq.ZMQError:
                    pass
        self._authenticator.stop()
        self._context.destroy(linger=1000)
