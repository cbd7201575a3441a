"""How many prompt tokens a step takes: `max_itl_ms` beside decoding requests, `max_prefill_tokens` of several prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers_simulation import Simulation

from pymllm_interp import LM, SamplingParams
from pymllm_interp.config import ServerConfig
from pymllm_interp.core.request import Request
from pymllm_interp.engine.step_times import MIN_CHUNK, StepTimes

DECODE_S, TOKEN_S = 5e-3, 1e-4


def simulation(target_ms: float | None) -> Simulation:
    """A scheduler whose steps took 5 ms, and 0.1 ms for each prompt token."""
    sim = Simulation(num_pages=200, page_size=4, max_num_tokens=50, max_running=8, eos_rate=0)
    times = StepTimes()
    for rows in (1, 2, 3):
        times.record(rows, 0, DECODE_S)
        for tokens in (10, 20, 40, 60):
            times.record(rows, tokens, DECODE_S + TOKEN_S * tokens)
    sim.scheduler.config = replace(sim.scheduler.config, max_itl_ms=target_ms)
    sim.scheduler._times = times
    return sim


def chunks(sim: Simulation, request: Request) -> list[int]:
    """Tokens of the request's prompt in each step, until it decodes."""
    found = []
    while request.kv_len < request.prompt_len:
        before = request.kv_len
        sim.step()
        found.append(request.kv_len - before)
    return found


@pytest.mark.parametrize(("target", "chunk"), [(None, 49), (9.0, 40), (7.0, 20), (5.1, MIN_CHUNK), (1.0, MIN_CHUNK)])
def test_prompts_beside_decoding_requests_take_the_time_that_the_target_leaves(
    target: float | None, chunk: int
) -> None:
    sim = simulation(target)
    sim.add(2, 60)
    sim.step()
    (long,) = sim.add(60, 2)
    found = chunks(sim, long)
    assert all(abs(tokens - chunk) <= 1 for tokens in found[:-1]) and sum(found) == 60 and len(found) == -(-60 // chunk)


def test_prompts_alone_fill_the_step() -> None:
    sim = simulation(6.0)
    (long,) = sim.add(60, 2)
    assert chunks(sim, long) == [50, 10]


def test_a_traced_prompt_runs_in_one_pass_whatever_the_target() -> None:
    sim = simulation(6.0)
    sim.add(2, 60)
    sim.step()
    (traced,) = sim.add(40, 2, traced=True)
    assert chunks(sim, traced) == [40]


def steps_of(sim: Simulation, requests: list[Request]) -> list[list[int]]:
    """Prompt tokens of each request in each step, until all decode."""
    found = []
    while any(request.kv_len < request.prompt_len for request in requests):
        before = [min(request.kv_len, request.prompt_len) for request in requests]
        sim.step()
        found.append([min(r.kv_len, r.prompt_len) - b for r, b in zip(requests, before, strict=True)])
    return found


def test_prompts_that_share_a_step_have_max_prefill_tokens() -> None:
    sim = simulation(None)
    sim.scheduler.config = replace(sim.scheduler.config, max_prefill_tokens=20)
    burst = [sim.add(tokens, 2)[0] for tokens in (8, 8, 8, 45, 20, 4)]
    # The second step begins with what is left of the third prompt.
    assert steps_of(sim, burst) == [
        [8, 8, 4, 0, 0, 0], [0, 0, 4, 16, 0, 0], [0, 0, 0, 29, 0, 0], [0, 0, 0, 0, 20, 0], [0, 0, 0, 0, 0, 4],
    ]  # fmt: skip


def test_a_single_prompt_and_a_traced_one_have_the_whole_step() -> None:
    sim = simulation(None)
    sim.scheduler.config = replace(sim.scheduler.config, max_prefill_tokens=20)
    long, traced, short = sim.add(60, 2)[0], sim.add(40, 2, traced=True)[0], sim.add(10, 2)[0]
    assert steps_of(sim, [long, traced, short]) == [[50, 0, 0], [10, 0, 0], [0, 40, 0], [0, 0, 10]]


def test_without_max_prefill_tokens_prompts_fill_the_step() -> None:
    sim = simulation(None)
    burst = [sim.add(tokens, 2)[0] for tokens in (8, 8, 30, 20)]
    assert steps_of(sim, burst) == [[8, 8, 30, 4], [0, 0, 0, 16]]


def test_an_engine_learns_its_times_and_chunks_by_them() -> None:
    with LM("demo", device="cpu", max_itl_ms=1e-6, max_num_tokens=64, max_model_len=512) as lm:
        beside = lm.submit("Once upon a time", SamplingParams(max_tokens=64, ignore_eos=True, temperature=0))
        for _ in range(2):  # of the first, no times of steps with prompts were known
            lm.generate([list(range(200))], SamplingParams(max_tokens=1, temperature=0))
        steps = lm.engine.num_steps
        lm.generate([list(range(300, 460))], SamplingParams(max_tokens=1, temperature=0))
        assert not beside.done, "it decodes beside"
        assert lm.engine.num_steps - steps >= 160 // MIN_CHUNK
        beside.cancel()


@pytest.mark.parametrize("wrong", [0, -1.0])
def test_a_target_that_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"max_itl_ms=.*expected milliseconds above 0"):
        ServerConfig(max_itl_ms=wrong)
