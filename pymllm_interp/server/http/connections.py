"""Connections: how many there are, how long they may rest, and how large the head of a request may be.

uvicorn bounds none of these with httptools: it has a time limit only for connections that have had a response. Its
`limit_concurrency` counts connections too, but answers 503 to every request above it. So idle connections lock all others out.
"""

from __future__ import annotations

import errno
import logging
import resource
import time
from asyncio import AbstractEventLoop, BaseTransport, TimerHandle
from functools import partial
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..settings import ServeLimits
from .errors import ApiError

logger = logging.getLogger("pymllm_interp.server")
BACKLOG = 256
"""Connections waiting to be accepted. The event loop accepts that many at once, before it can refuse one."""
OTHER_FILES = 256
"""File descriptors reserved for engine sockets and capture files."""
PIPELINED = 64
"""Requests that may wait behind another one of their connection."""
SECONDS_BETWEEN_REPORTS = 60.0
LINGER_SECONDS = 1.0
"""Seconds that a refused connection stays open, so that the client can read the reason."""


READ_SECONDS, READ_BYTES = 300.0, 1 << 16
"""A client must read this many bytes of an answer in this many seconds, or is disconnected."""


class Resting:
    """The connections that wait for their clients, the one that has rested longest first.

    A client has to send a request, the rest of one, or to read its answer.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self._since: dict[BoundedProtocol, None] = {}

    def add(self, connection: BoundedProtocol) -> None:
        """A connection begins to rest."""
        self.remove(connection)
        self._since[connection] = None

    def remove(self, connection: BoundedProtocol) -> None:
        """A connection has a whole request, which runs, or is closed."""
        self._since.pop(connection, None)

    def make_room(self) -> bool:
        """Close the connection that has rested longest; False: all have a running request."""
        oldest = next(iter(self._since), None)
        if oldest is not None:
            self.remove(oldest)
            oldest.transport.abort()
        return oldest is not None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with bounds on the data that a client sends or holds before its request is seen.

    Args:
        resting: shared by all connections.
    """

    def __init__(self, *args: Any, resting: Resting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._resting, self._limits = resting, resting.limits
        self._head_timer: TimerHandle | None = None
        self._read_timer: TimerHandle | None = None
        self._unparsed = self._head_bytes = 0
        self._refused = False

    def connection_made(self, transport: BaseTransport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        if len(self.connections) > self._limits.max_connections and not self._resting.make_room():
            most = self._limits.max_connections
            self._refuse(
                ApiError(503, f"{most} connections have running requests (max_connections)", code="busy"), lingers=True
            )
            return
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._resting.remove(self)
        self._stop_head_timer()
        self._stop_read_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._unparsed += len(data)
            if self._unparsed > self._limits.max_header_bytes:
                self.transport.abort()
            return
        if self._idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.header_seconds, self._head_is_late)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self._limits.max_header_bytes and not self._over:
            self._refuse_head()

    @property
    def _idle(self) -> bool:
        """Whether no request is running on the connection."""
        return self.cycle is None or self.cycle.response_complete

    # -- callbacks of the parser: each handles received bytes

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes <= self._limits.max_header_bytes:  # trailers of a body count as well
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._stop_head_timer()
        if self._head_bytes > self._limits.max_header_bytes or len(self.pipeline) >= PIPELINED:
            self._refuse_head()
        if not self._over:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        if not self._over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        if self._over:
            return
        if self._idle:  # it was answered before its body came
            self._stop_head_timer()
            self._rest()
        else:
            self._resting.remove(self)
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._resting.add(self)
        self._watch_reader()

    def resume_writing(self) -> None:
        """Continue after the client has read."""
        super().resume_writing()
        self._stop_read_timer()
        if not self._idle:
            self._resting.remove(self)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, once the client has read everything sent."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._idle and not self._over:
            self._rest()

    # -- ends

    def _rest(self) -> None:
        """Wait for a request, for a limited time."""
        self._resting.add(self)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self._limits.idle_seconds, self.timeout_keep_alive_handler)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self) -> None:
        """Close the connection unless its client reads everything sent before the timer ends."""
        self._stop_read_timer()
        size = self.transport.get_write_buffer_size()
        if size:
            self._read_timer = self.loop.call_later(READ_SECONDS, self._check_reader, size)

    def _check_reader(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < min(before, READ_BYTES):
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _head_is_late(self) -> None:
        seconds = self._limits.header_seconds
        self._refuse(ApiError(408, f"no whole head of a request came within {seconds:g} s (header_seconds)"))

    def _refuse_head(self) -> None:
        most = self._limits.max_header_bytes
        self._refuse(ApiError(431, f"the request's head is larger than {most} bytes (max_header_bytes)"))

    def _refuse(self, error: ApiError, lingers: bool = False) -> None:
        """Answer, if nothing is on its way to the client, and close the connection.

        Args:
            lingers: first receive the client's pending data: closed with bytes unread, a connection loses the answer.
        """
        if self._idle and not self._over:
            body = bytes(error.response().body)
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        if lingers and self.transport.can_write_eof():  # TLS cannot
            self._refused = True
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    @property
    def _over(self) -> bool:
        """Whether nothing more is read of this connection."""
        return self._refused or self.transport.is_closing()


def http_config(app: Any, limits: ServeLimits, **tls: Any) -> Config:
    """uvicorn's settings, with connections that are bounded.

    Args:
        tls: uvicorn's `ssl_` options.
    """
    protocol: Any = partial(BoundedProtocol, resting=Resting(limits))
    return Config(
        app, http=protocol, log_config=None, access_log=False, timeout_graceful_shutdown=5, backlog=BACKLOG,
        server_header=False, ws="none", proxy_headers=False, **tls,
    )  # fmt: skip


def with_room_for_files(most: int) -> int:
    """Number of connections that the limit of open files allows, up to `most`. Raises the process's soft limit if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + BACKLOG + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most
    found = max(soft - BACKLOG - OTHER_FILES, soft // 4)
    logger.warning("the limit of %d open files leaves room for %d connections, not %d (ulimit -n)", soft, found, most)
    return found


class OutOfFiles:
    """An event loop's handler of exceptions. Without room for a file, each refused connection would be a line of the log."""

    def __init__(self) -> None:
        self._reported = -SECONDS_BETWEEN_REPORTS

    def __call__(self, loop: AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an exception; one of a full table of files once a minute."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._reported >= SECONDS_BETWEEN_REPORTS:
            self._reported = time.monotonic()
            logger.error("no connection can be accepted: %s (ulimit -n); it is tried again each second", error.strerror)
