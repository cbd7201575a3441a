"""Many traces at once, beside plain requests, broken blocks and aborts, in a pool so small that requests give way.

Each trace must equal its solo run. The oracle is the same engine with room for all and one request at a time; that a solo
run equals nnsight's own is tests/test_trace_parity.py's claim.
"""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import greenlet
import pytest
import torch

from conftest import VOCAB
from pymllm_interp import LM, SamplingParams

READS = ["model.layers.{}.output", "model.layers.{}.mlp.output", "model.layers.{}.self_attn.o_proj.input",
         "model.layers.{}.mlp.down_proj.input"]  # fmt: skip


@dataclass
class Plan:
    """What one client does: reads at some steps, scaled edits at others, in the order of the layers."""

    prompt: list[int]
    new_tokens: int
    actions: dict[int, list[tuple[str, float | None]]]
    fault: str | None = None
    delay: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None

    @classmethod
    def random(cls, rng: random.Random, layers: int, faults: bool) -> Plan:
        new_tokens = rng.randint(1, 12)
        actions = {}
        for step in range(new_tokens):
            if rng.random() < 0.6:
                actions[step] = [
                    (rng.choice(READS).format(layer), rng.choice([None, None, 0.5, -1.0]))
                    for layer in sorted(rng.sample(range(layers), rng.randint(1, layers)))
                ]
        return cls(
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))],
            new_tokens=new_tokens,
            actions=actions,
            fault=rng.choice(["raise", "order", "shape", None, None]) if faults else None,
            delay=rng.random() * 0.05,
        )


def value_of(lm: LM, path: str) -> torch.Tensor:
    """Read a location of the model inside of a trace."""
    return lm.get(path)


def run(lm: LM, plan: Plan) -> None:
    """Carry out a plan as one traced generation; what it read goes to `plan.result`."""
    try:
        with lm.generate(plan.prompt, max_new_tokens=plan.new_tokens) as tracer:
            seen = list().save()
            for step in tracer.iter[:]:
                for path, factor in plan.actions.get(step, []):
                    value = value_of(lm, path)
                    seen.append((step, path, value.clone()))
                    if factor is not None:
                        value[:] = value * factor
                if plan.fault == "raise" and step == plan.new_tokens // 2:
                    raise ZeroDivisionError("planned")
                if plan.fault == "order" and step == plan.new_tokens // 2:
                    lm.model.norm.output
                    lm.model.layers[0].output
                if plan.fault == "shape" and step == plan.new_tokens // 2:
                    lm.model.norm.output = torch.zeros(1, 99, 3)
                lm.logits
            ids = tracer.result.save()
        plan.result = {"seen": seen, "ids": ids}
    except Exception as error:
        plan.error = error


def assert_same(got: Plan, wanted: Plan) -> None:
    assert type(got.error) is type(wanted.error), (got.error, wanted.error)
    if wanted.error is not None:
        return
    assert torch.equal(got.result["ids"], wanted.result["ids"])
    assert [(s, p) for s, p, _ in got.result["seen"]] == [(s, p) for s, p, _ in wanted.result["seen"]]
    for (step, path, value), (_, _, reference) in zip(got.result["seen"], wanted.result["seen"], strict=True):
        assert value.shape == reference.shape
        assert torch.allclose(value, reference, atol=1e-4), (step, path, (value - reference).abs().max())


def stress(lm_of: Any, seed: int, count: int, policy: str) -> LM:
    rng = random.Random(seed)
    plans = [Plan.random(rng, layers=3, faults=True) for _ in range(count)]
    solo = lm_of("llama", kv_cache_tokens=4096)
    references = [Plan(p.prompt, p.new_tokens, p.actions, p.fault) for p in plans]
    for reference in references:
        run(solo, reference)
    plain_prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count // 4)]
    params = SamplingParams(temperature=0, max_tokens=16)
    plain_wanted = [solo.generate([p], params)[0].token_ids for p in plain_prompts]

    lm = lm_of("llama", kv_cache_tokens=56, page_size=4, schedule_policy=policy, max_running_requests=8, max_num_tokens=48)
    before = lm.engine.stats()
    timers = [threading.Timer(plan.delay, run, (lm, plan)) for plan in plans]
    for timer in timers:
        timer.start()
    handles = [lm.submit(p, params) for p in plain_prompts]
    cancelled = [lm.submit([1, 2, 3], SamplingParams(max_tokens=30)) for _ in range(3)]
    for handle in cancelled:
        handle.cancel()
    for timer in timers:
        timer.join(timeout=120)
        assert not timer.is_alive(), "a trace hangs"
    assert [h.result(timeout=60).token_ids for h in handles] == plain_wanted
    assert all(h.result(timeout=60).finish_reason in ("abort", "length") for h in cancelled)
    for plan, reference in zip(plans, references, strict=True):
        assert_same(plan, reference)
    after = lm.engine.stats()
    assert after["preempted"] > before["preempted"] and after["moved_to_host"] > before["moved_to_host"]
    assert_nothing_left(lm)
    return lm


def assert_nothing_left(lm: LM) -> None:
    lm.engine.call(lm.engine.scheduler.check_integrity)
    stats = lm.engine.stats()
    assert (stats["running"], stats["waiting"], stats["swapped"]) == (0, 0, 0)
    assert stats["free_kv_tokens"] == lm.runner.max_total_num_tokens
    helper = lm.runner.nnsight_request_helper
    assert not helper.num_prompts_in_mediator and not helper._traces
    assert not lm.engine._handles and not lm.interleaver.points and not lm.interleaver.traces
    gc.collect()
    alive = [g for g in gc.get_objects() if isinstance(g, greenlet.greenlet) and hasattr(g, "mediator") and not g.dead]
    assert not alive, "greenlets are left"


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("seed", range(2))
def test_concurrent_traces_equal_their_solo_runs(lm_of, seed: int, policy: str) -> None:
    stress(lm_of, seed, 40, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("seed", range(100, 110))
def test_four_hundred_concurrent_traces_equal_their_solo_runs(lm_of, seed: int, policy: str) -> None:
    stress(lm_of, seed, 400, policy)
