"""`Outbox`: outgoing messages of the engine process, and their conversion from an engine's events."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from ...core.events import Event, FinishedEvent, Logprob, RowsEvent, TokenEvent, score_pairs
from ...core.receipt import Receipt
from ...core.request import Request
from ...hooks.captures.activations import Activations
from ...hooks.monitors.scores import MonitorScores
from ...wire.failures import failure_of
from ...wire.messages import CapturedStates, Finished, FromEngine, Logprobs, MonitorResult, Rows, Submit, Token
from ...wire.values import receipt_to_json
from .operator_monitors import OperatorMonitors, asks

logger = logging.getLogger(__name__)
UNREAD_BYTES = 8 << 20
"""Captured rows of a call that may be on their way to its client. More stay in the engine's memory of results."""


class Outbox:
    """Sends messages in order, from its own thread. All that have come since the last time leave together.

    Args:
        send: passes messages on to the HTTP process.
        store: folder for captured states that are too large for a message.
        inline_bytes: captured states up to this size travel in the message.
        replica: name of the replica, for receipts; empty with one engine only.
    """

    def __init__(
        self, send: Callable[[list[FromEngine]], Any], store: Path, inline_bytes: int, replica: str = ""
    ) -> None:
        self._send, self._store, self._inline, self.replica = send, store, inline_bytes, replica
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writers = ThreadPoolExecutor(2, "pymllm-interp-store")
        self._thread = threading.Thread(target=self._run, name="pymllm-interp-outbox", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine | Callable[[], Iterable[FromEngine]]) -> None:
        """Send a message, or the messages of a function called on the outbox's thread. Does not wait."""
        self._waiting.put(message)

    def close(self) -> None:
        """Send queued messages, and end."""
        self._writers.shutdown()
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            found = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(found) < 1024:
                    found.append(self._waiting.get_nowait())
            ended = None in found
            if messages := [message for entry in found if entry is not None for message in self._made(entry)]:
                self._send(messages)

    def _made(self, entry: Any) -> Iterator[FromEngine]:
        if not callable(entry):
            yield entry
            return
        try:
            yield from cast(Callable[[], Iterable[FromEngine]], entry)()
        except Exception:
            logger.exception("a message could not be made")

    def receipt(self, receipt: Receipt | None) -> dict[str, Any] | None:
        """A receipt as JSON, with the name of the replica."""
        if receipt is None:
            return None
        receipt.replica = self.replica
        return receipt_to_json(receipt)

    def finish(self, message: Finished, found: Activations | None) -> list[FromEngine]:
        """The last message of a request with its captured states; none if a file is written first."""
        if found is None or not found:
            return [message]
        try:
            size = sum(found.as_arrived(site).nbytes for site in found)
            if size <= self._inline:
                message.captured = _states(found)
                return [message]
        except Exception as error:
            return [_without_states(message, error)]
        self._writers.submit(self._write, message, found)
        return []

    def _write(self, message: Finished, found: Activations) -> None:
        path = self._store / f"pymllm-interp-{os.getpid()}-{message.call}-{message.request}.safetensors"
        try:
            found.save(path)
            message.captured = CapturedStates(path.stat().st_size, _shapes(found), file=path.name)
        except Exception as error:  # safetensors has a special error for a full disk
            path.unlink(missing_ok=True)
            _without_states(message, OSError(f"the captured states could not be stored: {error}"))
        self.put(message)


