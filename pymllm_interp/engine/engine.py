"""The engine: one thread that owns the runner, the scheduler and every trace.

Clients submit requests and subscribe to their events. The thread steps while there is work, and sleeps otherwise. A failed step
ends the requests that may have caused the failure; the others continue.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from ..core.events import EngineClosedError, Subscriber
from ..core.request import Request
from ..core.step import SchedulerOutput
from ..hooks.traces.blocks.watchdog import Watchdog
from ..runner.async_output import AsyncOutput
from ..runner.interp_model_runner import InterpModelRunner, RunnerCommand
from ..utils.out_of_memory import is_out_of_memory
from .callbacks import Callbacks, EngineThread
from .constraints import masks_of
from .counters import counters
from .drafts import Drafts
from .kv_manager import KVManager
from .lifecycle.intake import PAUSED_SECONDS, Intake
from .lifecycle.late_captures import IDLE_SECONDS, LateCaptures
from .request_ends import RequestEnds
from .scheduler import Scheduler
from .step_results import Progress, append_logprobs, blamed, count_step, needs_tokens, out_of_memory_error
from .step_times import StepPacing, StepTimes
from .warm_up import warm_up

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 5.0
"""Seconds that a closing engine waits for callbacks."""


class Engine:
    """Serves requests on its own thread, on which the runner is initialised too.

    This matters on a CPU, where each computing thread has its own OpenMP workers. Two such threads on two cores
    made a decode step 35 % slower.

    Args:
        runner: not yet initialised. `start` does that.

    Attributes:
        ends: the requests from submission to their last event.
        intake: the requests that may run; closed by a pause.
        forked: error that calls raise in a forked child, which lacks the engine's thread; None in the engine's own process.
    """

    scheduler: Scheduler

    def __init__(self, runner: InterpModelRunner) -> None:
        self.runner = runner
        self.num_steps = self.num_overlapped_steps = self.num_turns = 0
        self._in_flight: tuple[SchedulerOutput, AsyncOutput] | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing: BaseException | None = None
        self.forked: EngineClosedError | None = None
        config = runner.server_config
        self._async = self._waits_for_room = self._idle = self._released = False
        self._pacing, self._callbacks = StepPacing(StepTimes()), Callbacks()
        engine = weakref.proxy(self)  # which holds the ends: a cycle would keep a deleted model
        ends = self.ends = RequestEnds(runner, self._callbacks, lambda command: engine._call_soon(command))
        self.late_captures = LateCaptures(runner.graphs, lambda: (engine.sync_previous_step(), ends.send_events()))
        self.intake = Intake(ends, lambda requests: engine._add(requests))
        self._watchdog = Watchdog(config.trace_step_warning, config.trace_step_timeout, ends.end_waits, ends.end_stuck)
        self._ready: Future[None] = Future()
        self._thread = EngineThread(target=self._start, name="pymllm-interp-engine", daemon=True)

    def __repr__(self) -> str:
        return f"Engine({self.state}, {self.num_steps} steps)"

    @property
    def state(self) -> str:
        """Description of the engine's state: "shut down", "idle" or the number of live requests."""
        if self._closing is not None or self.forked is not None:
            return "shut down" if self.forked is None else "of the parent process"
        found = f"live requests: {len(self.ends.subscribers)}" if self.ends.subscribers else "idle"
        return f"paused, {found}" if self.intake.paused else found

    def start(self) -> None:
        """Initialise the runner on the thread, and serve. Raises the errors of the runner's `initialize`.

        After any error its maker calls `shutdown`: the thread holds the weights and the pool until then.
        """
        self._thread.start()
        self._ready.result()

    # -- callers -----------------------------------------------------------------

    def submit(self, requests: Sequence[Request], subscriber: Subscriber) -> None:
        """Queue requests, all at once, and send their events to `subscriber`. Raises like `check_open`, and while it sleeps."""
        self.submit_all([(requests, subscriber)])

    def submit_all(self, groups: Sequence[tuple[Sequence[Request], Subscriber]]) -> None:
        """`submit` of several groups of requests, so that one step may take all of them."""

        def add() -> None:
            for requests, _ in groups:
                self.intake.take(requests)

        self._check_awake()
        # Known from now on: a block may hold up the thread for longer than they wait.
        known = {request.request_id: (request, subscriber) for requests, subscriber in groups for request in requests}
        self.ends.subscribers |= known
        try:
            self._post(add)
        except BaseException:
            for request_id in known:
                self.ends.subscribers.pop(request_id, None)
            raise

    def call_back(self, function: Callable[[], None]) -> None:
        """Run a caller's function beside the engine's thread, after those that were given before."""
        self._callbacks.put(self, function)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with finish_reason "abort". Finished and unknown ones are left as they are."""

        def end() -> None:
            self.intake.find(request_ids)
            self.ends.end(self.ends.known(request_ids), "abort")

        with contextlib.suppress(EngineClosedError):  # closing ends them all
            self._post(end)

    def run(self, command: RunnerCommand) -> Any:
        """Have the runner run a command between steps. Returns its answer. Raises like `call`, and while it sleeps."""
        # It may fall asleep before its thread takes the command, which would read weights without memory.
        return self.call(lambda: self._check_awake() or self.runner.run(command))

    def post(self, command: RunnerCommand) -> None:
        """`run` without waiting for the answer; after the engine's end it does nothing."""
        self._call_soon(partial(self.runner.run, command))

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Forget the KV that the prefix cache keeps; with `reset_connector` also this model's evicted KV."""
        self.call(self.scheduler.kv.reset_prefix_cache)
        if reset_connector and (left := self.call(self.runner.kv_connector.reset)) is not None:
            left.result()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine's thread, to inspect or measure the engine. Returns its result.

        It runs between steps, or at once if called on that thread. Commands of a runner use `run`.

        Raises:
            RuntimeError: called on another engine's thread, which must not wait.
        """
        if self._on_own_thread:
            return function()
        if self.on_engine_thread:
            raise RuntimeError("this waits for an engine inside a block of another, which may be waiting for this one")
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._post(run)
        return done.result()

    def stats(self) -> dict[str, Any]:
        """Counters of steps, by execution and reason; requests in each state; free KV slots; preemptions; graph segments.

        `overlapped_steps` were followed by the next launch before their tokens were read. `depths`: passes that ended early, by
        layers. `eager_parts`: modules inside a layer that sent part of a step off its graph. `block_seconds`: waits for blocks.
        """
        own = {"steps": self.num_steps, "overlapped_steps": self.num_overlapped_steps}
        return own | {"flat_logits": self.ends.num_flat_logits} | counters(self.runner, self.scheduler, self._drafts)

    def progress(self) -> Progress:
        """The engine's progress, for watchdogs. Takes no lock; any thread may call it."""
        done = f"{self.num_turns} {self.runner.interleaver.blocks.seconds}"
        return Progress(done, self._has_work() or bool(self._inbox), self._watchdog.running is not None)

    def check_open(self) -> None:
        """Raise EngineClosedError after `shutdown` and in a forked child."""
        if self.forked is not None:
            raise self.forked.with_traceback(None)
        if self._closing is not None:
            raise EngineClosedError(f"{self._closing}: it takes no more requests") from self._closing

    def _check_awake(self) -> None:
        if self.intake.why_closed is not None:
            raise self.intake.why_closed.with_traceback(None)

    @property
    def on_engine_thread(self) -> bool:
        """Whether the caller runs on the thread of an engine of this process: of this one, or of another."""
        return isinstance(threading.current_thread(), EngineThread)

    @property
    def _on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def shutdown(self, timeout: float | None = None) -> None:
        """End running requests, stop the thread and release the runner. Does not wait inside blocks and callbacks.
        Raises TimeoutError: the thread has not ended after `timeout` seconds. It ends as soon as it can."""
        with self._wake:
            if self._closing is None:
                self._closing = EngineClosedError("the engine was shut down")
            self._wake.notify()
        if self._thread.ident is not None and not (self.on_engine_thread or self._callbacks.on_thread):
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the engine has not ended after {timeout} s: {self._watchdog.culprit}")

    def release(self) -> None:
        """The client is gone: end the thread when the last request has ended. Does not wait; finalizers call it."""
        with self._wake:
            self._released = True
            self._inbox.append(self.intake.resume)  # no client is left to do so
            self._wake.notify()

    def wait_if_released(self) -> None:
        """Wait until a released engine has ended, so that its memory is free. An engine with requests is not waited for."""
        while self._released and self._thread.is_alive() and not (self.ends.subscribers or self.on_engine_thread):
            self._thread.join(0.1)

    def after_fork(self, error: EngineClosedError) -> None:
        """Mark the engine of a forked child, which lacks the thread. Calls raise `error`, and nothing waits."""
        self._wake = threading.Condition()  # the thread may have held the lock
        self._closing = self.forked = error

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self.check_open()
            self._inbox.append(command)
            self._wake.notify()

    # -- the thread -----------------------------------------------------------------

    def _start(self) -> None:
        try:
            self.check_open()  # no thread is waiting now
            self._initialize()
        except BaseException as error:
            self._closing = error
            self.runner.shutdown()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        self._run()

    def _initialize(self) -> None:
        runner = self.runner
        runner.initialize()
        if runner.device.startswith("cuda"):
            warm_up(runner)
        runner.interleaver.watchdog, runner.interleaver.call_back = self._watchdog, self.ends.call_on_step
        asked = runner.server_config.async_scheduling
        self._async = runner.device.startswith("cuda") if asked is None else asked
        if self._async:
            runner.interleaver.sync_previous_step, runner.meanwhile = self.sync_previous_step, self._deliver
        kv, ring = KVManager.of(runner), runner.capture_ring
        admission = None if ring is None else ring.admission
        self._drafts, times = Drafts.of(runner), self._pacing.times
        sizes = runner.max_num_tokens, runner.model_spec.num_hidden_layers
        self.scheduler = Scheduler(runner.server_config, *sizes, kv, admission, times, self._drafts)
        self.ends.scheduler = self.scheduler
        if ring is not None:
            ring.notify_when_freed(partial(self._call_soon, lambda: None))  # it looks for work

    def _run(self) -> None:
        try:
            while self._take_commands():
                self.num_turns += 1
                self.ends.expire()
                self.ends.send_events()
                if self._has_work():
                    self.step()
                if self.runner.graphs.num_missing:
                    self.late_captures.turn(self.num_steps, self._idle)
                if self.intake.held is not None:
                    self.intake.turn()
        except BaseException as error:
            logger.exception("the engine stopped")
            self._closing = error
        finally:
            self._close()

    def _take_commands(self) -> bool:
        """Wait for work; False when the engine closes."""
        with self._wake:
            self._idle = False
            while not (self._inbox or self._closing) and (seconds := self._seconds_left()):
                self._wake.wait(seconds)
            while not (self._inbox or self._closing or self._has_work()):
                if self._released and not self.ends.subscribers:
                    self._closing = EngineClosedError("the engine ended with its LM, which was deleted or replaced")
                    break
                if logger.isEnabledFor(logging.DEBUG):
                    self.scheduler.check_integrity()
                paused = PAUSED_SECONDS if self.intake.paused else None
                self._idle = not self._wake.wait(IDLE_SECONDS if self.runner.graphs.num_missing else paused)
                if self._idle:
                    break
            commands, self._inbox = self._inbox, deque()
        if commands:
            self._waits_for_room = False
        for command in commands:
            self._run_command(command)
        return self._closing is None

    @staticmethod
    def _run_command(command: Callable[[], None]) -> None:
        """Commands answer for their own errors; one that does not stops neither the engine nor those behind it."""
        try:
            command()
        except BaseException:
            logger.exception("a command of the engine failed")

    def _add(self, requests: Sequence[Request]) -> None:
        self.ends.note(requests)
        self.scheduler.add(requests)
        try:
            for trace in {request.trace for request in requests if request.trace is not None}:
                self.runner.attach(trace)
        except BaseException as error:
            self.ends.fail(list(requests), error)

    def _seconds_left(self) -> float:
        """Seconds to wait for requests before the next step: the device has enough to do. Blocks of traces need them."""
        busy = self._async and self._in_flight is not None and not self._in_flight[1].done
        return self._pacing.seconds_left() if busy and not self.runner.nnsight_request_helper.expects_traces else 0.0

    def _has_work(self) -> bool:
        if self.intake.paused:  # between two steps
            return False
        return self._in_flight is not None or (self.scheduler.has_work() and not self._waits_for_room)

    def step(self) -> None:
        """Launch a step, and deliver the results of the one before it while the device works.

        With `async_scheduling` a step's tokens are read after the launch of the next step. So the device does not wait
        for the host. A step that ends a request thus runs one token too many for it, which is dropped. If the next step
        depends on this one's tokens (`Request.needs_tokens`), they are read first. `sync_previous_step` reads them
        before a block is served, or a constraint masks the next token.
        """
        started, step = time.perf_counter(), self.scheduler.schedule()
        while self.scheduler.lost:
            self.ends.finished(self.scheduler.lost.pop())
        # Room that was freed since then has woken the thread up.
        self._waits_for_room = not (step.scheduled or self._in_flight) and self.scheduler.waits_for_room
        launched = self._launch(step)
        if launched is not None:
            self._pacing.launched(step, started, idle=self._in_flight is None or self._in_flight[1].done)
        self.ends.send_events()
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            self._collect(*before)
        if launched is not None and (not self._async or needs_tokens(self.scheduler.requests, step, self._drafts)):
            self._in_flight = None
            self._collect(*launched)
        elif launched is not None:
            self.num_overlapped_steps += 1
        self.ends.send_events()

    def _launch(self, step: SchedulerOutput) -> tuple[SchedulerOutput, AsyncOutput] | None:
        """Run a step as far as the host's part goes. None: it was empty, or failed."""
        failure, output = None, None
        try:
            if self.runner.execute_model(step) is not None:
                return None
            if self.ends.constrained:
                self._constrain(step)
            output = self.runner.sample_tokens_async()
        except Exception as error:
            failure = out_of_memory_error(self.runner, step, error) if is_out_of_memory(error) else error
        if failure is not None:
            self.runner.abandon()
            if self._in_flight is not None:
                before, self._in_flight = self._in_flight, None
                self._collect(*before)
            self._blame(step, failure)
            return None
        assert output is not None
        self.num_steps += 1
        self.scheduler.launched(step)
        return step, output

    def _constrain(self, step: SchedulerOutput) -> None:
        """Make the masks of the step's constrained requests while its pass runs: they follow the tokens of the step before."""
        constrained = self.ends.constrained
        ids = [entry.request_id for entry in step.scheduled if entry.samples and entry.request_id in constrained]
        if any(request.num_pending for request in self.ends.known(ids)):
            self.sync_previous_step()
        masks = masks_of(self.ends.known(ids), self.runner.vocab_size, self.ends.fail, step.drafts)
        if masks is not None:
            self.runner.constrain(masks)

    def sync_previous_step(self) -> None:
        """Collect the previous step during a pass: blocks of requests that end with it must not be served. Its events are sent when
        the rest of the pass has been launched: the device waits for it.
        """
        before, self._in_flight = self._in_flight, None
        if before is not None:
            with torch.enable_grad():  # as between passes: blocks run to their end
                self._collect(*before)
            self.runner.drop_finished(self.scheduler.finished_req_ids)

    def _deliver(self) -> None:
        """Deliver the previous step's tokens during a long pass. To launch it takes the host up to 15 ms."""
        if self._in_flight is not None and self._in_flight[1].done:
            self.sync_previous_step()
            self.ends.send_events()

    def _collect(self, step: SchedulerOutput, launched: AsyncOutput) -> None:
        """Read a step's tokens, append them, and end the requests that are complete."""
        requests = self.scheduler.requests
        try:
            output = launched.get_output()
            self._pacing.ended()
        except Exception as error:  # the device's: the step's results are lost for all of its requests
            logger.warning("the tokens of a step could not be read: %r", error)
            self._pacing.forget()
            self.scheduler.kv.reset_prefix_cache()
            self.ends.fail([requests[e.request_id] for e in step.scheduled if e.request_id in requests], error)
            return
        if self.ends.counted:
            count_step(requests, step, output)
        if output.prompt_logprobs or any(output.logprobs):
            append_logprobs(requests, step, output)
        ended = self.scheduler.update(step, output)
        if self.ends.streaming:
            self.ends.emit_tokens(step, output)
        self.ends.call_monitors([*self.ends.known(output.decided), *ended])
        for request in ended:
            self.ends.finished(request)

    def _blame(self, step: SchedulerOutput, error: Exception) -> None:
        """A pass failed. The requests that may be the reason end (`blamed`); the others are run again."""
        logger.warning("a step failed: %r", error)
        self.ends.fail(blamed(step, self.scheduler.requests, error), error)
        if isinstance(error, torch.OutOfMemoryError):
            gc.collect()
            torch.cuda.empty_cache()
        self.scheduler.failed(step)

    def end_with(self, error: EngineClosedError) -> EngineClosedError:
        """Have the engine end with an error, which is returned."""
        self._closing = error
        return error

    def _call_soon(self, command: Callable[[], None]) -> None:
        """Run `command` on the engine's thread, even while it closes: at once if called there."""
        if self._on_own_thread:
            command()
            return
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _close(self) -> None:
        ring, end_all = self.runner.capture_ring, partial(self.ends.end_all, self._closed_error)
        for part in (  # each is tried whatever became of the others: handles wait for an answer
            lambda: self.intake.close(EngineClosedError(f"{self._closing}")),
            end_all,
            self._empty_inbox,  # handles that came too late still get their answer
            end_all,
            self.ends.send_events,
            *(() if ring is None else (ring.wait,)),
            partial(self._callbacks.close, CLOSING_SECONDS),
            self._empty_inbox,
            partial(self.ends.answer_left, self._closed_error),
            self.ends.send_events,
            self._watchdog.close,
        ):
            self._run_command(part)
        interleaver = self.runner.interleaver
        interleaver.sync_previous_step = interleaver.call_back = self.runner.meanwhile = None  # which hold this engine
        self.runner.shutdown()

    def _closed_error(self, request: Request) -> EngineClosedError:
        return EngineClosedError(f"request {request.request_id} was ended: {self._closing}")

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._run_command(self._inbox.popleft())
