"""`Egress`: the connection by which rank 0 sends results to the client, beside vLLM's own channels.

vLLM's ranks learn of a request's end in the step after it. Calls of all ranks wait for the step under way. So the client
asks rank 0 itself, over a socket that takes the client's key only.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from ....core.step import RequestEnd
from ....hooks.captures.streamed import StreamedRows
from ....utils.stage_times import TIMES
from ...blocks import StepEnds
from ...results import SCORES, AskedRows, SentScores, TensorBlock, host_name, send_at_once
from ..hooked_request import RankResult
from .result_arena import ResultArena

logger = logging.getLogger(__name__)


class Egress:
    """Listens for the client, and answers the ends of requests, each when its results have arrived on the host.

    One client at a time: the next one waits until the last one has left.

    Args:
        key: key that the client must present. It may change before the next one (`LM.attach` once more).
        finish: `RankStage.finish`.
        rows: `RankStage.rows`.
        arena: arena of the results.
    """

    def __init__(
        self,
        key: bytes,
        finish: Callable[[list[RequestEnd]], list[Future[RankResult | None]]],
        rows: Callable[[AskedRows], Future[StreamedRows | None]],
        arena: ResultArena,
    ) -> None:
        self.key = key
        self._finish, self._rows, self._arena = finish, rows, arena
        self._clients: list[_Answers] = []
        self._serving = threading.Lock()
        self._listener = Listener((_own_address(), 0), backlog=4)
        self.address: tuple[str, int] = self._listener.address  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=self._accept, name="pymllm-interp-egress", daemon=True).start()

    def tell(self, found: SentScores | StepEnds) -> None:
        """Send the scores of a step, or the requests with blocks that ended in it."""
        for answers in self._clients:
            answers.tell(found)

    def close(self) -> None:
        """Stop accepting clients."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            # By itself: a stranger may never answer.
            threading.Thread(target=self._welcome, args=(connection,), name="pymllm-interp-egress", daemon=True).start()

    def _welcome(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
        except Exception:  # a stranger, without the key
            logger.warning("a client of the egress was refused", exc_info=True)
            connection.close()
            return
        with self._serving:
            self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        answers = None
        try:
            send_at_once(connection)
            same_host = connection.recv() == host_name()
            connection.send((self._arena.name, self._arena.size) if same_host else None)
            answers = _Answers(connection, self._arena if connection.recv() else None)
            self._clients = [answers]  # there is one
            while True:
                asked, freed = pickle.loads(connection.recv_bytes())
                with TIMES.of("egress: take blocks back"):
                    self._arena.take_back(freed)
                ends = [one for one in asked if isinstance(one, RequestEnd)]
                for one in asked:
                    if isinstance(one, AskedRows):
                        answers.put(one.key, self._rows(one))
                with TIMES.of("egress: end requests"):
                    for end, future in zip(ends, self._finish(ends), strict=True):
                        answers.put(end.request_id, future)
                answers.flush()
        except (EOFError, OSError):
            pass
        finally:
            self._clients = []
            if answers is not None:
                answers.close()
            connection.close()
            self._arena.take_back()


class _Answers:
    """Outcomes on their way to the client: those that have arrived together are one message.

    Args:
        arena: arena that the client maps, or None.
    """

    def __init__(self, connection: Connection, arena: ResultArena | None) -> None:
        self._connection, self._arena = connection, arena
        self._arrived: deque[tuple[str, Future[Any]]] = deque()
        self._is_due = False  # the writer is to look at the queue
        self._writer = ThreadPoolExecutor(1, "pymllm-interp-egress")

    def put(self, request_id: str, future: Future[Any]) -> None:
        """Answer when the outcome is there."""
        if future.done():
            self._arrived.append((request_id, future))
        else:
            future.add_done_callback(lambda done: (self._arrived.append((request_id, done)), self.flush()))

    def tell(self, found: SentScores | StepEnds) -> None:
        """Send the findings of a step, before the results of requests that end after it."""
        self._soon(self._send_found, found)

    def _send_found(self, found: SentScores | StepEnds) -> None:
        if isinstance(found, SentScores):
            if found.copied is not None:
                found.copied.synchronize()
            found = found._replace(copied=None)
        block = TensorBlock()
        pickled = block.dumped([(SCORES, found)])
        with contextlib.suppress(OSError, ValueError):  # the client is gone
            self._connection.send((pickled, block.sent()))

    def flush(self) -> None:
        """Send arrived results, from a separate thread: those that arrive before it begins go together."""
        if not self._is_due:
            self._is_due = True
            self._soon(self._send)

    def close(self) -> None:
        """Send nothing more. The connection is closed after that only: its file may get another one's number."""
        self._writer.shutdown(cancel_futures=True)

    def _soon(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the client is gone
            self._writer.submit(function, *arguments)

    def _send(self) -> None:
        arrived: list[tuple[str, Any]] = []
        self._is_due = False  # before the queue is read: who adds to it later asks again
        while self._arrived:
            request_id, done = self._arrived.popleft()
            arrived.append((request_id, done.exception() or done.result()))
        if not arrived:
            return
        block = TensorBlock(self._arena)
        try:
            with TIMES.of("egress: pickle"):
                pickled = block.dumped(arrived)
            with TIMES.of("egress: block of small tensors", block.size):
                message = pickled, block.sent() if block.size else None
        except Exception as error:
            block = TensorBlock()
            lost = [(request_id, RuntimeError(f"results cannot be sent: {error!r}")) for request_id, _ in arrived]
            message = block.dumped(lost), None
        try:
            with TIMES.of("egress: send", len(message[0])):
                self._connection.send(message)
        except (OSError, ValueError):  # the client is gone
            self._connection.close()


def _own_address() -> str:
    """Address for other hosts; the loopback address on a single host."""
    import os

    if os.environ.get("VLLM_HOST_IP"):
        return os.environ["VLLM_HOST_IP"]
    return "127.0.0.1" if not os.environ.get("RAY_ADDRESS") else socket.gethostbyname(socket.gethostname())
