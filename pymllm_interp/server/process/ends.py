"""`DoorEnd`: the end of a `Door` in an engine process. `ProcessEnd` is that of a server's one engine process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import zmq

from ...wire import messages as m
from .engine_server import EngineServer

POLL_MS = 500
"""Milliseconds between checks that the parent is alive."""


class DoorEnd(Protocol):
    """Transport of an engine process's messages."""

    def send(self, messages: list[m.FromEngine]) -> None:
        """Send messages. Called on one thread, the outbox's. Does not wait."""
        ...

    def messages(self, server: EngineServer) -> Iterator[m.ToEngine]:
        """The messages that come, until one says stop or the parent has ended. Called on the process's main thread."""
        ...

    def close(self) -> None:
        """Send queued messages, and end."""
        ...


class ProcessEnd:
    """Two sockets of the HTTP process, which started this one.

    Args:
        settings: settings of the engine process: `requests` and `events` (addresses), and `parent` (its process id).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._parent, self._context = settings["parent"], zmq.Context()
        self._incoming, self._outgoing = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._outgoing.setsockopt(zmq.LINGER, 1000)
        for socket in (self._incoming, self._outgoing):
            socket.set_hwm(0)
        self._incoming.connect(settings["requests"])
        self._outgoing.connect(settings["events"])

    def send(self, messages: list[m.FromEngine]) -> None:
        self._outgoing.send(m.encoded(messages))

    def messages(self, server: EngineServer) -> Iterator[m.ToEngine]:
        while os.getppid() == self._parent:  # which may have ended while the model was loaded
            if not self._incoming.poll(POLL_MS):
                continue
            message = m.to_engine.decode(self._incoming.recv())
            if isinstance(message, m.Stop):
                return
            yield message

    def close(self) -> None:
        self._context.destroy(linger=1000)
