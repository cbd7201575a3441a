"""`RequestEnds`: ends the requests of an engine, and tells their subscribers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from ..core.events import Event, RowsEvent, Subscriber, TokenEvent
from ..core.request import Request
from ..core.step import DeclaredResult, ModelRunnerOutput, SchedulerOutput
from ..hooks.traces.blocks.trace import RequestTrace
from ..runner.interp_model_runner import InterpModelRunner
from .callbacks import Callbacks, call_for_fires
from .constraints import note_masked
from .scheduler import Scheduler
from .step_results import finished_event

logger = logging.getLogger(__name__)

MAX_STEPS_BEHIND = 256
"""Calls of an `on_step` that may wait: their values are held until then."""
MAX_CALLS_BEHIND = 1 << 16
"""Calls of monitors' functions of a request that may wait."""
OVERDUE_SECONDS = 0.5
"""Longest delay of a request's time limit while a trace block holds up the thread."""


class RequestEnds:
    """Ends requests one at a time, so that an error affects only its own request, and tells their subscribers.

    Args:
        runner: releases the resources of an ended request.
        callbacks: calls callers' functions beside the engine's thread.
        call_soon: runs a command on the engine's thread.

    Attributes:
        scheduler: set when the engine has made it; all but `subscribers` needs it.
        subscribers: request id -> the request and its subscriber, from submission to the last event.
        declared, streaming, constrained, monitored: ids of the live requests with declared hooks, with token events, with a
            constraint, with monitors.
        num_flat_logits: sum of the receipts' `flat_logits`.
    """

    scheduler: Scheduler

    def __init__(
        self, runner: InterpModelRunner, callbacks: Callbacks, call_soon: Callable[[Callable[[], None]], None]
    ) -> None:
        self.runner, self._callbacks, self._call_soon = runner, callbacks, call_soon
        self.subscribers: dict[str, tuple[Request, Subscriber]] = {}
        self.counted, self.streaming, self.constrained, self.monitored = set[str](), set[str](), set[str](), set[str]()
        self.num_flat_logits = 0
        self._events: list[tuple[Subscriber, Event]] = []
        self._answers: list[Callable[[], None]] = []
        self._answers_lock = threading.Lock()

    def note(self, requests: Iterable[Request]) -> None:
        """Record the requests that need handling in steps, so that steps check no others."""
        for request in requests:
            for ids, concerned in (
                (self.counted, request.receipt is not None and request.trace is None),
                (self.streaming, request.stream),
                (self.constrained, request.constraint is not None),
                (self.monitored, request.monitors is not None),
            ):
                if concerned:
                    ids.add(request.request_id)

    def expire(self) -> None:
        now = time.monotonic()
        late = [r for r in self.scheduler.live if r.deadline is not None and r.deadline < now]
        self.end(late, "timeout")

    def fail(self, requests: list[Request], error: BaseException) -> None:
        for request in requests:
            if not request.finished:
                request.error = error
        self.end(requests, "error")

    def end(self, requests: list[Request], reason: str) -> None:
        for request in requests:
            if not request.finished:
                self.scheduler.finish(request, reason)
                self.finished(request)

    def end_all(self, error_of: Callable[[Request], BaseException]) -> None:
        """End all requests of a closing engine, each with its error."""
        for request in self.scheduler.live:
            try:
                request.error = error_of(request)
                self.end([request], "abort")
            except BaseException:
                logger.exception("request %s could not be wound up", request.request_id)

    def answer_left(self, error_of: Callable[[Request], BaseException]) -> None:
        """Answer requests without an answer: something failed between their end and it."""
        for request, _ in list(self.subscribers.values()):
            request.error = error_of(request)
            self.answer(request)

    def known(self, request_ids: Iterable[str]) -> list[Request]:
        """The subset of the requests that the scheduler has."""
        return [found for rid in request_ids if (found := self.scheduler.requests.get(rid)) is not None]

    def finished(self, request: Request) -> None:
        """Wind up a request that the scheduler has ended, and tell its caller."""
        if request.gang is not None:
            if not all(member.finished for member in request.gang):
                return  # its blocks may still wait for blocks of the others
            ending, request.gang[:] = list(request.gang), []
        else:
            ending = [request]
        if request.trace is not None and ending:
            try:
                output = self.runner.finish_nnsight([member.ending() for member in ending])
                for member in ending:
                    member.saves = {member.trace.key: output.saves.get(member.request_id, {})}
                ending[-1].saves |= output.shared_saves
            except BaseException as error:
                for member in ending:
                    member.error = error if member.error is None else member.error
        for member in ending:
            self._tell(member)

    def _tell(self, request: Request) -> None:
        """Answer a request, after the calls of its trace's `on_step`."""
        if request.trace is not None and self._callbacks.num_waiting(request.trace):
            self._callbacks.put(request.trace, partial(self._call_soon, partial(self._tell_now, request)))
        else:
            self._tell_now(request)

    def _tell_now(self, request: Request) -> None:
        if request.trace is not None:
            request.error = request.trace.error if request.error is None else request.error
            request.warnings += request.trace.warnings
        if request.declared is None:
            self.answer(request)
            return
        try:
            arrived = self._finish_declared(request)
        except BaseException as error:
            request.error = error if request.error is None else request.error
            self.answer(request)
            return
        if arrived.done():
            self.answer(request, arrived)
        else:
            arrived.add_done_callback(lambda results: self._arrived(partial(self.answer, request, results)))

    def _arrived(self, answer: Callable[[], None]) -> None:
        """Have the engine's thread call `answer`. Called on the ring's thread: it wakes the other once for many requests."""
        with self._answers_lock:
            self._answers.append(answer)
            wakes = len(self._answers) == 1
        if wakes:
            self._call_soon(self._answer_all)

    def _answer_all(self) -> None:
        with self._answers_lock:
            answers, self._answers = self._answers, []
        for answer in answers:
            try:
                answer()
            except BaseException:  # the answers behind it are others'
                logger.exception("a request could not be answered")

    def _finish_declared(self, request: Request) -> Future[DeclaredResult]:
        """Release the request's reservations, and have the worker complete its results."""
        assert request.hooks is not None and self.runner.declarations is not None, "it declared something"
        self.runner.declarations.release(request)
        arrived, receipt = self.runner.finish_declared(request.ending()), request.receipt
        receipt.preemptions = request.num_preemptions
        if request.trace is None:  # which has them among its own
            request.warnings += receipt.warnings
        receipt.num_cached_tokens, receipt.not_reused = request.num_cached_tokens, request.not_reused
        if request.drafts is not None:
            receipt.drafted, receipt.accepted = request.drafts.drafted, request.drafts.accepted
        return arrived

    def answer(self, request: Request, arrived: Future[DeclaredResult] | None = None) -> None:
        """Emit the request's last event, behind the captured rows that its stream lacks.

        Args:
            arrived: the results of its interventions and captures.
        """
        if arrived is not None:
            error = arrived.exception()
            request.error = error if request.error is None else request.error
            if error is None:
                _take_result(request, result := arrived.result())
                if result.rows is not None:
                    self._emit(RowsEvent(request.request_id, result.rows))
        for ids in (self.counted, self.streaming, self.constrained, self.monitored):
            ids.discard(request.request_id)
        if request.adapter_hold is not None:
            request.adapter_hold.release()
        if request.constraint is not None:
            note_masked(request)
        self.num_flat_logits += request.num_flat
        if request.receipt is not None and request.receipt.weights and self.runner.model_state is not None:
            request.receipt.made_with(self.runner.model_state.version, len(request.output_token_ids))
        if request.receipt is not None and (kernels := self.runner.kernels):
            request.receipt.batch_invariant, request.receipt.kernels = True, kernels
        self._emit(finished_event(request))
        self.subscribers.pop(request.request_id, None)

    def emit_tokens(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Emit an event for each token of a streaming request that continues, behind the rows captured before it."""
        later: list[Event] = []
        for entry, tokens in zip(step.scheduled, output.sampled_token_ids, strict=True):
            request = self.scheduler.requests.get(entry.request_id)
            if request is None or not request.stream:
                continue
            events: list[Event] = []
            if tokens and request.num_streamed is not None:
                start, request.num_streamed = request.num_streamed, request.computed_once
                token_ids = request.token_ids_between(start, request.num_streamed)
                rows = self.runner.declared.rows_since(request.request_id, start, token_ids)
                events.append(RowsEvent(request.request_id, rows))
            for i, token in enumerate(tokens, -len(tokens)):
                logprobs = request.logprobs[i] if request.logprobs else None
                scores = None if request.monitors is None else request.monitors.unsent()
                events.append(TokenEvent(request.request_id, token, logprobs, scores))
            if request.num_streamed is None or request.declared.captures is None:
                self._emit(*events)
            else:  # its last event waits for the ring, too
                later += events
        if later:
            self.runner.declared.when_arrived(partial(self._arrived, partial(self._emit, *later)))

    def _emit(self, *events: Event) -> None:
        """Queue events; `send_events` sends them."""
        for event in events:
            found = self.subscribers.get(event.request_id)
            if found is not None:
                self._events.append((found[1], event))

    def send_events(self) -> None:
        events, self._events = self._events, []
        for subscriber, event in events:
            try:
                subscriber.put(event)
            except BaseException:  # SystemExit of a subscriber, too: the events behind it are others'
                logger.exception("an event of request %s could not be delivered", event.request_id)

    def call_monitors(self, requests: Iterable[Request]) -> None:
        """Call the functions of monitors that fired beside the engine's thread. Their errors are logged."""
        for request in requests if self.monitored else ():
            monitors = request.monitors
            if monitors is None or not monitors.calls:
                continue
            calls, monitors.calls = monitors.calls, []
            monitors.num_due += sum(len(positions) for _, _, positions, _ in calls)
            if monitors.num_due - monitors.num_called > MAX_CALLS_BEHIND:
                error = RuntimeError(
                    f"request {request.request_id}: the function of a monitor is {MAX_CALLS_BEHIND} calls behind; let it hand "
                    "them to another thread, or raise the threshold"
                )
                self.fail([request], error)
                continue
            for call in calls:
                self._callbacks.put(monitors.request_id, partial(call_for_fires, monitors, *call))

    def call_on_step(self, trace: RequestTrace, call: Callable[[], None]) -> None:
        """Call a trace's `on_step` beside the engine's thread. Its error ends the trace's requests."""
        if self._callbacks.num_waiting(trace) >= MAX_STEPS_BEHIND:
            raise RuntimeError(
                f"request {trace.request_id}: its on_step is {MAX_STEPS_BEHIND} steps behind, and their saved values are held; "
                "let it hand them to another thread, or save less"
            )

        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._call_soon(partial(self._fail_trace, trace, error))

        self._callbacks.put(trace, run)

    def _fail_trace(self, trace: RequestTrace, error: BaseException) -> None:
        if trace.error is None:
            trace.fail(error)
        self.end(self.known(trace.request_ids), "error")

    # -- while a block holds up the thread, on the watchdog's ------------------------------------

    def end_waits(self) -> None:
        """End the waits for requests past their time limit. The thread winds them up later."""
        now = time.monotonic() - OVERDUE_SECONDS
        for request, _ in list(self.subscribers.values()):
            if request.deadline is not None and request.deadline < now:
                self._end_wait(request, "timeout")

    def end_stuck(self, trace: RequestTrace, error: BaseException) -> None:
        """End the waits for the requests of a block that cannot be ended."""
        for request, _ in list(self.subscribers.values()):
            if request.trace is trace:
                request.error = error
                self._end_wait(request, "error")

    def _end_wait(self, request: Request, reason: str) -> None:
        found = self.subscribers.pop(request.request_id, None)
        if found is not None:  # else the thread has answered it meanwhile
            request.finish_reason = reason
            event = finished_event(request)
            found[1].put(replace(event, token_ids=list(event.token_ids)))


def _take_result(request: Request, result: DeclaredResult) -> None:
    """Record the results of a request's interventions and captures."""
    request.activations = found = result.activations
    request.receipt.interventions, request.receipt.captures = result.applied, result.captured
    if found is not None and found.error is not None and str(found.error) not in request.warnings:
        request.warnings.append(str(found.error))
