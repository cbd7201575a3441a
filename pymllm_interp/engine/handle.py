"""What a caller holds while its request runs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ..core.output import RequestOutput
from ..core.request import Request
from .completion import Completion, StreamPiece, decoded

logger = logging.getLogger(__name__)


class RequestHandle:
    """One prompt's requests, from submission to result. Made by `LM.submit`.

    `result()` waits, `cancel()` ends it, iterating yields `StreamPiece`s where it was submitted for streaming.

    Attributes:
        follows: each token is asked for as it comes, by `on_token`.
        may_stop: and may end the request, by a stop string.
    """

    def __init__(
        self, prompt: str | None, requests: list[Request], tokenizer: Any, abort: Callable[[list[Request]], None],
        streaming: bool = False,
    ) -> None:  # fmt: skip
        self.prompt = prompt
        self.requests = requests
        self._completions = {id(r): Completion(r, tokenizer, streaming) for r in requests}
        self._tokenizer = tokenizer
        self._abort = abort
        self.may_stop = tokenizer is not None and any(request.params.stop_strings for request in requests)
        self.follows = streaming or self.may_stop
        self._left = len(requests)
        self.engine_thread: threading.Thread | None = None  # set when it is submitted
        self._done = threading.Event()
        self._pieces: queue.SimpleQueue[StreamPiece | None] | None = queue.SimpleQueue() if streaming else None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    # -- the engine's side ---------------------------------------------------------

    def on_token(self, request: Request) -> str | None:
        """A token was appended. Returns the stop string that it completed, if any."""
        completion = self._completions[id(request)]
        stop = completion.advance()
        if self._pieces is not None and stop is None and not request.finished:
            piece = completion.piece()
            if piece is not None:
                self._pieces.put(piece)
        return stop

    def on_finish(self, request: Request) -> None:
        """The request has ended, whatever the reason."""
        if self._pieces is not None:
            self._pieces.put(self._completions[id(request)].piece())
        self._left -= 1
        if self._left == 0:
            if self._pieces is not None:
                self._pieces.put(None)
            with self._lock:
                self._done.set()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:  # a caller's mistake must not stop the engine
                    logger.exception("a callback of request %s failed", request.request_id)

    # -- the caller's side -----------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all completions have ended. Raises TimeoutError after `timeout` seconds; the request goes on."""
        self._refuse_engine_thread()
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.requests[0].request_id} is still running after {timeout} s")

    def _refuse_engine_thread(self) -> None:
        if not self.done and threading.current_thread() is self.engine_thread:
            raise RuntimeError(
                f"request {self.requests[0].request_id} is waited for inside the block of a trace or a callback, where the "
                "engine would wait for itself: submit it there, and wait for it outside"
            )

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the output.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds; the request goes on.
            RuntimeError: the engine was shut down.
        """
        self.wait(timeout)
        for request in self.requests:
            if isinstance(request.error, EngineClosedError):
                raise request.error
        return self.output()

    def output(self) -> RequestOutput:
        first = self.requests[0]
        prompt_logprobs = first.prompt_logprobs
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[self._completions[id(r)].output() for r in self.requests],
            prompt_logprobs=None
            if prompt_logprobs is None
            else [entry and decoded(entry, self._tokenizer) for entry in prompt_logprobs],
            finished=self.done,
            warnings=list(dict.fromkeys(w for r in self.requests for w in r.warnings)),
        )

    def cancel(self) -> None:
        """End the request; its result has what was generated so far, with finish_reason "abort"."""
        self._abort(self.requests)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all completions have ended (at once, if they have), on the engine's thread."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def __iter__(self) -> Iterator[StreamPiece]:
        if self._pieces is None:
            raise TypeError("this request was not submitted for streaming: use lm.stream(...)")
        self._refuse_engine_thread()
        try:
            while (piece := self._pieces.get()) is not None:
                yield piece
        finally:
            self.cancel()
        self._raise()

    def _raise(self) -> None:
        """Raise what ended the request; a stream has no output that could carry it."""
        for request in self.requests:
            if request.error is not None:
                raise request.error

    async def __aiter__(self) -> AsyncIterator[StreamPiece]:
        if self._pieces is None:
            raise TypeError("this request was not submitted for streaming: use lm.astream(...)")
        loop = asyncio.get_running_loop()
        try:
            while (piece := await loop.run_in_executor(None, self._pieces.get)) is not None:
                yield piece
        finally:
            self.cancel()
        self._raise()


class EngineClosedError(RuntimeError):
    """The engine was shut down."""
