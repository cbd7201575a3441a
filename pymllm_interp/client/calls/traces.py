"""`run`: serves the blocks of a ``with`` after declared requests if they can be lowered, else by `Backend.run_blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from time import sleep
from typing import Any, NamedTuple

import torch

from ...core.events import FinishedEvent
from ...core.request import Request
from ...hooks.captures.activations import NOTHING
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.lowering.ahead import RowsAhead
from ...hooks.traces.lowering.plan import BlockPlan
from ...hooks.traces.nnsight_compat import apply
from ...hooks.traces.saves.save_transfer import SaveTransfer
from ...hooks.traces.syntax.envoy import TracedModel
from ...hooks.traces.syntax.scanned import check_outside_scan
from ...hooks.traces.syntax.tracer import TraceInput
from ...utils.arguments import PromptError
from ..backend import Backend, Submission
from ..chat import RenderedPrompt
from ..handle import RequestHandle
from ..prompt_batch import prompts_of
from .lowered import Ended, LoweringError, monitors_of
from .traced_prompts import TracedPrompt, traced_prompt

MADE_TOGETHER = 128
"""Most requests of a trace that are submitted together. The first ones run while others are made."""
PAUSE_S, IDLE_S, MADE_AT_ONCE = 2e-4, 5e-3, 128
"""Seconds in which the engine gets the GIL, seconds between two searches for rows, and new tensors between two pauses."""
TOO_MUCH = (413, 429)
"""Statuses of a server that has no room for the requests. A trace of many invokes counts as one."""


def run(
    backend: Backend, mode: str, traces: list[RequestTrace], inputs: Sequence[TraceInput | None]
) -> list[BlockPlan]:
    """Serve the traces of a ``with``. Returns when all of their requests have ended.

    Args:
        mode: "trace" (one forward pass), "generate" or "pipe".
        inputs: ``(args, kwargs)`` of each trace's prompts; None for a trace that sees the prompts of all others.

    Returns:
        The plan of each block that ran after its request; an empty list where `Backend.run_blocks` has served them.

    Raises:
        PromptError, TypeError, ValueError: an invoke that cannot be served.
        LoweringError: a block cannot run after its request, with ``lower_traces="require"``.
        RuntimeError: called inside a block, for which the engine would wait.
    """
    check_outside(backend)
    lowered = backend.lowered
    plans = "" if lowered is None else lowered.lower(mode, traces, inputs)
    if lowered is None or isinstance(plans, str):
        backend.run_blocks(mode, traces, inputs, str(plans))
        return []
    if backend.runs_code and lowered.mode != "require" and any(plan.computes for plan in plans):
        why = "it computes with what it reads, which the server does before it answers"
        backend.run_blocks(mode, traces, inputs, why)
        return []
    running = Running(traces)
    try:
        refused = _submit(backend, mode, traces, inputs, plans, running)
        transfer = traces[0].saves.transfer
        ahead = [None] * len(plans) if refused is not None else lowered.ahead(plans, running.handles, transfer)
        running.wait(ahead=ahead)
    except BaseException:
        running.end()
        raise
    if refused is not None:
        running.end()
        for trace in traces:
            trace.receipt.not_lowered = str(refused)
        _check_may_run(backend, refused)
        backend.run_blocks(mode, traces, inputs, str(refused), refused)
        return []
    ended = zip(traces, plans, running.handles, ahead, strict=True)
    lowered.replay([_ended(*each, mode == "trace") for each in ended])
    return plans


def check_outside(backend: Backend) -> None:
    """Raise RuntimeError if the caller is inside a block of a trace or scan."""
    if backend.engine.on_engine_thread:
        raise RuntimeError(
            "a trace cannot be opened inside the block of another, of this LM or of another: use a session, or invokes"
        )
    check_outside_scan()


class Running:
    """The requests of a ``with`` that are submitted so far. Another thread may cancel them, by `RequestTrace.cancel`."""

    def __init__(self, traces: Sequence[RequestTrace]) -> None:
        self.handles: list[RequestHandle] = []
        self._waited = 0
        self._cancelled = False
        for trace in traces:
            trace.cancel = self.cancel

    def add(self, handles: list[RequestHandle]) -> None:
        """Add submitted requests."""
        self.handles += handles
        if self._cancelled:
            self.cancel()

    def cancel(self) -> None:
        """End them, and those that come."""
        self._cancelled = True
        for handle in list(self.handles):
            handle.cancel()

    def wait(self, besides: int = 0, ahead: Sequence[RowsAhead | None] = ()) -> None:
        """Wait until all have ended except the last `besides`. Meanwhile, make tensors of rows that arrive, by request."""
        for handle in self.handles[self._waited : max(len(self.handles) - besides, 0)]:
            own = ahead[self._waited] if ahead else None
            while own is not None and not handle.done:
                if own.advance():  # rows of other requests arrive with these
                    _make_ahead(handle, ahead)
                with suppress(TimeoutError):
                    handle.wait(IDLE_S)
            handle.wait()
            self._waited += 1

    def end(self) -> None:
        """Cancel them, and wait until they have ended."""
        for handle in self.handles:
            handle.cancel()
        self.wait()


def _make_ahead(handle: RequestHandle, ahead: Sequence[RowsAhead | None]) -> None:
    """Make tensors of all rows that have arrived, until the handle is done."""
    found = 0
    for rows in ahead:
        if handle.done:
            break
        found += 0 if rows is None else rows.advance()
        if found >= MADE_AT_ONCE:  # a pause after each request would take more time than the steps of its rows
            found = 0
            sleep(PAUSE_S)


def serve(backend: Any, traces: Sequence[RequestTrace], requests: Sequence[Request]) -> None:
    """Run the requests of traces with their blocks in the passes. Returns when all have ended.

    Args:
        backend: a `FactoryBackend`.
    """
    handles = [RequestHandle(None, [request], None, backend.engine) for request in requests]
    running = Running(traces)
    try:
        backend.send([(handle.requests, handle) for handle in handles])
        running.add(handles)
        running.wait()
    except BaseException:
        running.end()
        raise
    saves = {key: names for request in requests for key, names in request.saves.items()}
    for trace in traces:
        trace.saves.collected = saves.get(trace.key, {})
    for request, handle in zip(requests, handles, strict=True):
        trace = request.trace
        trace.activations.append(NOTHING if request.activations is None else request.activations)
        trace.scores.append(handle.ends[0].monitors or {})
        ended = error_of(handle.ends[0])
        trace.error = trace.error if ended is None else ended  # an error may have a length of 0


def run_pass(backend: Backend, model: TracedModel, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of a trace without a block (`Backend.run_pass`), where blocks run in the passes."""
    blocks = model._edits_of(kwargs.pop("edits", None))
    options = model._pass_options(blocks, kwargs)
    trace = RequestTrace(None, blocks, options=options, transfer=SaveTransfer(None))
    trace.keeps_result = True
    check_outside(backend)
    backend.run_blocks(mode, [trace], [(inputs, kwargs)], "")
    trace.saves.queue()
    result, error = trace.result, trace.take_error()
    trace.release_blocks()
    if error is not None:
        raise error
    return apply(result, lambda tensor: tensor.detach().to("cpu", copy=True), torch.Tensor)


