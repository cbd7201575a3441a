"""`Egress`: the connection by which rank 0 sends results to the client, beside vLLM's own channels.

vLLM's ranks learn of a request's end in the step after it. Calls of all ranks wait for the step under way. So the client
asks rank 0 itself, over a socket that takes the client's key only.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from ...core.step import RequestEnd
from ..payloads import loaded
from ..results import TensorBlock, host_name
from .stage import RankResult

logger = logging.getLogger(__name__)
WRITERS = 4
"""Threads that copy results to shared memory."""


class Egress:
    """Listens for the client, and answers the ends of requests, each when its results have arrived on the host.

    Args:
        key: that the client must have.
        finish: `RankStage.finish`.
    """

    def __init__(self, key: bytes, finish: Callable[[RequestEnd], Future[RankResult | None]]) -> None:
        self._finish = finish
        self._listener = Listener((_own_address(), 0), backlog=4, authkey=key)
        self._lock = threading.Lock()
        self._writers = ThreadPoolExecutor(WRITERS, "pymllm-interp-egress")
        self.address: tuple[str, int] = self._listener.address  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=self._accept, name="pymllm-interp-egress", daemon=True).start()

    def close(self) -> None:
        """Take no more clients."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            except Exception:  # a stranger, without the key
                logger.warning("a client of the egress was refused", exc_info=True)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="pymllm-interp-egress", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            own_host = connection.recv() == host_name()
            while True:
                end: RequestEnd = loaded(connection.recv_bytes(), {})
                try:
                    future = self._finish(end)
                except Exception as error:
                    self._answer(connection, own_host, end.request_id, error)
                    continue
                future.add_done_callback(
                    lambda done, request_id=end.request_id: self._writers.submit(
                        self._answer, connection, own_host, request_id, _outcome(done)
                    )
                )
        except (EOFError, OSError):
            connection.close()

    def _answer(self, connection: Connection, own_host: bool, request_id: str, outcome: Any) -> None:
        block = TensorBlock()
        try:
            pickled = block.dumped((request_id, outcome))
        except Exception as error:
            block = TensorBlock()
            pickled = block.dumped((request_id, RuntimeError(f"results cannot be sent: {error!r}")))
        file = block.to_file() if block.size and own_host else None
        data = block.to_bytes() if block.size and not own_host else None
        try:
            with self._lock:
                connection.send((pickled, file, data))
        except (OSError, ValueError):  # the client is gone
            connection.close()
            if file is not None:
                Path(file).unlink(missing_ok=True)


def _outcome(done: Future[Any]) -> Any:
    return done.exception() or done.result()


def _own_address() -> str:
    """Where other hosts reach this one; the loopback where there is no other host."""
    import os

    if os.environ.get("VLLM_HOST_IP"):
        return os.environ["VLLM_HOST_IP"]
    return "127.0.0.1" if not os.environ.get("RAY_ADDRESS") else socket.gethostbyname(socket.gethostname())
