"""`RequestHandle`: the caller's handle of running requests."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from ..core.events import EngineClosedError, Event, FinishedEvent, RowsEvent, TokenEvent, score_pairs
from ..core.request import Request
from ..hooks.captures.activations import NOTHING
from .completion import Completion, RequestOutput, StreamPiece, decoded


class RequestError(RuntimeError):
    """A request failed. Its `__cause__` is the error.

    Attributes:
        outputs: outputs of all prompts of the call, in order; failed ones have finish_reason "error".
        index: index of the first prompt that failed.
    """

    def __init__(self, message: str, outputs: list[RequestOutput], index: int = 0) -> None:
        super().__init__(message)
        self.outputs, self.index = outputs, index

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.outputs, self.index)


class RequestEngine(Protocol):
    """Engine that runs requests. Handles keep it alive until their requests have ended."""

    forked: EngineClosedError | None
    """Error that waiting raises in a forked child."""

    @property
    def state(self) -> str:
        """Description of the engine's state: "idle", the number of live requests, or "shut down"."""
        ...

    @property
    def on_engine_thread(self) -> bool:
        """Whether the caller runs on an engine's thread."""
        ...

    def check_open(self) -> None:
        """Raise EngineClosedError if requests cannot be submitted."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with finish_reason "abort". Finished and unknown ones are left as they are."""
        ...

    def call_back(self, function: Callable[[], None]) -> None:
        """Run a caller's function on a thread for callbacks."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters of steps and requests, as JSON."""
        ...

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Forget the KV of the prefix cache, and of a connector if asked. Raises PermissionError where this client may not."""
        ...

    def shutdown(self, timeout: float | None = None) -> None:
        """End this client's requests, and free its exclusive resources. A second call does nothing.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds. It ends as soon as it can.
        """
        ...


class RequestHandle:
    """One prompt's requests, from submission to result. Made by `LM.submit`.

    `result()` waits, `cancel()` ends the requests, and iterating yields `StreamPiece`s if they were submitted for streaming.
    Subscribes to the requests' events: the engine's thread only stores them, the caller's thread decodes them.

    Args:
        prompt: text of the prompt, if it was text.
        requests: the prompt's `n` requests.
        tokenizer: a transformers tokenizer, or None.
        engine: serves the requests.
        streaming: whether their tokens are events, too.
        logprobs_mode: kind of the engine's log probabilities.
    """

    def __init__(
        self,
        prompt: str | None,
        requests: list[Request],
        tokenizer: Any,
        engine: RequestEngine,
        streaming: bool = False,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.prompt = prompt
        self.requests = requests
        self._logprobs_mode = logprobs_mode
        self._tokenizer, self._engine, self._streaming = tokenizer, engine, streaming
        self._completions = {
            r.request_id: Completion(r.request_id, r.sample_index, r.params, tokenizer, r.prompt_token_ids, NOTHING)
            for r in requests
        }
        self._finished: dict[str, FinishedEvent] = {}
        self._ended: Future[None] = Future()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._on_event: Callable[[], None] | None = None

    def __repr__(self) -> str:
        ended = dict(self._finished)
        state = ", ".join(sorted({event.finish_reason for event in ended.values()})) if self.done else "running"
        tokens = sum(
            len(ended[r.request_id].token_ids if r.request_id in ended else r.output_token_ids) for r in self.requests
        )
        return f"RequestHandle({', '.join(request.request_id for request in self.requests)}: {state}, {tokens} tokens)"

    def put(self, event: Event) -> None:
        """Take a request's next event. Called on the engine's thread."""
        last = isinstance(event, FinishedEvent)
        if last:  # first: who takes the event asks for its error
            self._finished[event.request_id] = event
        if self._streaming:
            self._events.put(event)
        if last and len(self._finished) == len(self.requests):
            self._ended.set_result(None)
        # Last: an error of its own must not lose the event.
        if (notify := self._on_event) is not None:
            notify()

    @property
    def done(self) -> bool:
        """Whether all completions have ended."""
        return self._ended.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all completions have ended.

        Raises:
            TimeoutError: after `timeout` seconds; the request keeps running.
            KeyboardInterrupt: Ctrl-C, which cancels the request.
            RuntimeError: called on an engine's thread, which must not wait.
        """
        self._refuse_engine_thread()
        try:
            self._ended.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"request {self.requests[0].request_id} is still running after {timeout} s") from None
        except (KeyboardInterrupt, SystemExit):  # a signal's: the wait is over
            self.cancel()
            raise

    def result(self, timeout: float | None = None, name: str | None = None) -> RequestOutput:
        """Wait for the output.

        Args:
            name: prompt name used in error messages.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds; the request keeps running.
            RequestError: the request failed. The error has its output.
            RuntimeError: the engine was shut down.
        """
        self.wait(timeout)
        return results_of([self], [name or "the request"])[0]

    async def ended(self) -> None:
        """`wait` for ``await``. Cancelling the task that waits ends the requests."""
        self._refuse_engine_thread()
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def on_end() -> None:
            with suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(wake)

        self._ended.add_done_callback(lambda _: on_end())
        try:
            await woken
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        yield from self.ended().__await__()
        return self.result()

    @property
    def ends(self) -> list[FinishedEvent]:
        """The last event of each completion, once all have ended."""
        return [self._finished[request.request_id] for request in self.requests]

    @property
    def error(self) -> BaseException | None:
        """Error of the first failed completion, or None."""
        found = (self._finished.get(request.request_id) for request in self.requests)
        return next((event.error for event in found if event is not None and event.error is not None), None)

    def output(self) -> RequestOutput:
        """The prompt and its completions, as far as they have come."""
        first = self.requests[0]
        outputs = [
            self._completions[r.request_id].output(self._finished.get(r.request_id) or _so_far(r))
            for r in self.requests
        ]
        for completion in outputs:
            completion.logprobs_mode = self._logprobs_mode
        ended = [self._finished[r.request_id] for r in self.requests if r.request_id in self._finished]
        prompt_logprobs = next((e.prompt_logprobs for e in ended if e.prompt_logprobs is not None), None)
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=outputs,
            prompt_logprobs=None
            if prompt_logprobs is None
            else [entry and decoded(entry, self._tokenizer) for entry in prompt_logprobs],
            finished=self.done,
            num_cached_tokens=next((event.num_cached_tokens for event in ended), 0),
            warnings=list(dict.fromkeys(text for event in ended for text in event.warnings)),
        )

    def cancel(self) -> None:
        """End the request. Its result has the tokens so far, with finish_reason "abort"."""
        self._engine.abort([request.request_id for request in self.requests])

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all completions have ended, on a thread for callbacks; at once, if they have."""
        if self._ended.done():
            callback()
        else:
            self._ended.add_done_callback(lambda _: self._engine.call_back(callback))

    def __iter__(self) -> Iterator[StreamPiece]:
        self._check_streaming("lm.stream(...)")
        self._refuse_engine_thread()
        left = len(self.requests)
        try:
            while left:
                self._refuse_fork()
                event = self._events.get()
                left -= isinstance(event, FinishedEvent)
                yield from self._pieces(event)
        finally:
            self.cancel()
        self._raise()

    async def __aiter__(self) -> AsyncIterator[StreamPiece]:
        self._check_streaming("lm.astream(...)")
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def on_event() -> None:
            with suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(arrived.set)

        self._on_event = on_event
        left = len(self.requests)
        try:
            while left:
                self._refuse_fork()
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    arrived.clear()
                    if self._events.empty():  # else one has come between the two
                        await arrived.wait()
                    continue
                left -= isinstance(event, FinishedEvent)
                for piece in self._pieces(event):
                    yield piece
        finally:
            self._on_event = None
            self.cancel()
        self._raise()

    def _pieces(self, event: Event) -> Iterator[StreamPiece]:
        completion = self._completions[event.request_id]
        if isinstance(event, RowsEvent):
            found = map(completion.rows_piece, event.rows.parts())
        elif isinstance(event, TokenEvent):
            found = [completion.token_piece(event.token_id, scores=score_pairs(event.scores))]
        else:
            found = [completion.last_piece(event)]
        yield from (piece for piece in found if piece is not None)

    def _check_streaming(self, call: str) -> None:
        if not self._streaming:
            raise TypeError(f"this request was not submitted for streaming: use {call}")

    def _refuse_fork(self) -> None:
        if self._engine.forked is not None and len(self._finished) < len(self.requests):
            raise self._engine.forked.with_traceback(None)

    def _refuse_engine_thread(self) -> None:
        self._refuse_fork()
        if not self.done and self._engine.on_engine_thread:
            raise RuntimeError(
                f"request {self.requests[0].request_id} is waited for inside the block of a trace, on the thread of an engine: it "
                "would wait for itself, or for an engine that waits for it. Submit it there, and wait for it outside"
            )

    def _raise(self) -> None:
        """Raise the error that ended a request, as it is."""
        if (error := self.error) is not None:
            raise error


def results_of(handles: Sequence[RequestHandle], names: Sequence[str] | None = None) -> list[RequestOutput]:
    """The outputs of requests that have ended.

    Args:
        names: prompt names used in error messages; None: "prompt 0" and so on.

    Raises:
        RequestError: one failed; the message is about the first.
        EngineClosedError: the engine was shut down before all had ended.
    """
    errors = [handle.error for handle in handles]
    for error in errors:
        if isinstance(error, EngineClosedError):
            raise error
    outputs = [handle.output() for handle in handles]
    failed = [index for index, error in enumerate(errors) if error is not None]
    if failed:
        index, error = failed[0], errors[failed[0]]
        others = f" ({len(failed)} of {len(handles)} failed)" if len(handles) > 1 else ""
        name = names[index] if names else f"prompt {index}"
        message = f"{name} failed{others}: {type(error).__name__}: {error}"
        raise RequestError(message, outputs, index) from error
    return outputs


def _so_far(request: Request) -> FinishedEvent:
    """The tokens of a request that has not ended."""
    token_ids = list(request.output_token_ids)
    logprobs = None if request.logprobs is None else request.logprobs[: len(token_ids)]
    return FinishedEvent(request.request_id, token_ids, "", logprobs=logprobs)
