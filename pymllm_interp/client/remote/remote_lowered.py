"""Traces of a server's model as declared requests: their blocks run here, over what the requests captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...core.events import FinishedEvent
from ...hooks.captures.activations import NOTHING
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.lowering.plan import BlockPlan
from ...hooks.traces.syntax.scanned import current_scan
from ...utils.arguments import PromptError
from ..backend import Submission
from ..calls.lowered import ANOTHER_INVOKE, Ended, Lowered, LoweringError
from ..calls.traced_prompts import PromptReader, TracedPrompt, traced_prompt
from ..chat import RenderedPrompt
from ..handle import RequestHandle
from ..prompt_batch import prompts_of

PER_PROMPT = ("prompts", "params", "interventions", "captures", "priority", "names", "adapters")
"""Fields of a `Submission` with an entry for each prompt."""
TOO_MUCH = (413, 429)
"""Statuses of a server that has no room for the requests. A trace of many invokes counts as one."""
IN_SCAN = "a trace cannot be opened inside the block of a scan: use a session"


class DeclaringBackend(PromptReader, Protocol):
    """A server's backend."""

    lowered: Lowered
    runs_code: bool

    def submit(self, submission: Submission) -> list[RequestHandle]:
        """`Backend.submit`."""
        ...


class NotDeclaredError(Exception):
    """A block cannot run after its request: it is sent to the server. The message says why.

    Its cause is what the server refused the declared requests with, if it has refused them.
    """


def run_declared(
    backend: DeclaringBackend, mode: str, traces: list[RequestTrace], inputs: Sequence[tuple[tuple, dict] | None]
) -> None:
    """Serve traces without sending their blocks.

    Args:
        mode, inputs: as of `Backend.run_traces`.

    Raises:
        NotDeclaredError: a block must run in the forward passes. No block has run here.
        LoweringError: likewise, with ``lower_traces="require"``.
        RuntimeError: the call is inside the block of a scan.
    """
    if current_scan() is not None:
        raise RuntimeError(IN_SCAN)
    backend.lowered.lower(mode, traces, inputs)
    if prevented := [trace.receipt.not_lowered for trace in traces if trace.plan is None]:
        raise NotDeclaredError(next((reason for reason in prevented if reason != ANOTHER_INVOKE), ANOTHER_INVOKE))
    if backend.runs_code and backend.lowered.mode != "require" and any(trace.plan.computes for trace in traces):
        raise NotDeclaredError("it computes with what it reads, which the server does before it answers")
    handles: list[RequestHandle] = []
    for trace in traces:
        trace.cancel = lambda: [handle.cancel() for handle in handles]
    try:
        _submit(backend, _submission(backend, mode, traces, inputs), handles)
        for handle in handles:
            handle.wait()
    except BaseException as error:
        for handle in handles:
            handle.cancel()
        refused = isinstance(error, ValueError | TypeError) or getattr(error, "status", None) in TOO_MUCH
        if not refused:
            raise
        backend.lowered.unlower(traces, error)
        if backend.lowered.mode == "require":
            raise LoweringError(
                f"lower_traces='require', but what this block reads cannot be captured: {error}"
            ) from error
        raise NotDeclaredError(str(error)) from error
    backend.lowered.replay([_ended(trace, handle) for trace, handle in zip(traces, handles, strict=True)])
    for trace in traces:
        trace.activations.append(NOTHING)


def _submit(backend: DeclaringBackend, submission: Submission, handles: list[RequestHandle]) -> None:
    """Submit the requests, as many at a time as the server takes from one client, and append their handles.

    Raises:
        ValueError, TypeError, ServerError: the server refuses some of them.
    """
    most = backend.facts.limits.max_running
    for start in range(0, len(submission.prompts), most):
        if start >= 2 * most:
            for handle in handles[start - 2 * most : start - most]:
                handle.wait()
        part = {name: getattr(submission, name)[start : start + most] for name in PER_PROMPT}
        handles += backend.submit(replace(submission, **part))


def _submission(
    backend: DeclaringBackend, mode: str, traces: list[RequestTrace], inputs: Sequence[tuple[tuple, dict] | None]
) -> Submission:
    names = [f"invoke {i}" if len(traces) > 1 else "the prompt" for i in range(len(traces))]
    plans: list[BlockPlan] = [trace.plan for trace in traces]
    sampling: dict[tuple, Any] = {}
    read: list[TracedPrompt] = []
    for given, what in zip(inputs, names, strict=True):
        assert given is not None  # else it would not be lowered
        (prompts, _), kwargs = prompts_of(*given, what)
        read.append(traced_prompt(backend, mode, prompts[0], dict(kwargs), what, sampling, lowered=True))
    shared = {(prompt.timeout, prompt.cache_salt, plan.reads_logits) for prompt, plan in zip(read, plans, strict=True)}
    if len(shared) > 1:
        raise PromptError("its invokes differ in timeout, in cache_salt, or in that they read logits of their prompts")
    ((timeout, cache_salt, reads_logits),) = shared
    return Submission(
        prompts=[RenderedPrompt(None, prompt.token_ids) for prompt in read],
        params=[prompt.params for prompt in read],
        interventions=[list(plan.interventions) for plan in plans],
        captures=[list(plan.captures) for plan in plans],
        priority=[prompt.priority for prompt in read],
        adapters=[prompt.adapter for prompt in read],
        names=names,
        cache_salt=cache_salt,
        timeout=timeout,
        prompt_logits=mode == "trace" and reads_logits,
    )


def _ended(trace: RequestTrace, handle: RequestHandle) -> Ended:
    (event,) = handle.ends
    request = handle.requests[0]
    if event.receipt is not None:
        trace.receipt = event.receipt
        trace.receipt.lowered = True
    trace.warnings += event.warnings
    token_ids = [*request.prompt_token_ids, *event.token_ids]
    return Ended(trace, token_ids, request.prompt_len, event.activations or NOTHING, _error_of(event))


def _error_of(event: FinishedEvent) -> BaseException | None:
    if event.error is None and event.finish_reason == "timeout":
        return TimeoutError(f"request {event.request_id} ran into its timeout")
    return event.error
