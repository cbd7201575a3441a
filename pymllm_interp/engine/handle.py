"""What a caller holds while its request runs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ..core.output import CompletionOutput, Logprob, RequestOutput
from ..core.request import Request
from ..hooks.capture import NOTHING, Activations
from .detokenizer import Detokenizer, find_stop

logger = logging.getLogger(__name__)


class StreamPiece(str):
    """A piece of generated text, with what belongs to it.

    Attributes:
        text: the piece itself.
        token_ids: the tokens that it came from; more than one where a character took several.
        output_index: which of the prompt's completions it belongs to.
        finish_reason: set on the last piece of a completion (whose text may be empty).
        activations, receipt: of its completion, on the last piece (the receipt where something was declared); else None.
    """

    token_ids: list[int]
    output_index: int
    finish_reason: str | None
    activations: Any = None
    receipt: Any = None

    @classmethod
    def of(cls, text: str, token_ids: list[int], index: int, finish_reason: str | None) -> StreamPiece:
        piece = cls(text)
        piece.token_ids, piece.output_index, piece.finish_reason = token_ids, index, finish_reason
        return piece

    @property
    def text(self) -> str:
        return str(self)


class Completion:
    """One request as its caller follows it: text, stop strings, pieces. Written by the engine's thread."""

    def __init__(self, request: Request, tokenizer: Any, streaming: bool) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._stops = request.params.stop_strings
        follows = tokenizer is not None and (streaming or self._stops)
        self._detokenizer = Detokenizer(tokenizer, request.params.skip_special_tokens) if follows else None
        self._emitted = self._emitted_chars = 0
        self._cut: int | None = None

    def advance(self) -> str | None:
        """Decode the newest token. Returns the stop string that it completed, if any."""
        if self._detokenizer is None:
            return None
        piece = self._detokenizer.push(self.request.output_token_ids)
        if not self._stops or len(self.request.output_token_ids) < self.request.params.min_tokens:
            return None
        found = find_stop(self._detokenizer.text, len(piece), self._stops)
        if found is None:
            return None
        index, stop = found
        self._cut = index + len(stop) if self.request.params.include_stop_str_in_output else index
        return stop

    def piece(self) -> StreamPiece | None:
        """What there is to stream since the last call. Text that may turn out a stop string is held back."""
        done = self.request.finished
        text = self.text() if done else (self._detokenizer.text if self._detokenizer else "")
        upto = len(text) if done else len(text) - self._held_back(text)
        ids = self.request.output_token_ids
        if not done and upto <= self._emitted_chars and self._tokenizer is not None:
            return None
        piece = StreamPiece.of(
            text[self._emitted_chars : max(upto, self._emitted_chars)],
            ids[self._emitted :],
            self.request.sample_index,
            self.request.finish_reason if done else None,
        )
        if done:
            piece.activations, piece.receipt = self.activations, self.request.receipt
        self._emitted, self._emitted_chars = len(ids), max(upto, self._emitted_chars)
        return piece

    def _held_back(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def text(self) -> str:
        """The finished text: without the stop string, and without the token that stopped it."""
        if self._tokenizer is None:
            return ""
        if self._cut is not None and self._detokenizer is not None:
            return self._detokenizer.text[: self._cut]
        ids = self.request.output_token_ids
        if isinstance(self.request.stop_reason, int):
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=self.request.params.skip_special_tokens)

    @property
    def activations(self) -> Activations:
        """What was captured."""
        found = self.request.activations
        return NOTHING if found is None else found

    def output(self) -> CompletionOutput:
        request = self.request
        return CompletionOutput(
            index=request.sample_index,
            text=self.text(),
            token_ids=list(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=self._decoded(request.logprobs),
            error=request.error,
            activations=self.activations,
            receipt=request.receipt,
        )

    def _decoded(self, entries: list[dict] | None) -> list[dict[int, Logprob]] | None:
        return None if entries is None else [decoded(entry, self._tokenizer) for entry in entries]


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


def decoded(entry: dict[int, Logprob], tokenizer: Any) -> dict[int, Logprob]:
    """The same log probabilities, with each token's text."""
    if tokenizer is None:
        return entry
    return {token: value._replace(decoded_token=tokenizer.decode([token])) for token, value in entry.items()}
