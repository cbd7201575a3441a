"""The engine: one thread that owns the runner, the scheduler and every trace.

Callers hand it requests and wait; it steps while there is work, and sleeps while there is none. A step that fails ends the
requests that may have made it fail, and the others go on.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from ..core.out_of_memory import is_out_of_memory
from ..core.output import Logprob, ModelRunnerOutput, SampledLogprobs, SchedulerOutput
from ..core.request import Request
from ..hooks.traces.watchdog import Watchdog
from ..runner.async_output import AsyncOutput
from ..runner.interp_model_runner import InterpModelRunner
from .handle import EngineClosedError, RequestHandle
from .scheduler import Scheduler

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests on a thread of its own, which the runner is initialised on too.

    On a CPU that matters: each thread that computes in parallel has OpenMP workers of its own, and two such threads on two
    cores made a decode step 35 % slower.

    Args:
        runner: not yet initialised. What its `initialize` raises, this raises.
    """

    scheduler: Scheduler

    def __init__(self, runner: InterpModelRunner) -> None:
        self.runner = runner
        self.num_steps = self.num_overlapped_steps = 0
        self._in_flight: tuple[SchedulerOutput, AsyncOutput] | None = None
        self._handles: dict[str, RequestHandle] = {}
        self._followed: dict[str, RequestHandle] = {}
        self._undelivered: list[Request] = []
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing: BaseException | None = None
        config = runner.server_config
        self._async = self._waits_for_room = False
        self._watchdog = Watchdog(config.trace_step_warning, config.trace_step_timeout)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._start, args=(ready,), name="pymllm-interp-engine", daemon=True)
        self._thread.start()
        ready.result()

    # -- callers -----------------------------------------------------------------

    def submit(self, handles: list[RequestHandle]) -> None:
        """Queue the handles' requests, all at once. Raises EngineClosedError after `shutdown`."""

        def add() -> None:
            for handle in handles:
                for request in handle.requests:
                    self._handles[request.request_id] = handle
                    if handle.follows:
                        self._followed[request.request_id] = handle
                self.scheduler.add(handle.requests)

        for handle in handles:
            handle.engine_thread = self._thread
        self._post(add)

    def abort(self, requests: list[Request]) -> None:
        """End requests with finish_reason "abort". Those that have finished, or are unknown, are left as they are."""
        with contextlib.suppress(EngineClosedError):  # closing ends them all
            self._post(lambda: self._end([r for r in requests if r.request_id in self._handles], "abort"))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine's thread and return what it returns: between steps, or at once where it is called there."""
        if self.on_engine_thread:
            return function()
        done, box = threading.Event(), []

        def run() -> None:
            try:
                box.append((function(), None))
            except BaseException as error:
                box.append((None, error))
            done.set()

        self._post(run)
        done.wait()
        value, error = box[0]
        if error is not None:
            raise error
        return value

    def stats(self) -> dict[str, Any]:
        """Counters: steps, and those whose tokens were read after the next launch; steps by way and reason; requests in each
        state, free pages, preemptions; what is captured between hooks, and what goes kernel by kernel there, by the place inside
        of a layer that blocks waited at."""
        scheduler, traced = self.scheduler, self.runner.nnsight_model
        return {
            "steps": self.num_steps,
            "overlapped_steps": self.num_overlapped_steps,
            "execution": {f"{how}: {why}": n for (how, why), n in Counter(self.runner.partition.counts).items()},
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "swapped": len(scheduler.swapped),
            "free_kv_tokens": scheduler.allocator.available_size(),
            "preempted": scheduler.num_preempted,
            "moved_to_host": scheduler.num_swapped,
            "segments": None if self.runner.segments is None else self.runner.segments.stats(),
            "eager_parts": {} if traced is None else dict(traced.interleaver.eager_parts),
        }

    @property
    def on_engine_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def shutdown(self) -> None:
        """End what runs, stop the thread and release the runner. A second call does nothing."""
        with self._wake:
            if self._closing is None:
                self._closing = EngineClosedError("the engine was shut down")
            self._wake.notify()
        if not self.on_engine_thread:
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closing is not None:
                raise EngineClosedError(f"{self._closing}: it takes no more requests") from self._closing
            self._inbox.append(command)
            self._wake.notify()

    # -- the thread -----------------------------------------------------------------

    def _start(self, ready: Future[None]) -> None:
        try:
            self._initialize()
        except BaseException as error:
            self._closing = error
            self.runner.shutdown()
            ready.set_exception(error)
            return
        ready.set_result(None)
        self._run()

    def _initialize(self) -> None:
        runner = self.runner
        runner.initialize()
        assert runner.req_to_token_pool and runner.token_to_kv_pool_allocator and runner.token_to_kv_pool
        assert runner.nnsight_model is not None
        runner.nnsight_model.interleaver.watchdog = self._watchdog
        asked = runner.server_config.async_scheduling
        self._async = runner.device.startswith("cuda") if asked is None else asked
        if self._async:
            runner.nnsight_model.interleaver.sync_previous_step = self._sync_previous_step
        self.scheduler = Scheduler(
            runner.server_config,
            runner.max_num_tokens,
            runner.req_to_token_pool,
            runner.token_to_kv_pool_allocator,
            runner.token_to_kv_pool,
            None if runner.capture_ring is None else runner.capture_ring.admission,
        )
        if runner.capture_ring is not None:
            runner.capture_ring.notify_when_freed(lambda: self._call_soon(lambda: None))

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._expire()
                if self._has_work():
                    self.step()
        except BaseException as error:
            logger.exception("the engine stopped")
            self._closing = error
        finally:
            self._close()

    def _take_commands(self) -> bool:
        """Wait for work; False when the engine closes."""
        with self._wake:
            while not (self._inbox or self._closing or self._has_work()):
                self._wake.wait()
            commands = list(self._inbox)
            self._inbox.clear()
        if commands:
            self._waits_for_room = False
        for command in commands:
            command()
        return self._closing is None

    def _has_work(self) -> bool:
        return self._in_flight is not None or (self.scheduler.has_work() and not self._waits_for_room)

    def step(self) -> None:
        """Launch a step, and deliver what the one before it made while the device works.

        With `async_scheduling` a step's tokens are read when the next one has been launched behind it: the device does not
        wait for the host. A step that ends a request so runs one token too many for it, which is dropped. Where the next step
        depends on this one's tokens (`Request.needs_tokens`), they are read first; where a block is about to be served, there
        and then (`_sync_previous_step`).
        """
        step = self.scheduler.schedule()
        while self.scheduler.lost:
            self._finished(self.scheduler.lost.pop())
        # Room that was freed since then has put a command into the inbox.
        nothing_runs = not step.scheduled and self._in_flight is None
        self._waits_for_room = nothing_runs and self.scheduler.waits_for_room
        launched = self._launch(step)
        undelivered, self._undelivered = self._undelivered, []
        for request in undelivered:
            self._deliver(request)
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            self._collect(*before)
        if launched is None:
            return
        if not self._async or any(entry.request.needs_tokens for entry in step.scheduled):
            self._in_flight = None
            self._collect(*launched)
        else:
            self.num_overlapped_steps += 1

    def _launch(self, step: SchedulerOutput) -> tuple[SchedulerOutput, AsyncOutput] | None:
        """Run a step as far as the host's part goes. None: it was empty, or failed."""
        failure, output = None, None
        try:
            if self.runner.execute_model(step) is not None:
                return None
            output = self.runner.sample_tokens_async()
        except Exception as error:
            failure = self._without_memory(step, error) if is_out_of_memory(error) else error
        if failure is not None:
            if self._in_flight is not None:
                before, self._in_flight = self._in_flight, None
                self._collect(*before)
            self._blame(step, failure)
            return None
        assert output is not None
        self.num_steps += 1
        self.scheduler.launched(step)
        return step, output

    def _sync_previous_step(self) -> None:
        """Deliver what the step before made, in the midst of a pass: blocks of requests that end with it must not be served."""
        before, self._in_flight = self._in_flight, None
        if before is not None:
            self._collect(*before, in_a_pass=True)
            self.runner.drop_finished()

    def _collect(self, step: SchedulerOutput, launched: AsyncOutput, in_a_pass: bool = False) -> None:
        """Read a step's tokens and hand them out.

        Args:
            in_a_pass: the device waits for the rest of it: what only streams tokens is told when that has been launched.
        """
        try:
            output = launched.get_output()
        except Exception as error:  # the device's: what the step computed is lost for everyone in it
            logger.warning("the tokens of a step could not be read: %r", error)
            self._fail([entry.request for entry in step.scheduled], error)
            return
        self._collect_logprobs(step, output)
        for request in self.scheduler.update(step, output, in_a_pass):
            self._finished(request)
        if self._followed:
            for entry in step.scheduled:
                handle = self._followed.get(entry.request.request_id)
                if handle is None or not entry.samples:
                    continue
                if in_a_pass and not handle.may_stop:
                    self._undelivered.append(entry.request)
                else:
                    self._deliver(entry.request)

    def _deliver(self, request: Request) -> None:
        handle = self._followed.get(request.request_id)
        if handle is None or request.finished or not request.output_token_ids:
            return
        stop = handle.on_token(request)
        if stop is not None:
            request.stop_reason = stop
            self._end([request], "stop")

    def _without_memory(self, step: SchedulerOutput, error: Exception) -> torch.OutOfMemoryError:
        """What the step's requests are told in place of `error`, whose frames hold the tensors of the pass."""
        runner, config = self.runner, self.runner.server_config
        kv = f"kv_cache_tokens (now {runner.max_total_num_tokens})"
        if config.kv_cache_tokens is None:
            kv = f"gpu_memory_utilization (now {config.gpu_memory_utilization})"
        return torch.OutOfMemoryError(
            f"a step of {len(step.scheduled)} requests and {step.total_num_scheduled_tokens} tokens ran out of memory on "
            f"{runner.device}; the engine goes on. What helps: a lower max_num_tokens (now {runner.max_num_tokens}), for "
            f"smaller steps of prompts; a lower max_running_requests (now {runner.max_running_requests}), for smaller steps "
            f"of any kind; a lower {kv}, for a smaller KV pool\n{error}"
        )

    def _blame(self, step: SchedulerOutput, error: Exception) -> None:
        """A pass failed. Its traced requests cannot be run again, so they end; the others are run again.

        Where it had no trace, all end; but out of memory, those that decode are run again once without the prompts beside
        them, which made the step large.
        """
        logger.warning("a step failed: %r", error)
        requests = [entry.request for entry in step.scheduled]
        ending = [request for request in requests if request.trace is not None]
        if not ending and isinstance(error, torch.OutOfMemoryError):
            ending = [entry.request for entry in step.scheduled if not entry.decodes]
        self._fail(ending or requests, error)
        if isinstance(error, torch.OutOfMemoryError):
            gc.collect()
            torch.cuda.empty_cache()
        for request in requests:
            if not request.finished:
                self.runner.req_states.add_request(
                    request.request_id, request.req_pool_idx or 0, request.prompt_len, request.all_token_ids,
                    request.num_computed_tokens,
                )  # fmt: skip
        self.runner.req_states.apply_staged_writes()

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            if not request.finished:
                request.error = error
        self._end(requests, "error")

    def _expire(self) -> None:
        now = time.monotonic()
        late = [r for r in self.scheduler.live if r.deadline is not None and r.deadline < now]
        self._end(late, "timeout")

    def _end(self, requests: list[Request], reason: str) -> None:
        for request in requests:
            if not request.finished:
                self.scheduler.finish(request, reason)
                self._finished(request)

    def _finished(self, request: Request) -> None:
        """Wind up a request that the scheduler has ended, and tell its caller."""
        if request.gang is not None:
            if not all(member.finished for member in request.gang):
                return  # its blocks may still wait for those of the others
            ending, request.gang[:] = list(request.gang), []
        else:
            ending = [request]
        if request.trace is not None:
            self.runner.finish_nnsight(ending)
        for member in ending:
            self._tell(member)

    def _tell(self, request: Request) -> None:
        if request.trace is not None:
            request.error = request.error or request.trace.error
            request.warnings += request.trace.warnings
        if request.declared is None:
            self._answer(request)
        else:
            self.runner.finish_declared(request, lambda: self._call_soon(lambda: self._answer(request)))

    def _call_soon(self, command: Callable[[], None]) -> None:
        """Run `command` on the engine's thread, while it closes too: at once, where it is called there."""
        if self.on_engine_thread:
            command()
            return
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _answer(self, request: Request) -> None:
        handle = self._handles.pop(request.request_id, None)
        self._followed.pop(request.request_id, None)
        if handle is not None:
            if request.output_token_ids and request.finish_reason in ("stop", "length") and request.stop_reason is None:
                stop = handle.on_token(request)
                if stop is not None:
                    request.finish_reason, request.stop_reason = "stop", stop
            handle.on_finish(request)

    def _collect_logprobs(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if not (output.prompt_logprobs or any(output.logprobs)):
            return
        for entry, sampled in zip(step.scheduled, output.logprobs, strict=True):
            request = entry.request
            if request.finished:
                continue
            if sampled is not None and request.logprobs is not None and not request.forward_only:
                request.logprobs.append(as_dict(sampled))
            found = output.prompt_logprobs.get(request.request_id)
            if found and request.prompt_logprobs is not None:
                # A request that gave way computes positions again; those it has stay.
                known = len(request.prompt_logprobs) - 1
                request.prompt_logprobs.extend(as_dict(e) for e in found[max(0, known - entry.start) :])

    def _close(self) -> None:
        self._end_all()
        self._empty_inbox()  # handles that came too late still get their answer
        self._end_all()
        if self.runner.capture_ring is not None:
            self.runner.capture_ring.wait()
            self._empty_inbox()
        for request_id, handle in list(self._handles.items()):  # something failed between its end and the answer
            for request in handle.requests:
                if request.request_id == request_id:
                    request.error = self._closed_error(request)
                    self._answer(request)
        self._watchdog.close()
        self.runner.shutdown()

    def _end_all(self) -> None:
        for request in self.scheduler.live:
            request.error = self._closed_error(request)
            try:
                self._end([request], "abort")
            except Exception:
                logger.exception("request %s could not be wound up", request.request_id)

    def _closed_error(self, request: Request) -> EngineClosedError:
        return EngineClosedError(f"request {request.request_id} was ended: {self._closing}")

    def _empty_inbox(self) -> None:
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception:
                logger.exception("a command of the closing engine failed")


def as_dict(sampled: SampledLogprobs) -> dict[int, Logprob]:
    """Token id -> its log probability; the sampled token first."""
    entries = zip(sampled.token_ids, sampled.logprobs, sampled.ranks, strict=True)
    return {token: Logprob(logprob, rank) for token, logprob, rank in entries}
