"""The counts of an engine's runner and scheduler."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..runner.interp_model_runner import InterpModelRunner
from .drafts import Drafts
from .scheduler import Scheduler


def counters(runner: InterpModelRunner, scheduler: Scheduler, drafts: Drafts | None) -> dict[str, Any]:
    """Counts of steps by kind, requests in each state, available KV slots, preemptions, and the counts of the engine's parts."""
    return {
        "execution": {f"{how}: {why}": n for (how, why), n in Counter(runner.partition.counts).items()},
        "depths": dict(runner.executions.depths),
        "graphs": runner.graphs.stats(),
        "segments": None if runner.segments is None else runner.segments.stats(),
        "prompt_segments": None if runner.prompt_segments is None else runner.prompt_segments.stats(),
        "states": None if runner.gdn_pool is None else runner.gdn_pool.stats(),
        "eager_parts": dict(runner.interleaver.eager_parts),
        "block_seconds": runner.interleaver.blocks.seconds,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "swapped": len(scheduler.swapped),
        "free_kv_tokens": scheduler.kv.num_available_pages * scheduler.kv.page_size,
        "preempted": scheduler.num_preempted,
        "moved_to_host": scheduler.num_swapped,
        "prefix_cache": scheduler.kv.sharing.stats(),
        "speculation": None if drafts is None else drafts.stats(),
    }
