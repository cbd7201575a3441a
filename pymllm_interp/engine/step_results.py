"""Per-step results for callers: log probabilities, execution, and advice after running out of memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..core.events import FinishedEvent, RequestTimes
from ..core.output import Logprob
from ..core.request import Request
from ..core.step import ModelRunnerOutput, SampledLogprobs, SchedulerOutput
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


def logprobs_by_token(sampled: SampledLogprobs) -> dict[int, Logprob]:
    """Token id -> its log probability; the sampled token first."""
    entries = zip(sampled.token_ids, sampled.logprobs, sampled.ranks, strict=True)
    return {token: Logprob(logprob, rank) for token, logprob, rank in entries}


def needs_tokens(requests: Mapping[str, Request], step: SchedulerOutput, drafts: Drafts | None) -> bool:
    """Whether the next step cannot be prepared before this step's tokens have been read.

    Args:
        requests: the live ones, by id.
        drafts: drafts of the engine.
    """
    if step.drafts:
        return True
    live = [request for entry in step.scheduled if (request := requests.get(entry.request_id)) is not None]
    return any(request.needs_tokens for request in live) or (drafts is not None and drafts.may_follow(live))


def count_step(requests: Mapping[str, Request], step: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Count the step in the receipts of declared requests.

    Args:
        requests: the live ones, by id.
    """
    for entry in step.scheduled:
        request = requests.get(entry.request_id)
        if request is not None and request.declared is not None and request.trace is None:
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
        times=_times_of(request),
    )


def _times_of(request: Request) -> RequestTimes:
    began = request.submitted_at
    queued, first = (None if at is None else at - began for at in (request.admitted_at, request.first_token_at))
    return RequestTimes(queued, first, time.monotonic() - began)


def runner_counters(runner: InterpModelRunner) -> dict[str, Any]:
    """The runner's part of `Engine.stats`."""
    return {
        "execution": {f"{how}: {why}": n for (how, why), n in Counter(runner.partition.counts).items()},
        "segments": None if runner.segments is None else runner.segments.stats(),
        "prompt_segments": None if runner.prompt_segments is None else runner.prompt_segments.stats(),
        "states": None if runner.gdn_pool is None else runner.gdn_pool.stats(),
        "eager_parts": dict(runner.interleaver.eager_parts),
        "block_seconds": runner.interleaver.blocks.seconds,
    }


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
