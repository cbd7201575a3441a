"""Per-step results: tokens of requests, which may end them, log probabilities, last events, counts and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..core.events import FinishedEvent, Logprob, OpError, RequestTimes
from ..core.image_input import ImageError
from ..core.request import Request
from ..core.step import AcceptedToken, ModelRunnerOutput, SampledLogprobs, ScheduledRequest, SchedulerOutput
from ..runner.interp_model_runner import InterpModelRunner
from .drafts import Drafts


class Progress(NamedTuple):
    """Progress of an engine."""

    progress: str
    """Another one whenever a step, a command or a block of a trace has ended."""
    busy: bool
    """Whether there is anything to do."""
    in_block: bool
    """Whether a block of a trace runs."""


def take(
    request: Request, token_ids: list[int], output: ModelRunnerOutput, accepted: list[AcceptedToken],
    drafted: ScheduledRequest | None = None,
) -> str | None:  # fmt: skip
    """Append a step's tokens to their request and to `accepted`; the reason to end, or None. Tokens after the end are dropped.

    Args:
        drafted: the request's part, if it has drafts: monitors take the score before each token, and none behind the end.
    """
    error = output.errors.get(request.request_id)
    if error is not None:
        request.error = error
        return "error"
    if not request.generates:
        done = token_ids or request.prompt_computed == request.prompt_len
        return None if not done else "monitor" if _stops_at(request) else "length"
    if not token_ids and _stops_at(request):
        return "monitor"
    before = len(request.output_token_ids)
    if not before and token_ids:
        request.first_token_at = time.monotonic()
    try:
        for i, token in enumerate(token_ids):
            if i and drafted is not None and request.monitors is not None:
                _take_scores(request, drafted.start + i, output, slice(i, i + 1))
            reason = "monitor" if _stops_at(request) else _append(request, token, output, accepted)
            if reason is not None:
                return reason
        return None
    finally:  # a constraint's or a tokenizer's error, too
        kept = len(request.output_token_ids) - before
        if request.constraint is not None:
            request.constraint.num_masked += sum(output.masked.get(request.request_id, ())[:kept])
        if found := output.flat.get(request.request_id):
            request.receipt.flat_logits += sum(found[:kept])
            request.num_flat += sum(found[:kept])
        if request.logprobs:
            del request.logprobs[len(request.output_token_ids) :]


def _stops_at(request: Request) -> bool:
    """Whether a monitor ended the request at a position before its next token."""
    monitors = request.monitors
    if monitors is None or monitors.stop_at is None or monitors.stop_at >= request.prompt_len + request.accepted_len:
        return False
    request.stop_reason = monitors.stopped_by
    return True


def take_scores(request: Request, entry: ScheduledRequest, output: ModelRunnerOutput, drafted: bool) -> dict[int, int]:
    """Let a request's monitors take a step's scores.

    Args:
        drafted: the part has drafts: `take` takes the scores behind the first.

    Returns:
        slot of a flag -> first position at which its ops act, of monitors that fired for the first time.
    """
    _take_scores(request, entry.start, output, slice(1 if drafted else entry.num_tokens))
    return request.monitors.take_acted()


def _take_scores(request: Request, first: int, output: ModelRunnerOutput, rows: slice) -> None:
    if (scores := output.scores.get(request.request_id)) is not None:
        request.monitors.take(first, scores[:, rows], request.request_id in output.decided)


def _append(request: Request, token: int, output: ModelRunnerOutput, accepted: list[AcceptedToken]) -> str | None:
    if request.constraint is not None:
        request.constraint.accept(token)
    count = len(request.output_token_ids)
    accepted.append((request.request_id, request.prompt_len + count, token))
    request.output_token_ids.append(token)
    count += 1
    may_stop = count >= request.params.min_tokens
    if request.request_id not in output.stopped and token in request.eos_token_ids and may_stop:
        _stop_by(request, token)
        return "stop"
    if request.stop_checker is not None:
        request.stop_reason = request.stop_checker.push(request.output_token_ids, count > request.params.min_tokens)
    if request.request_id in output.stopped or request.stop_reason is not None:
        return "stop"
    return "length" if count >= request.max_tokens else None


def _stop_by(request: Request, token: int) -> None:
    """A token ends the request. Its text is checked only if it is kept, as in vLLM."""
    request.stop_reason = None if token == request.eos_token_id else token
    if not request.params.include_stop_str_in_output:
        request.num_hidden_tokens = 1
    elif request.stop_checker is not None:
        found = request.stop_checker.push(request.output_token_ids, True)
        request.stop_reason = request.stop_reason if found is None else found


def logprobs_by_token(sampled: SampledLogprobs) -> dict[int, Logprob]:
    """Token id -> its log probability; the sampled token first."""
    entries = zip(sampled.token_ids, sampled.logprobs, sampled.ranks, strict=True)
    return {token: Logprob(logprob, rank) for token, logprob, rank in entries}


def needs_tokens(requests: Mapping[str, Request], step: SchedulerOutput, drafts: Drafts | None) -> bool:
    """Whether the next step cannot be prepared before this step's tokens have been read.

    Args:
        requests: the live ones, by id.
    """
    if step.drafts:
        return True
    live = [request for entry in step.scheduled if (request := requests.get(entry.request_id)) is not None]
    return any(request.needs_tokens for request in live) or (drafts is not None and drafts.may_follow(live))


def count_step(requests: Mapping[str, Request], step: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Count the step in the receipts of requests. A trace counts its own steps.

    Args:
        requests: the live ones, by id.
    """
    for entry in step.scheduled:
        request = requests.get(entry.request_id)
        if request is not None and request.receipt is not None and request.trace is None:
            request.receipt.steps[output.execution] += 1


