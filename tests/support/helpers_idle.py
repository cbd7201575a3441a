"""What an idle engine holds of requests that have ended."""

from __future__ import annotations

import gc
from typing import Any

import greenlet

from pymllm_interp import LM


def left_behind(lm: LM) -> dict[str, Any]:
    """What is left of requests, by name: nothing, where all were wound up. Checks the integrity of pages and rows, too."""
    runner, scheduler = lm.engine.runner, lm.engine.scheduler
    helper, stage = runner.nnsight_request_helper, runner.declared_stage
    assert stage is not None

    def look() -> dict[str, Any]:
        scheduler.check_integrity()
        stats, all_tokens = lm.engine.stats(), runner.max_total_num_tokens
        held = {f"helper.{name}": value for name, value in vars(helper).items() if name != "interleaver"}
        held |= {"requests": scheduler.requests, "exclusive": scheduler._exclusive.requests, "live": stage._live}
        held |= {
            "cutting": stage._cutting,
            "with gradients": stage._with_gradients,
            "events": lm.engine.ends.subscribers,
        }
        held |= {"points": runner.interleaver.points, "traces": runner.interleaver.traces}
        held |= {name: stats[name] for name in ("running", "waiting", "swapped")}
        held |= {"KV tokens": all_tokens - stats["free_kv_tokens"]}
        return {name: value for name, value in held.items() if value}

    found = lm.engine.call(look)
    gc.collect()
    blocks = [g for g in gc.get_objects() if isinstance(g, greenlet.greenlet) and hasattr(g, "mediator") and not g.dead]
    return found | ({"blocks": blocks} if blocks else {})