class _Shared(NamedTuple):
    """Options shared by the requests of one `Submission`."""

    timeout: float | None
    cache_salt: str | None
    reads_logits: bool


def _submit(
    backend: Backend,
    mode: str,
    traces: Sequence[RequestTrace],
    inputs: Sequence[TraceInput | None],
    plans: Sequence[BlockPlan],
    running: Running,
) -> Exception | None:
    """Submit the requests, as many at a time as the engine runs together, and twice as many in all.

    Returns:
        error that refused some of them, so that their blocks must run elsewhere; None if all were submitted.

    Raises:
        PromptError, TypeError, ValueError: a prompt or a keyword that no trace takes.
    """
    most = min(MADE_TOGETHER, backend.facts.limits.max_running)
    known: dict[tuple, Any] = {}
    for first in range(0, len(traces), most):
        part = range(first, min(first + most, len(traces)))
        names = ["the prompt" if len(traces) == 1 else f"invoke {i}" for i in part]
        read = [_read(backend, mode, inputs[i], what, known) for i, what in zip(part, names, strict=True)]
        shared = [_Shared(p.timeout, p.cache_salt, plans[i].reads_logits) for i, p in zip(part, read, strict=True)]
        running.wait(besides=max(2 * backend.facts.limits.max_running - len(part), 0))
        for common, places in groupby(range(len(part)), key=shared.__getitem__):
            own = list(places)
            prompts, cut = [read[i] for i in own], [plans[first + i] for i in own]
            submission = Submission(
                prompts=[
                    RenderedPrompt(None, prompt.token_ids, prompt.embeds, prompt.images, prompt.encoder)
                    for prompt in prompts
                ],
                params=[prompt.params for prompt in prompts],
                interventions=[
                    [*plan.interventions, *monitors_of(inputs[first + i])] for i, plan in zip(own, cut, strict=True)
                ],
                captures=[list(plan.captures) for plan in cut],
                priority=[prompt.priority for prompt in prompts],
                adapters=[prompt.adapter for prompt in prompts],
                names=[names[i] for i in own],
                cache_salt=common.cache_salt,
                timeout=common.timeout,
                prompt_logits=mode == "trace" and common.reads_logits,
                receipts=True,  # a block may read `tracer.result` only, and declare nothing
            )
            try:
                running.add(backend.submit(submission))
            except Exception as error:
                refused = backend.in_process or isinstance(error, ValueError | TypeError)
                if refused or getattr(error, "status", None) in TOO_MUCH:
                    return error
                raise
    return None


