"""`VllmRequestEngine`: runs requests in vLLM. A `client.handle.RequestEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...client.remote.remote_errors import exception_of
from ...core.events import EngineClosedError, Event, RowsEvent, Subscriber, TokenEvent
from ...core.request import Request, RequestStatus
from ...core.step import DeclaredResult, ModelRunnerOutput, RequestEnd, RequestHooks
from ...engine.callbacks import Callbacks
from ...engine.step_results import Progress, finished_event, take
from ...hooks.declared import Declared
from ..blocks import StepEnds, take_outer, unpacked
from ..results import AskedRows, SentScores
from .adapters import VllmAdapters
from .core import VllmCore, closed
from .live import Live
from .ranks.joined import joined
from .sampling import follows, logprobs_of, pooling_params, prompt_of, salt_of, vllm_params

logger = logging.getLogger(__name__)
CLOSING_SECONDS = 5.0
STATS_SECONDS = 30.0
SCORES_SECONDS = 30.0
WATCH_SECONDS = 5.0


class VllmRequestEngine:
    """Engine that serves requests on the loop of vLLM's client.

    Args:
        core: vLLM.
        release: releases the resources of requests.
        adapters: the loaded ones.
        version: gives the version of the weights.

    Attributes:
        num_events: answers of vLLM, for `progress`.
        why_closed: error of new requests while the engine sleeps. It changes under `lock`.
    """

    forked: EngineClosedError | None = None
    why_closed: Exception | None = None

    def __init__(
        self, core: VllmCore, release: Callable[[Request], None], adapters: VllmAdapters, version: Callable[[], int]
    ) -> None:
        self.core, self._release, self._adapters, self._version = core, release, adapters, version
        self.num_events = 0
        self._live: dict[str, Live] = {}
        self._callbacks = Callbacks()
        self.lock = threading.Lock()
        self._closing: BaseException | None = None
        self._released = self._shut = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps = 0
        self._loads = [0] * core.engines  # live requests of each engine
        self.only_engine: int | None = None  # that all requests go to, for the canary
        for link in (link for links in core.links for link in links):
            link.scored = self._told
        self._watching = core.start(self._watch())
        core.watch(self._rank_failed)

    def __repr__(self) -> str:
        return f"VllmRequestEngine({self.state})"

    @property
    def state(self) -> str:
        """Description of the engine's state: "shut down", "idle" or the number of live requests."""
        if self._closing is not None or self.forked is not None:
            return "shut down" if self.forked is None else "of the parent process"
        return f"live requests: {len(self._live)}" if self._live else "idle"

    @property
    def on_engine_thread(self) -> bool:
        """Whether the caller runs on the thread of vLLM's client, which must not wait."""
        return self.core.on_loop

    def check_open(self) -> None:
        """Raise EngineClosedError if requests cannot be submitted."""
        if self.forked is not None:
            raise self.forked.with_traceback(None)
        if self._closing is not None:
            raise EngineClosedError(str(self._closing)) from self._closing

    # -- callers -----------------------------------------------------------------

    def submit_all(self, groups: Sequence[tuple[Sequence[Request], Subscriber]]) -> None:
        """Start requests, all at once. Raises EngineClosedError after `shutdown`, and `why_closed`."""
        live = [Live(request, subscriber) for requests, subscriber in groups for request in requests]
        with self.lock:
            self.check_open()
            if self.why_closed is not None:
                raise self.why_closed.with_traceback(None)
            self._live |= {one.request.request_id: one for one in live}
        self.core.soon(self._start, live)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with finish_reason "abort". Finished and unknown ones are left as they are."""
        self.core.soon(self._stop_all, list(request_ids), "abort")

    def abort_all(self) -> None:
        """End all live requests, also those that are on their way to vLLM."""
        self.abort(list(self._live))

    @property
    def live(self) -> list[Live]:
        """The live requests."""
        return list(self._live.values())

    def wait_until_idle(self) -> None:
        """Wait until no request is live."""
        while self._live:
            time.sleep(0.01)

    def end_with(self, error: EngineClosedError) -> EngineClosedError:
        """End all requests with an error, which is returned, and refuse others."""
        self._closing = error
        for one in self.live:
            self.core.soon(self._fail, one, error)
        return error

    def call_back(self, function: Callable[[], None]) -> None:
        """Run a caller's function beside the loop."""
        self._callbacks.put(self, function)

    def stats(self) -> dict[str, Any]:
        """Counters with the native engine's names, as far as vLLM has them.

        `free_kv_tokens` is the part of the pool that live requests leave free if each comes to its last token.
        """
        self.check_open()
        firsts = self.core.firsts(self.core.wait(self.core.call_async("interp_stats"), STATS_SECONDS))
        live = list(self._live.values())
        taken, room = sum(one.request.max_total_tokens for one in live), self.core.kv_tokens * self.core.engines
        running = sum(one.sent for one in live)
        return {
            "steps": sum(one["steps"] for one in firsts), "op_calls": sum(one["calls"] for one in firsts),
            "running": running, "waiting": len(live) - running, "swapped": 0,
            "kv_tokens": room, "free_kv_tokens": max(0, room - taken), "execution": {}, "overlapped_steps": 0, "preempted": 0,
            "moved_to_host": 0, "block_seconds": 0.0, "flat_logits": 0,
        }  # fmt: skip

    def progress(self) -> Progress:
        """The engine's progress, for watchdogs."""
        return Progress(f"{self.num_events} {self._steps}", bool(self._live), False)

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Forget the KV that vLLM keeps. It has no connector here."""
        self.check_open()
        self.core.ask(self.core.llm.reset_prefix_cache())

    def shutdown(self, timeout: float | None = None) -> None:
        """End all requests, and vLLM's processes. A second call does nothing."""
        with self.lock:
            if self._shut:
                return
            self._shut, self._closing = True, self._closing or closed()
            live = list(self._live.values())
        for one in live:
            self.core.soon(self._fail, one, closed())
        deadline = time.monotonic() + (CLOSING_SECONDS if timeout is None else timeout)
        while self._live and time.monotonic() < deadline:
            time.sleep(0.01)
        self._watching.cancel()
        self.core.close()
        self._callbacks.close(CLOSING_SECONDS)

    def release(self) -> None:
        """The client is gone: end with the last request."""
        self._released = True
        if not self._live:
            threading.Thread(target=self.shutdown, daemon=True).start()

    def wait_if_released(self) -> None:
        """Wait until a released engine has ended, so that its memory is free."""
        while self._released and self._closing is None and not self._live:
            time.sleep(0.05)

    def after_fork(self, error: EngineClosedError) -> None:
        """Mark the engine of a forked child: calls raise `error`, and nothing waits."""
        self.lock = threading.Lock()
        self._closing = self.forked = error
        self._shut = True

    # -- the loop ------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask rank 0 for its steps while requests run: long ones have no other sign of life before their end."""
        while self._closing is None:
            await asyncio.sleep(WATCH_SECONDS)
            if self._live:
                with contextlib.suppress(Exception):  # the requests get the error of an engine that has ended
                    self._steps = sum(one["steps"] for one in await self.core.call_async("interp_stats"))

    def _rank_failed(self, what: str) -> None:
        """End all requests: a rank was killed or stopped, and others wait for it."""
        if self._closing is None:
            self.core.failure = self.end_with(EngineClosedError(f"vLLM's engine has ended: {what}. Make a new LM"))
            logger.error("%s", self.core.failure)

    def _told(self, found: SentScores | StepEnds) -> None:
        """Take rank 0's findings of a step."""
        if isinstance(found, SentScores):
            self._scored(found)
            return
        self._stop_all(found.failed, "error")
        self._stop_all(found.stopped, "stop")

    def _scored(self, sent: SentScores) -> None:
        values = sent.values.numpy()
        for request_id, first, start, stop in sent.parts:
            if (one := self._live.get(request_id)) is not None and one.request.monitors is not None:
                one.dots.append((first, values[:, start:stop]))
                one.num_scored = max(one.num_scored, first + stop - start)
                one.scored.set()

    async def _wait_for_scores(self, one: Live, num_tokens: int) -> None:
        """Wait for the scores that come before this many tokens, by another way than the tokens."""
        while one.num_scored < one.request.prompt_len + num_tokens - 1:
            one.scored.clear()
            try:
                await asyncio.wait_for(one.scored.wait(), SCORES_SECONDS)
            except TimeoutError:
                raise RuntimeError(
                    f"the scores of monitors have not come from rank 0 within {SCORES_SECONDS:g} s"
                ) from None

    def _start(self, live: list[Live]) -> None:
        for one in live:
            one.task = asyncio.get_running_loop().create_task(self._run(one))

    def _stop_all(self, request_ids: list[str], reason: str) -> None:
        for request_id in request_ids:
            one = self._live.get(request_id)
            if one is not None and one.reason is None and not one.request.finished:
                one.reason = reason
                if one.sent:
                    self._tasks.add(task := asyncio.get_running_loop().create_task(self._abort_in_vllm(one)))
                    task.add_done_callback(self._tasks.discard)

    def _fail(self, one: Live, error: BaseException) -> None:
        if not one.request.finished:
            one.request.error, one.reason = error, "error"
            if one.started and one.task is not None:
                one.task.cancel()

    async def _run(self, one: Live) -> None:
        request, one.started = one.request, True
        timer = None
        if request.deadline is not None:
            left = max(0.0, request.deadline - time.monotonic())
            timer = asyncio.get_running_loop().call_later(left, self._stop_all, [request.request_id], "timeout")
        try:
            reason = one.reason or await self._serve(one)
        except asyncio.CancelledError:
            reason = one.reason or "abort"
        except BaseException as error:
            request.error = request.error or self._named(error)
            reason = "error"
        if timer is not None:
            timer.cancel()
        request.finish_reason, request.status = one.reason or reason, RequestStatus.FINISHED
        await self._answer(one)

    def _named(self, error: BaseException) -> BaseException:
        """Error of a request for its caller. The end of vLLM's engine becomes EngineClosedError."""
        if type(error).__name__ == "EngineDeadError":
            self.core.look()
            if self.core.failure is not None:  # which names the rank
                return self.core.failure
            told = EngineClosedError(
                "vLLM's engine has ended: a rank was killed, or has failed; its log says which. Make a new LM"
            )
            told.__cause__ = error
            self._closing = self._closing or told
            return told
        return error

    async def _serve(self, one: Live) -> str:
        request, core = one.request, self.core
        declares = request.hooks is not None and request.hooks.declares
        blocks = request.trace is not None
        declared = request.hooks.bound if request.hooks is not None else None
        sealed = None
        if declares or blocks:
            sealed, one.keys = await core.uplink.sealed(request)
        observed = request.declared is not None and request.declared.first_observed(0)[0] is not None
        read_cache = not (observed or blocks or (declared is not None and declared.hooks.cuts_edges))
        if core.generates:
            params = vllm_params(request, sealed, read_cache, core.kinds)
        else:
            params = pooling_params(request, sealed, read_cache, core.pools)
        prompt = prompt_of(request, core.images)
        if (salt := salt_of(request, declared if declares else None)) is not None:
            prompt["cache_salt"] = salt
        request.status = RequestStatus.RUNNING
        options: dict[str, Any] = {
            "lora_request": self._adapters.request_of(request.adapter), "priority": request.priority
        }  # fmt: skip
        if core.engines > 1:
            options["data_parallel_rank"] = one.engine = self._engine_for()
        self._loads[one.engine] += 1
        one.sent = True
        queue = await core.llm.add_request(request.request_id, prompt, params, **options)
        one.vllm_id = queue.request_id
        finished = False
        try:
            if one.reason is not None:  # its end was requested meanwhile
                await self._abort_in_vllm(one)
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                self.num_events += 1
                new = len(output.outputs[0].token_ids) if core.generates else 1
                if request.monitors is not None and new:
                    await self._wait_for_scores(one, len(request.output_token_ids) + new)
                events = list[Event]()
                reason = self._take(one, output, events) if core.generates else self._take_pooled(one, output)
                if events and request.num_streamed is not None and reason is None:
                    await self._stream_rows(one, request.num_streamed)
                for event in events:
                    self._emit(one, event)
                if reason is not None:
                    return reason
        finally:
            if not finished:
                await core.llm.abort(queue.request_id, internal=True)
            queue.close()
        return "abort"

    def _engine_for(self) -> int:
        """The engine with the fewest live requests. vLLM's coordinator keeps their steps together where models need it."""
        return self._loads.index(min(self._loads)) if self.only_engine is None else self.only_engine

    async def _abort_in_vllm(self, one: Live) -> None:
        """vLLM answers with the tokens so far."""
        await self.core.llm.abort(one.request.request_id)

    async def _stream_rows(self, one: Live, start: int) -> None:
        """Emit the rows captured from a position on, when they are on the rank's host."""
        request = one.request
        request.num_streamed = request.computed_once
        token_ids = request.token_ids_between(start, request.num_streamed)
        for found in await self._asked(one, AskedRows(request.request_id, start, token_ids)):
            for rows in found or ():
                self._emit(one, RowsEvent(request.request_id, rows))

    async def _asked(self, one: Live, question: RequestEnd | AskedRows) -> list[Any]:
        """The answer of the first rank of each pipeline stage. Raises their exceptions."""
        answers: list[asyncio.Future[Any]] = []
        for link in self.core.links[one.engine]:
            answers.append(arrived := asyncio.get_running_loop().create_future())
            link.ask(question, partial(_set, arrived))
        for found in (outcomes := await asyncio.gather(*answers)):
            if isinstance(found, BaseException):
                raise found
        return outcomes

    def _take(self, one: Live, output: Any, events: list[Event]) -> str | None:
        """Append vLLM's output to the request, and the events of its tokens. Returns the reason to end, or None."""
        request, (completion,) = one.request, output.outputs
        tokens = list(completion.token_ids)
        if output.num_cached_tokens is not None and not request.output_token_ids:
            request.num_cached_tokens = output.num_cached_tokens
        if request.prompt_logprobs is not None and output.prompt_logprobs:
            scored = output.prompt_logprobs[: request.prompt_len]  # its V2 runner adds rows of drafts
            request.prompt_logprobs = [None if found is None else logprobs_of(found) for found in scored]
        if tokens:
            request.prompt_computed = request.prompt_len
        kept = request.logprobs if request.generates and request.logprobs is not None and completion.logprobs else None
        logprobs: list[Any] = [] if kept is None else completion.logprobs
        if request.generates and not follows(request):  # vLLM has looked at all but the last
            request.output_token_ids += tokens[:-1]
            if kept is not None:
                kept += map(logprobs_of, logprobs[:-1])
            tokens, logprobs = tokens[-1:], logprobs[-1:]
        for i, token in enumerate(tokens):
            if kept is not None:
                kept.append(logprobs_of(logprobs[i]))
            one.feed(len(request.output_token_ids) + 1)
            reason = take(request, [token], ModelRunnerOutput(), [])
            if reason is not None:
                return reason
            if request.stream and request.generates:
                found = request.logprobs[-1] if request.logprobs else None
                scores = None if request.monitors is None else request.monitors.unsent()
                events.append(TokenEvent(request.request_id, token, found, scores))
        if completion.finish_reason is None:
            return None
        return "stop" if completion.finish_reason == "stop" else str(completion.finish_reason)

    def _take_pooled(self, one: Live, output: Any) -> str | None:
        """Note that the prompt of a model with labels has run. Returns the reason to end."""
        request = one.request
        request.num_cached_tokens = output.num_cached_tokens or 0
        request.prompt_computed = request.prompt_len
        one.feed(1)
        return take(request, [], ModelRunnerOutput(), [])

    async def _answer(self, one: Live) -> None:
        """Fetch the captures, and emit the last event."""
        request = one.request
        try:
            # A failed request ends its blocks on the ranks, too, except on ranks that have ended or do not answer.
            answers = self._closing is None and not isinstance(request.error, TimeoutError)
            if request.trace is not None and answers:
                await self._take_saves(one)
            if request.declared is not None:
                await self._take_results(one)
        except BaseException as error:
            request.error = request.error or self._named(error)
        finally:
            if request.error is not None and request.trace is None:  # a block may fail at the end that it waited past
                request.finish_reason = "error"
            if request.receipt is not None and request.receipt.weights:
                request.receipt.made_with(self._version(), len(request.output_token_ids))
            self.core.uplink.release(one.keys)
            self._release(request)
            if request.adapter_hold is not None:
                request.adapter_hold.release()
            self._live.pop(request.request_id, None)
            self._loads[one.engine] -= one.sent
            self._emit(one, finished_event(request))
            if self._released and not self._live:
                self.release()

    async def _take_saves(self, one: Live) -> None:
        """End the blocks of a request on rank 0, and fetch their saves."""
        request, trace = one.request, one.request.trace
        told = pickle.dumps(replace(request.ending(), hooks=RequestHooks(trace_key=trace.key)))
        found = self.core.firsts(await self.core.call_async("interp_end_trace", told))[one.engine]
        result = None if found is None else unpacked(found, None if self.core.tree is None else self.core.tree())
        if result is not None and result.error is not None:
            request.error = request.error or exception_of(result.error)
        ended = request.error is None and request.finish_reason in ("stop", "length")
        if ended and not (result and result.receipt.steps):
            request.error = RuntimeError(f"its block met no step on engine {one.engine}. This is a bug: report it")
        if result is None:
            return
        request.saves = {trace.key: result.saves}
        take_outer(trace, result.outer)
        for name in ("steps", "reads", "edits", "nan_edits"):
            setattr(trace.receipt, name, getattr(result.receipt, name))
        trace.warnings += result.warnings
        request.warnings += result.warnings
        trace.stopped, trace.result = result.stopped, result.result

    async def _take_results(self, one: Live) -> None:
        request = one.request
        hooks, receipt = request.hooks, request.receipt
        assert hooks is not None
        receipt.num_cached_tokens = request.num_cached_tokens
        found = None
        if one.sent and request.error is None:
            own = RequestHooks(max_tokens=hooks.max_tokens, logits_from=hooks.logits_from)
            end = replace(request.ending(), num_preemptions=0, hooks=own, captures_lost=None)
            layout = None if request.declared.captures is None else request.declared.captures.layout
            found = joined(await self._asked(one, end), () if layout is None else layout.order)
        if found is None:  # it has not begun
            counted: Declared = hooks.bound
            result = DeclaredResult(
                counted.hooks.applied(0, counted.fires), counted.captured(0), counted.activations([])
            )
        else:
            result, receipt.preemptions = found.declared, found.preemptions
            of_engine = f", engine {one.engine}" if self.core.engines > 1 else ""
            receipt.steps = Counter({f"{mode}{of_engine}": count for mode, count in found.steps.items()})
            for rows in result.rows or ():
                self._emit(one, RowsEvent(request.request_id, rows))
        request.activations = result.activations
        receipt.interventions, receipt.captures = result.applied, result.captured
        lost = None if result.activations is None else result.activations.error
        if lost is not None and str(lost) not in request.warnings:
            request.warnings.append(str(lost))
        if found is not None and found.error is not None:
            raise RuntimeError(found.error)

    def _emit(self, one: Live, event: Event) -> None:
        try:
            one.subscriber.put(event)
        except BaseException:  # SystemExit of a subscriber, too: the events behind it are others'
            logger.exception("an event of request %s could not be delivered", event.request_id)


def _set(future: asyncio.Future[Any], outcome: Any) -> None:
    if not future.done():
        future.set_result(outcome)
