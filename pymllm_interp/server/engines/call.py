"""`Call`: the messages that answer one call of the HTTP process."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from ...core.events import EngineClosedError
from ...wire import messages as m
from ...wire.failures import EngineError


class EngineDiedError(EngineClosedError):
    """The engine process ended before it answered."""


class SlowReaderError(RuntimeError):
    """Results wait for a client that does not read them."""


class Call:
    """The messages that answer one call, in order.

    Args:
        number: call's number in messages.
        limit: bytes that may wait here.
    """

    def __init__(self, number: int, limit: int) -> None:
        self.number, self._limit = number, limit
        self._messages: deque[m.FromEngine | BaseException] = deque()
        self._came = asyncio.Event()
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
        self._messages.append(message)
        self._came.set()

    @property
    def has_token(self) -> bool:
        """Whether `next` has a token or an end without waiting."""
        return bool(self._messages) and isinstance(self._messages[0], m.Token | m.Finished)

    async def next(self) -> m.FromEngine:
        """The next message. The one before it was passed on to the client.
        Raises Exception: the answer of the engine process, or EngineDiedError."""
        if self._reading:
            self._total -= self._sizes.popleft()
        self._reading = False
        while not self._messages:
            self._came.clear()
            await self._came.wait()
        message, self._reading = self._messages.popleft(), True
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, m.Failed):
            raise EngineError(message.failure)
        return message


ENTRY_BYTES = 64
"""Bytes of a token or a log probability that waits, about."""


def _size(message: Any) -> int:
    if isinstance(message, m.Token):  # most are
        return ENTRY_BYTES * (1 + len(message.logprobs or ()))
    if isinstance(message, m.Frame):
        return len(message.header) + len(message.body)
    if isinstance(message, m.Rows):
        return message.states.size
    if not isinstance(message, m.Finished):
        return 0
    entries = [*(message.logprobs or ()), *(message.prompt_logprobs or ())]
    states = message.captured.data if message.captured is not None else None
    return ENTRY_BYTES * (len(message.token_ids) + sum(len(entry or ()) for entry in entries)) + len(states or b"")