def _read(backend: Backend, mode: str, given: TraceInput | None, what: str, known: dict[tuple, Any]) -> TracedPrompt:
    assert given is not None  # else it would not be lowered
    (prompts, _), kwargs = prompts_of(*given, what)
    for name in ("interventions", "monitors", "capture"):  # of which only monitors may be given
        kwargs.pop(name, None)
    return traced_prompt(backend, mode, prompts[0], kwargs, what, known, lowered=True)


def _check_may_run(backend: Backend, refused: Exception) -> None:
    """Raise the error of refused requests, if their blocks may not run elsewhere."""
    if backend.lowered is None or backend.lowered.mode != "require":
        return
    declares = isinstance(refused.__cause__, ValueError)  # `RequestFactory.declare`; else a limit or a name
    if backend.in_process and isinstance(refused, PromptError) and not declares:
        raise refused
    raise LoweringError(f"lower_traces='require', but what this block reads cannot be captured: {refused}") from refused


def _ended(trace: RequestTrace, plan: BlockPlan, handle: RequestHandle, ahead: RowsAhead | None, single: bool) -> Ended:
    (event,), (request,) = handle.ends, handle.requests
    trace.receipt = event.receipt or trace.receipt
    trace.receipt.num_cached_tokens = event.num_cached_tokens
    if event.drafts is not None:
        _, trace.receipt.drafted, trace.receipt.accepted = event.drafts
    trace.receipt.lowered, trace.receipt.preemptions = True, max(trace.receipt.preemptions, request.num_preemptions)
    trace.warnings += event.warnings
    trace.request_ids, trace.single = (request.request_id,), single
    trace.activations.append(NOTHING)
    trace.scores.append(event.monitors or {})
    states = NOTHING if event.activations is None else event.activations
    token_ids = [*request.prompt_token_ids, *event.token_ids]
    return Ended(trace, plan, token_ids, request.prompt_len, states, error_of(event), ahead)


def error_of(event: FinishedEvent) -> BaseException | None:
    """Error of an ended request. An early end takes precedence over the error that it caused in a waiting block."""
    if event.finish_reason == "timeout":
        return TimeoutError(f"request {event.request_id} ran into its timeout")
    return event.error