def append_logprobs(requests: Mapping[str, Request], step: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Append a step's log probabilities to the lists of its requests.

    Args:
        requests: the live ones, by id.
    """
    for entry, sampled in zip(step.scheduled, output.logprobs, strict=True):
        request = requests.get(entry.request_id)
        if request is None:
            continue
        if sampled and request.logprobs is not None and request.generates:
            request.logprobs.extend(map(logprobs_by_token, sampled))
        found = output.prompt_logprobs.get(request.request_id)
        if found and request.prompt_logprobs is not None:
            # A preempted request computes positions again; entries that it has are kept.
            known = len(request.prompt_logprobs) - 1
            request.prompt_logprobs.extend(logprobs_by_token(e) for e in found[max(0, known - entry.start) :])


def finished_event(request: Request) -> FinishedEvent:
    """The last event of a request that has ended."""
    checker = request.stop_checker
    return FinishedEvent(
        request_id=request.request_id,
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason or "error",
        stop_reason=request.stop_reason,
        num_hidden_tokens=request.num_hidden_tokens,
        text_length=None if checker is None else checker.text_length,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        activations=request.activations,
        receipt=request.receipt,
        num_cached_tokens=request.num_cached_tokens,
        error=request.error,
        warnings=request.warnings,
        drafts=None if request.drafts is None else request.drafts.counts,
        monitors=None if request.monitors is None else request.monitors.results(),
        times=_times_of(request),
    )


def _times_of(request: Request) -> RequestTimes:
    began = request.submitted_at
    queued, first = (None if at is None else at - began for at in (request.admitted_at, request.first_token_at))
    return RequestTimes(queued, first, time.monotonic() - began)


def out_of_memory_error(runner: InterpModelRunner, step: SchedulerOutput, error: Exception) -> torch.OutOfMemoryError:
    """The error for the step's requests in place of `error`: its frames hold the tensors of the pass."""
    config = runner.server_config
    kv = f"kv_cache_tokens (now {runner.max_total_num_tokens})"
    if config.kv_cache_tokens is None:
        kv = f"gpu_memory_utilization (now {config.gpu_memory_utilization})"
    return torch.OutOfMemoryError(
        f"a step of {len(step.scheduled)} requests and {step.total_num_scheduled_tokens} tokens ran out of memory on "
        f"{runner.device}; the engine continues. What helps: a lower max_num_tokens (now {runner.max_num_tokens}), for "
        f"smaller steps of prompts; a lower max_running_requests (now {runner.max_running_requests}), for smaller steps "
        f"of any kind; a lower {kv}, for a smaller KV pool\n{error}"
    )


def swap_error(request: Request, max_running: int, reason: str) -> torch.OutOfMemoryError:
    """The error of a request with KV that could not be swapped, and of its gang."""
    return torch.OutOfMemoryError(
        f"request {request.request_id} was preempted, and there was no memory to swap the KV of its {request.kv_len} tokens to the "
        "host or back; the engine continues. What helps: fewer requests at once (max_running_requests, now "
        f"{max_running}), or a larger KV pool\n{reason}"
    )


def blamed(step: SchedulerOutput, live: Mapping[str, Request], error: Exception) -> list[Request]:
    """The requests that end with a failed step.

    The ones with an unreadable image or an op that raised, else traced ones, else all.
    After running out of memory, decoding requests run once again, without the prompts. A step with drafts runs without them.
    """
    known = [(entry, live[entry.request_id]) for entry in step.scheduled if entry.request_id in live]
    requests = [request for _, request in known]
    if isinstance(error, ImageError | OpError) and error.request_ids:
        return [request for request in requests if request.request_id in error.request_ids]
    ending = [request for request in requests if request.trace is not None]
    if not ending and not step.drafts:
        if isinstance(error, torch.OutOfMemoryError):
            ending = [request for entry, request in known if not entry.decodes]
        return ending or requests
    return ending
