"""`ResultsLink`: the client's end of rank 0's `Egress`."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from ...core.step import RequestEnd
from ...utils.stage_times import TIMES
from ..results import SCORES, AskedRows, SentScores, SharedResults, host_name, read_block, send_at_once

logger = logging.getLogger(__name__)
CLOSE_SECONDS = 5
LOST = "the connection to rank 0 of vLLM ended before the request's results had arrived"


class ResultsLink:
    """Asks for the results of requests that have ended, and passes them on. Both on the client's loop, many at once.

    Args:
        address, key: address and key of `Egress`.
        soon: calls a function on the loop.

    Attributes:
        scored: takes the scores of each step, on the loop.
    """

    scored: Callable[[SentScores], None] | None = None

    def __init__(self, address: tuple[str, int], key: bytes, soon: Callable[..., None]) -> None:
        self._connection: Connection = Client((address[0], address[1]), authkey=key)
        send_at_once(self._connection)
        self._soon = soon
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._end = socket.socket(fileno=os.dup(self._connection.fileno()))
        self._asked: list[RequestEnd | AskedRows] = []
        self._waiting: dict[str, Callable[[Any], None]] = {}
        self._closed = False
        self._connection.send(host_name())
        self._shared = SharedResults(self._connection.recv(), lambda: soon(self._send))
        self._connection.send(self._shared.mapped)
        self._reader = threading.Thread(target=self._read, name="pymllm-interp-vllm-results", daemon=True)
        self._reader.start()

    def ask(self, question: RequestEnd | AskedRows, arrived: Callable[[Any], None]) -> None:
        """Have `arrived` called with a `RankResult`, None if the rank never met the request, or an exception.

        Of `AskedRows`, with a list of `SentRows`, None, or an exception.

        Called on the loop. All requests of one turn of the loop are one message.
        """
        with self._lock:
            self._waiting[key_of(question)] = arrived
            self._asked.append(question)
            first = len(self._asked) == 1
        if first:
            self._soon(self._send)

    def close(self) -> None:
        """End the connection; open requests get an error. Its reader closes the file: the number may be another's then."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
        self._reader.join(CLOSE_SECONDS)

    def _send(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        freed = self._shared.freed()
        if not asked and not freed:
            return
        try:
            with self._sending, TIMES.of("client: ask for results"):
                if self._closed:
                    raise OSError("it is closed")
                self._connection.send_bytes(pickle.dumps((asked, freed), protocol=5))
        except (OSError, ValueError) as error:
            self._pass_on([(key_of(one), RuntimeError(f"{LOST}: {error}")) for one in asked])

    def _read(self) -> None:
        try:
            while True:
                pickled, sent = self._connection.recv()
                with TIMES.of("client: read results", len(pickled)):
                    outcomes = read_block(pickled, sent, self._shared)
                self._soon(self._pass_on, outcomes)
                del pickled, sent, outcomes  # else they live until the next message
        except (EOFError, OSError, TypeError, ValueError):
            with self._sending:
                self._closed = True
                self._connection.close()
            self._soon(self._fail)

    def _pass_on(self, outcomes: list[tuple[str, Any]]) -> None:
        for request_id, outcome in outcomes:
            if request_id == SCORES:
                if self.scored is not None:
                    self.scored(outcome)
                continue
            with self._lock:
                arrived = self._waiting.pop(request_id, None)
            if arrived is not None:
                arrived(outcome)

    def _fail(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        self._pass_on([(request_id, RuntimeError(LOST)) for request_id in waiting])


def key_of(question: RequestEnd | AskedRows) -> str:
    """Name of the answer among outcomes."""
    return question.key if isinstance(question, AskedRows) else question.request_id
