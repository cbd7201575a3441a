"""What the engine knows of the length of steps, and when it launches the next one. The clock is a number."""

from __future__ import annotations

import random

import pytest

from pymllm_interp.core.step import ScheduledRequest, SchedulerOutput
from pymllm_interp.engine.step_times import MIN_CHUNK, POLL_S, StepPacing, StepTimes


def step(rows: int, prompt_tokens: int = 0) -> SchedulerOutput:
    entries = [ScheduledRequest(str(i), i + 1, 1, 9, True, True, 1) for i in range(rows)]
    if prompt_tokens:
        entries.append(ScheduledRequest("p", rows + 1, prompt_tokens, 0, True, False, 1))
    return SchedulerOutput(scheduled=entries)


class Device:
    """A device that takes `seconds` for a step, and a host that takes `host` to launch one."""

    def __init__(self, host: float = 1e-3) -> None:
        self.now, self.host, self.free_at, self.idle = 0.0, host, 0.0, 0.0
        self.times = StepTimes()
        self.pacing = StepPacing(self.times, lambda: self.now)
        self.in_flight: float | None = None  # when it ends
        self.joined: list[float] = []

    def step(self, rows: int, prompt_tokens: int, seconds: float) -> float:
        """Run the engine's loop once. Returns how long it waited for requests."""
        began = self.now
        while self.in_flight is not None and self.in_flight > self.now and (left := self.pacing.seconds_left()):
            self.now += left
        waited, started = self.now - began, self.now
        self.now += self.host
        idle = self.in_flight is None or self.in_flight <= self.now
        self.idle += max(0.0, self.now - self.free_at)
        self.free_at = max(self.free_at, self.now) + seconds
        self.pacing.launched(step(rows, prompt_tokens), started, idle)
        if self.in_flight is not None:
            self.now = max(self.now, self.in_flight)
            self.pacing.ended()
        self.in_flight = self.free_at
        return waited


def test_nothing_is_known_before_the_first_step() -> None:
    times = StepTimes()
    assert times.predict(8, 0) is times.predict(8, 100) is times.prompt_tokens(8, 1.0) is None
    assert Device().pacing.seconds_left() == 0


def test_averages_follow_the_steps_and_prompt_tokens_fit_the_target() -> None:
    times, rng = StepTimes(), random.Random(0)
    for _ in range(200):
        rows, tokens = rng.randint(1, 64), rng.choice([0, rng.randint(1, 4000)])
        times.record(rows, tokens, 4e-3 + 2e-5 * tokens)
    for rows, tokens in ((1, 0), (64, 0), (30, 100), (8, 3000)):
        assert times.predict(rows, tokens) == pytest.approx(4e-3 + 2e-5 * tokens, rel=0.05)
    for target in (5e-3, 10e-3, 40e-3):
        fits = times.prompt_tokens(16, target)
        assert fits is not None and fits == pytest.approx((target - 4e-3) / 2e-5, rel=0.1)
    assert times.prompt_tokens(16, 1e-3) == MIN_CHUNK, "prompts go on, whatever the target"


def test_steps_are_launched_late_and_the_device_does_not_wait() -> None:
    device, rng = Device(), random.Random(1)
    for _ in range(10):
        device.step(8, 0, 5e-3)
    idle = device.idle
    waited = [device.step(8, 0, 5e-3 * rng.uniform(0.98, 1.02)) for _ in range(200)]
    assert sorted(waited)[100] > 2e-3 and device.idle - idle < 200 * 5e-5


@pytest.mark.parametrize("first", [2.0, 20.0])
def test_a_first_step_that_compiled_for_seconds_is_soon_forgotten(first: float) -> None:
    device = Device()
    device.step(0, 1500, first)
    for i in range(60):
        device.step(8, 8000 if i % 2 else 0, 0.19 if i % 2 else 5e-3)
    idle, then = device.idle, device.now
    for i in range(60):
        device.step(8, 8000 if i % 2 else 0, 0.19 if i % 2 else 5e-3)
    assert device.idle - idle < 0.02 * (device.now - then)


def test_steps_that_become_shorter_cost_no_more_than_a_poll_each() -> None:
    device = Device()
    for _ in range(30):
        device.step(256, 0, 20e-3)
    idle = device.idle
    for _ in range(20):
        device.step(256, 0, 4e-3)
    assert device.idle - idle < 20 * (POLL_S + device.host)


def test_a_step_whose_tokens_could_not_be_read_is_forgotten() -> None:
    device = Device()
    for _ in range(5):
        device.step(8, 0, 5e-3)
    device.pacing.forget()
    device.pacing.ended()
    assert device.pacing.seconds_left() == 0 and device.times.predict(8, 0) == pytest.approx(5e-3, rel=0.3)
