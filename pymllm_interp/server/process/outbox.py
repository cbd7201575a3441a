"""`Outbox`: outgoing messages of the engine process, and their conversion from an engine's events."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...core.events import Event, FinishedEvent, Logprob, score_pairs
from ...core.receipt import Receipt
from ...core.request import Request
from ...hooks.captures.activations import Activations
from ...hooks.monitors.scores import MonitorScores
from ...wire.failures import failure_of
from ...wire.messages import CapturedStates, Finished, FromEngine, Logprobs, MonitorResult, Submit, Token
from ...wire.receipts import receipt_to_json
from .operator_monitors import OperatorMonitors, asks

logger = logging.getLogger(__name__)


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

    def put(self, message: FromEngine | Callable[[], FromEngine | None]) -> None:
        """Send a message, or the result of a function called on the outbox's thread. Does not wait."""
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
            messages = [self._made(entry) for entry in found if entry is not None]
            if messages := [message for message in messages if message is not None]:
                self._send(messages)

    def _made(self, entry: Any) -> Any:
        if not callable(entry):
            return entry
        try:
            return entry()
        except Exception:
            logger.exception("a message could not be made")
            return None

    def receipt(self, receipt: Receipt | None) -> dict[str, Any] | None:
        """A receipt as JSON, with the name of the replica."""
        if receipt is None:
            return None
        receipt.replica = self.replica
        return receipt_to_json(receipt)

    def finish(self, message: Finished, found: Activations | None) -> Finished | None:
        """The last message of a request with its captured states; None if a file is written first."""
        if found is None or not found:
            return message
        try:
            size = sum(found.as_arrived(site).nbytes for site in found)
            if size <= self._inline:
                data = found.to_bytes()
                message.captured = CapturedStates(len(data), _shapes(found), data=data)
                return message
        except Exception as error:
            return _without_states(message, error)
        self._writers.submit(self._write, message, found)
        return None

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

    Args:
        call: the client's message.
        requests: the call's requests, in order.
        monitors: the operator's monitors, which clients may not see.
        ended: called when all have ended, on the outbox's thread.
    """

    def __init__(
        self, outbox: Outbox, call: Submit, requests: Sequence[Request], monitors: OperatorMonitors,
        ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self._outbox, self._call, self._monitors, self._ended = outbox, call.call, monitors, ended
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._asked = {request.request_id for request in requests if call.receipts or asks(request)}
        self._left = len(requests)

    def put(self, event: Event) -> None:
        """Take the next event. Called on the engine's thread."""
        self._outbox.put(lambda: self._message(event))

    def _message(self, event: Event) -> FromEngine | None:
        number = self._numbers[event.request_id]
        if not isinstance(event, FinishedEvent):
            scores = score_pairs(self._monitors.shown(event.scores))
            return Token(self._call, number, event.token_id, _logprobs(event.logprobs), scores)
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


def _shapes(found: Activations) -> dict[str, list[int]]:
    return {site: list(found.as_arrived(site).shape) for site in found}


def _without_states(message: Finished, error: Exception) -> Finished:
    message.failure, message.captured = failure_of(error), None
    return message
