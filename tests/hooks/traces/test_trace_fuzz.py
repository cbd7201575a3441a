"""Gangs where something goes otherwise: timeouts, errors, stops, preemption; and nothing is left in the engine afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import held
from helpers_idle import left_behind
from helpers_trace_fuzz import Invoke, a_trace, check, random_acts

from pymllm_interp import LM, SamplingParams

WAIT = 120.0
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def lm(lm_of: Callable[..., LM]) -> Iterator[LM]:
    lm = lm_of("qwen3")
    yield lm
    assert left_behind(lm) == {}


def test_a_gang_that_runs_alone_decodes_together(lm: LM) -> None:
    def states(prompts: Any, **kwargs: Any) -> Any:
        with lm.generate(prompts, max_new_tokens=4, ignore_eos=True, **kwargs) as tracer:
            found = list().save()
            for _ in tracer.iter[:]:
                found.append(lm.model.layers[1].output[:, -1])
            ids = tracer.result.save()
        return found, ids

    prompts = [[5, 17, 3], [7, 2, 9]]
    alone, ids = states(prompts, output_hidden_states=True)
    expected, expected_ids = states(prompts)
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(ids, expected_ids)


def test_the_captures_of_a_trace_with_a_whole_batch_invoke_are_returned(lm: LM) -> None:
    with lm.trace() as tracer:
        with tracer.invoke([5, 17, 3], capture=["resid_post.0"]):
            first = lm.model.layers[0].output.save()
        with tracer.invoke([7, 2], capture=["resid_post.0"]):
            pass
        with tracer.invoke():
            both = lm.model.layers[0].output.save()
    assert len(tracer.captures) == 2
    torch.testing.assert_close(tracer.captures[0]["resid_post.0"], first[0])
    torch.testing.assert_close(tracer.captures[1]["resid_post.0"], both[1, 1:])


def test_a_timeout_in_a_gang_is_raised(lm: LM) -> None:
    with pytest.raises(TimeoutError), lm.trace() as tracer:
        with tracer.invoke([5, 17, 3], timeout=1e-9):
            lm.model.layers[0].output.save()
        with tracer.invoke([7, 2]):
            lm.model.layers[0].output.save()
        with tracer.invoke():
            lm.model.layers[0].output.save()


def test_a_prompt_that_never_started_leaves_nothing_of_its_trace(lm: LM) -> None:
    with pytest.raises(TimeoutError), lm.trace() as tracer:
        with tracer.invoke([5, 17, 3], timeout=1e-9):
            lm.model.layers[0].output.save()
        for prompt in ([7, 2], [7, 3]):
            with tracer.invoke(prompt):
                lm.model.layers[0].output.save()


@pytest.mark.parametrize("first", [False, True])
def test_an_invoke_without_a_prompt_sees_a_batch_of_one(lm: LM, first: bool) -> None:
    with lm.trace([5, 17, 3]):
        lm.model.layers[0].output[:, -1] *= 2
        lm.model.layers[0].output = lm.model.layers[0].output * 0.5
        changed = lm.model.layers[0].output[:, -1].save()
        lm.model.layers[1].mlp.output[:, -1] *= 3
        expected = lm.lm_head.output.save()
    with lm.trace() as tracer:
        if first:
            with tracer.invoke():
                lm.model.layers[0].output[:, -1] *= 2
                lm.model.layers[0].output = lm.model.layers[0].output * 0.5
                logits = lm.lm_head.output.save()
        with tracer.invoke([5, 17, 3]):
            state = lm.model.layers[0].output[:, -1].save()
            lm.model.layers[1].mlp.output[:, -1] *= 3
            own = lm.lm_head.output.save()
        if not first:
            with tracer.invoke():
                lm.model.layers[0].output[:, -1] *= 2
                lm.model.layers[0].output = lm.model.layers[0].output * 0.5
                logits = lm.lm_head.output.save()
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(own, expected)
    if first:
        torch.testing.assert_close(state, changed)


class SlowPrompt(list):
    """Token ids that take long to read."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(0.1)
        return super().__iter__()


def test_a_task_that_is_cancelled_before_its_prompt_is_submitted_ends_early(lm: LM) -> None:
    steps: list[int] = []

    def slowly(step: int, saved: dict[str, Any]) -> None:
        steps.append(step)
        time.sleep(0.01)

    async def generation() -> None:
        async with lm.generate(SlowPrompt([5, 17, 3]), max_new_tokens=100, ignore_eos=True, on_step=slowly):
            lm.model.layers[0].output.save()

    async def cancelled() -> None:
        task = asyncio.create_task(generation())
        await asyncio.sleep(0)  # it runs to where it waits
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert len(steps) < 100


ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "split": {"hook_execution": "split"},
    "overlapped": {"async_scheduling": True},
}


@pytest.mark.thin(12)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("generates", [False, True])
def test_random_traces_equal_solo_traces(lm_of: Callable[..., LM], engine: str, generates: bool) -> None:
    lm = lm_of("qwen3", **ENGINES[engine])
    for seed in range(20):
        check(lm, a_trace(random.Random(seed), 2, generates), generates)
    assert left_behind(lm) == {}


@pytest.mark.parametrize("ahead", [False, True])
def test_random_traces_that_are_swapped_equal_solo_traces(lm_of: Callable[..., LM], ahead: bool) -> None:
    """Several at once, beside plain requests, in a pool that holds less than half of them."""
    lm, solo = lm_of("qwen3", kv_cache_tokens=64, page_size=4, async_scheduling=ahead), lm_of("qwen3")
    before, plain = lm.engine.stats()["moved_to_host"], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    wanted = solo.generate([[i, i + 1, 7] for i in range(3)], plain)
    for seed in range(3):
        rng = random.Random(seed)
        traces = [
            [
                Invoke([[rng.randrange(90) for _ in range(rng.randrange(1, 9))]], random_acts(rng, 2, 12, 0), 12)
                for _ in range(rng.choice([1, 1, 2]))
            ]
            for _ in range(6)
        ]
        with ThreadPoolExecutor(6) as threads:
            with held(lm) as arrived:
                checks = [threads.submit(check, lm, invokes, True, solo) for invokes in traces]
                arrived(6)
                handles = [lm.submit([i, i + 1, 7], plain) for i in range(3)]
            for each in checks:
                each.result(WAIT)
        assert [handle.result(WAIT).token_ids for handle in handles] == [out.token_ids for out in wanted]
        lm.engine.call(lm.engine.scheduler.check_integrity)
    assert lm.engine.stats()["moved_to_host"] - before > 8, "the pool was too large"
    assert left_behind(lm) == {}


def test_a_gang_in_which_one_asks_for_hidden_states_decodes_together(lm: LM) -> None:
    with lm.generate(max_new_tokens=4, ignore_eos=True) as tracer:
        with tracer.invoke([5, 17, 3], output_hidden_states=True):
            pass
        with tracer.invoke([7, 2]):
            pass
        with tracer.invoke():
            states = list().save()
            for _ in tracer.iter[:]:
                states.append(lm.model.layers[1].output[:, -1])
    assert len(states) == 4 and all(bool((step != 0).any(-1).all()) for step in states)
