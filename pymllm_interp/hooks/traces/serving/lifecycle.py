"""The life of a trace outside of the passes: its start, its results, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....core.step import NewRequest, RequestEnd
from ..blocks.errors import LoopEnd, too_late
from ..blocks.trace import Block, RequestTrace
from ..nnsight_compat import Event, dangling_unwind
from .interleaver import EngineInterleaver
from .rows import Padding


def start(interleaver: EngineInterleaver, trace: RequestTrace, requests: Sequence[NewRequest]) -> None:
    """Run each block of a trace until it first waits.

    Args:
        requests: the requests that it watches, in the order of the prompts.
    """
    trace.started, trace.request_ids = True, tuple(request.request_id for request in requests)
    trace.prompt_lens = tuple(request.prompt_len for request in requests)
    hooks = [request.hooks for request in requests if request.hooks is not None]
    trace.single = hooks[0].single
    trace.max_passes = 1 if trace.single else max(entry.max_tokens for entry in hooks)
    before, interleaver.interleaving = interleaver.interleaving, True  # a block may begin with `...source.op.source`
    for block in trace.blocks:
        if not trace.ended:
            interleaver.blocks.start(block, interleaver)
    interleaver.interleaving = before
    if trace.ended or trace.single:
        return
    _offer_lazily(interleaver, trace, interleaver.streamer, lambda: _prompts(trace, requests))


def _prompts(trace: RequestTrace, requests: Sequence[NewRequest]) -> torch.Tensor:
    """Token ids [requests, tokens] of the prompts."""
    ids = [request.token_ids[: request.prompt_len] for request in requests]
    padding = trace.padding or Padding.on_the_left([len(prompt) for prompt in ids])
    return _padded(ids, padding, trace.pad_token_id)


def _generated(trace: RequestTrace, requests: Sequence[RequestEnd]) -> torch.Tensor:
    """Token ids [requests, prompt + new tokens] of a generation, as transformers returns it: padded on both sides."""
    prompts = trace.padding or Padding.on_the_left([request.prompt_len for request in requests])
    ends = [start + len(r.all_token_ids) for start, r in zip(prompts.left, requests, strict=True)]
    return _padded([r.all_token_ids for r in requests], Padding(prompts.left, max(ends)), trace.pad_token_id)


def _padded(rows: Sequence[Sequence[int]], padding: Padding, pad: int) -> torch.Tensor:
    found = torch.full((len(rows), padding.width), pad)
    for own, row, start in zip(found, rows, padding.left, strict=True):
        own[start : start + len(row)] = torch.tensor(row)
    return found


def _offer_lazily(
    interleaver: EngineInterleaver, trace: RequestTrace, location: str, value: Callable[[], torch.Tensor]
) -> None:
    """`EngineInterleaver.offer`, with a value that is made only if a block waits for it."""
    if any(interleaver.points.reaches(block, location) for block in trace.blocks) or interleaver.caches_of(
        trace, location
    ):
        interleaver.offer(trace, location, value())
    else:
        trace.visits.calls[location] += 1


def serve_results(interleaver: EngineInterleaver, trace: RequestTrace, requests: Sequence[RequestEnd]) -> bool:
    """Serve the results of finished requests. Returns False if no block waits for one."""
    result, served = trace.result, False
    if trace.keeps_result and trace.result is None and not trace.ended:
        trace.result = trace.postprocess() if trace.postprocess else _generated(trace, requests)
    for location in interleaver.result_locations[trace.single :]:
        caches = [] if trace.visits.calls[location] else interleaver.caches_of(trace, location)
        while caches or (
            not trace.ended and any(interleaver.points.reaches(block, location) for block in trace.blocks)
        ):
            if trace.postprocess is not None and location == "result":
                result = trace.postprocess()
            elif not served and not trace.single:
                result = _generated(trace, requests)
            result, caches = interleaver.offer(trace, location, result), []
            served = True
    return served


def wind_up(interleaver: EngineInterleaver, ending: Sequence[tuple[RequestTrace, list[RequestEnd]]]) -> None:
    """Serve results first, then end loops, then blocks that wait in vain; barriers are given up last.

    Args:
        ending: traces with ended requests, and those requests.
    """
    while (
        any(serve_results(interleaver, trace, own) for trace, own in ending)
        or any(end_waiting(interleaver, trace, barriers=False) for trace, _ in ending)
        or any(end_waiting(interleaver, trace, barriers=True) for trace, _ in ending)
    ):
        pass


def end_waiting(interleaver: EngineInterleaver, trace: RequestTrace, barriers: bool) -> bool:
    """End one wait of a finished request: a loop ends, any other read raises at its line. Returns False if no block waits."""
    for block in trace.blocks:
        pending = block.pending
        if trace.ended or not block.alive or pending is None:
            continue
        if pending.event is not Event.BARRIER or barriers:
            interleaver.blocks.resume(block, error=_unreached(block, trace))
            return True
    return False


def _unreached(block: Block, trace: RequestTrace) -> BaseException:
    """The error of a wait for something that never came."""
    pending = block.pending
    assert pending is not None
    if pending.event is not Event.BARRIER and block.iteration != 0:
        return LoopEnd(f"'{pending}' was never reached: the generation was over")
    error, _ = dangling_unwind(block)
    if pending.provider is None:
        return type(error)(f"request {trace.request_id}: {error}")
    block.late = too_late(trace.request_id, pending.provider, block.last_location)
    return type(error)(block.late)


def close(interleaver: EngineInterleaver, trace: RequestTrace, requests: Sequence[RequestEnd]) -> None:
    """End a trace with ended requests: free its blocks' frames, give its saves own storage, and complete its receipt."""
    for block in trace.blocks:
        if block.alive:
            interleaver.blocks.kill(block)
    if trace.last_edit is not None:
        interleaver.nan_check.settle(trace.last_edit)
    trace.receipt.preemptions = sum(request.num_preemptions for request in requests)
    trace.warnings += trace.receipt.warnings
    trace.saves.end()
    if not trace.keeps_result:
        trace.result = None
    trace.gang = trace.whole_batch = ()
    trace.postprocess = None  # it holds the requests, which hold the trace
