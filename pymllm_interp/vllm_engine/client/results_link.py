"""`ResultsLink`: the client's end of rank 0's `Egress`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from ...core.step import RequestEnd
from ..payloads import TensorKeys, dumped
from ..results import host_name, read_block

logger = logging.getLogger(__name__)
LOST = "the connection to rank 0 of vLLM ended before the request's results had arrived"


class ResultsLink:
    """Asks for the results of requests that have ended, and passes them on from a thread of its own.

    Args:
        address, key: of `Egress`.
    """

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._connection: Connection = Client((address[0], address[1]), authkey=key)
        self._connection.send(host_name())
        self._lock = threading.Lock()
        self._waiting: dict[str, Callable[[Any], None]] = {}
        self._closed = False
        threading.Thread(target=self._read, name="pymllm-interp-vllm-results", daemon=True).start()

    def ask(self, end: RequestEnd, arrived: Callable[[Any], None]) -> None:
        """Have `arrived` called with a `RankResult`, None where the rank never met the request, or an exception."""
        with self._lock:
            self._waiting[end.request_id] = arrived
        try:
            if self._closed:
                raise OSError(LOST)
            payload = dumped(end, TensorKeys(), {})
            with self._lock:
                self._connection.send_bytes(payload)
        except (OSError, ValueError) as error:
            self._pass_on(end.request_id, RuntimeError(f"{LOST}: {error}"))

    def close(self) -> None:
        """End the connection; what waits gets an error."""
        self._closed = True
        self._connection.close()
        self._fail()

    def _read(self) -> None:
        try:
            while True:
                request_id, outcome = read_block(*self._connection.recv())
                self._pass_on(request_id, outcome)
        except (EOFError, OSError, TypeError, ValueError):
            self._closed = True
            self._fail()

    def _pass_on(self, request_id: str, outcome: Any) -> None:
        with self._lock:
            arrived = self._waiting.pop(request_id, None)
        if arrived is not None:
            arrived(outcome)

    def _fail(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for arrived in waiting.values():
            arrived(RuntimeError(LOST))