class CallEvents:
    """Subscribes to the events of one call's requests.

    A client that reads slowly has at most `UNREAD_BYTES` of captured rows on their way. Later events wait here, as positions.

    Args:
        call: the client's message.
        requests: the call's requests, in order.
        monitors: the operator's monitors, which clients may not see.
        ended: called when all have ended, on the outbox's thread.

    Attributes:
        request_ids: ids of the requests, in order.
    """

    def __init__(
        self, outbox: Outbox, call: Submit, requests: Sequence[Request], monitors: OperatorMonitors,
        ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self._outbox, self._call, self._monitors, self._ended = outbox, call.call, monitors, ended
        self.request_ids = [request.request_id for request in requests]
        self._numbers = {request_id: number for number, request_id in enumerate(self.request_ids)}
        self._asked = {request.request_id for request in requests if call.receipts or asks(request)}
        self._left, self._unread, self._left_by_client = len(requests), 0, False
        self._waiting: deque[Iterator[FromEngine]] = deque()

    def put(self, event: Event) -> None:
        """Take the next event. Called on the engine's thread."""
        self._outbox.put(lambda: self._next(self._messages(event)))

    def was_read(self, size: int) -> None:
        """The client has read captured rows."""

        def send() -> Iterator[FromEngine]:
            self._unread -= size
            return self._next()

        self._outbox.put(send)

    def leave(self) -> None:
        """The client is gone: send no further captured rows."""

        def send() -> Iterator[FromEngine]:
            self._left_by_client, self._unread = True, 0
            return self._next()

        self._outbox.put(send)

    def _next(self, *messages: Iterator[FromEngine]) -> Iterator[FromEngine]:
        """The messages that wait, and these, as far as the client reads."""
        self._waiting.extend(messages)
        while self._waiting and self._unread < UNREAD_BYTES:
            if (message := next(self._waiting[0], None)) is None:
                self._waiting.popleft()
                continue
            if isinstance(message, Rows):
                self._unread += message.states.size
            yield message

    def _messages(self, event: Event) -> Iterator[FromEngine]:
        number = self._numbers[event.request_id]
        if isinstance(event, RowsEvent):
            for part in event.rows.parts():
                if self._left_by_client:
                    return
                yield Rows(self._call, number, _states(part), list(event.rows.named_tokens(part)))
        elif isinstance(event, TokenEvent):
            scores = score_pairs(self._monitors.shown(event.scores))
            yield Token(self._call, number, event.token_id, _logprobs(event.logprobs), scores)
        else:
            yield from self._last(number, event)

    def _last(self, number: int, event: FinishedEvent) -> Iterable[FromEngine]:
        event = self._monitors.ended(event, event.request_id in self._asked)
        self._left -= 1
        if not self._left:
            self._ended()
        prompt = event.prompt_logprobs
        message = Finished(
            self._call,
            number,
            event.token_ids,
            event.finish_reason,
            stop_reason=event.stop_reason,
            text_length=event.text_length,
            num_hidden_tokens=event.num_hidden_tokens,
            logprobs=None if event.logprobs is None else [_logprobs(entry) or {} for entry in event.logprobs],
            prompt_logprobs=None if prompt is None else [_logprobs(entry) for entry in prompt],
            receipt=self._outbox.receipt(event.receipt),
            num_cached_tokens=event.num_cached_tokens,
            failure=None if event.error is None else failure_of(event.error),
            warnings=event.warnings,
            drafts=event.drafts,
            times=event.times,
            monitors=_monitors(event.monitors),
        )
        return self._outbox.finish(message, event.activations)


def _logprobs(found: dict[int, Logprob] | None) -> Logprobs | None:
    return None if found is None else {token: (value.logprob, value.rank) for token, value in found.items()}


def _monitors(found: Mapping[str, MonitorScores] | None) -> dict[str, MonitorResult] | None:
    return None if found is None else {name: MonitorResult(**scores.to_json()) for name, scores in found.items()}


def _states(found: Activations) -> CapturedStates:
    data = found.to_bytes()
    return CapturedStates(len(data), _shapes(found), data=data)


def _shapes(found: Activations) -> dict[str, list[int]]:
    return {site: list(found.as_arrived(site).shape) for site in found}


def _without_states(message: Finished, error: Exception) -> Finished:
    message.failure, message.captured = failure_of(error), None
    return message
