"""Profiles of engine steps, by kernel: the suite "profile". It is a run of its own: launches are slower once a profiler ran."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler_util import Interval
from torch.profiler import ProfilerActivity, profile

from pymllm_interp.bench.common import generate, greedy, random_prompts
from pymllm_interp.bench.suites import MODES, PREFILL_PROMPTS, BenchSettings, Model, facts
from pymllm_interp.client.handle import RequestHandle
from pymllm_interp.lm import LM

KERNELS = 30
"""Kernels that are kept, longest first."""
PROFILED_STEPS = 20


def profile_suite(model: Model) -> Iterator[dict[str, Any]]:
    """Profiles of decode steps, of prefill, and of steps in which one request reads a layer. Yields the growing record."""
    settings, found = model.settings, dict[str, Any](profile={})
    with model.load() as lm:
        found |= facts(lm)
        for batch in settings.batches:
            found["profile"][f"decode {batch}"] = profile_decode(lm, batch, settings)
        found["profile"]["prefill"] = profile_prefill(lm, settings)
        yield found
    for mode, options in MODES.items():
        if "tuning" in options:
            with model.load(lower_traces="off", **options) as lm:
                for batch in settings.batches:
                    found["profile"][f"{mode} {batch}"] = profile_decode(lm, batch, settings, [lm.num_layers // 2])
            yield found


def profile_decode(
    lm: LM, batch: int, settings: BenchSettings, layers: list[int] | None = None, options: Sequence[Any] = ()
) -> dict[str, Any]:
    """Profile of some decode steps.

    Args:
        options: options of each request, such as its adapter; without `layers`.
        layers: that the first request reads at each step; None: no request reads.
    """
    profile, engine = StepProfile(lm), lm.engine
    params = greedy(settings.longest - settings.prompt_tokens)
    prompts = random_prompts(lm, batch, settings.prompt_tokens)
    plain = prompts if layers is None else prompts[1:]
    given = options or [{}] * len(plain)
    handles: list[RequestHandle] = engine.call(
        lambda: [lm.submit(prompt, params, **own) for prompt, own in zip(plain, given, strict=True)]
    )

    def advance() -> None:
        """Start once all plain requests decode, and stop after some steps or at the first end. On the engine's thread."""
        if profile.steps is None and all(handle.requests[0].output_token_ids for handle in handles[-1:]):
            profile.start()
        elif (profile.steps or 0) >= PROFILED_STEPS and not profile.stopped:
            profile.stop()

    if layers is None:
        while not profile.stopped and not handles[0].done:
            engine.call(advance)
            time.sleep(1e-3)
    else:
        with lm.generate(prompts[0], max_new_tokens=params.max_tokens, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                for layer in layers:
                    lm.model.layers[layer].output[0, -1].clone()
                advance()
    if not profile.stopped:  # there were fewer steps
        engine.call(profile.stop)
    for handle in handles:
        handle.cancel()
        handle.wait()
    return profile.result()


def profile_prefill(lm: LM, settings: BenchSettings) -> dict[str, Any]:
    """Profile of prefill."""
    profile = StepProfile(lm)
    lm.engine.call(profile.start)
    generate(lm, random_prompts(lm, PREFILL_PROMPTS, settings.prefill_tokens), 1)
    lm.engine.call(profile.stop)
    return profile.result()


def profile_lines(record: dict[str, Any], conditions: str) -> list[str]:
    """The longest kernels of each profile."""
    steps = (f"- {name}: {longest(step)}" for name, step in record["profile"].items())
    return [f"### {record['model']}: profiles", "", conditions, "", *steps]


def longest(step: dict[str, Any], kernels: int = 6) -> str:
    """The longest kernels of a `StepProfile.result`."""
    shown = ", ".join(
        f"`{entry['kernel'].replace('|', '/').replace('`', '')[:60]}` {entry['us']:,.0f} us ({entry['launches']:.0f} x)"
        for entry in step["kernels"][:kernels]
    )
    return f"{step['us']:,.0f} us a step, {step['busy_us']:,.0f} of them busy: {shown}."


@dataclass
class StepProfile:
    """Profiles the steps between `start` and `stop`. Both are called on the engine's thread.

    On a CPU, "kernels" are torch operators.
    """

    lm: LM
    _marks: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cuda = self.lm.backend.facts.device.startswith("cuda")
        self._profiler = profile(activities=[ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU])

    @property
    def steps(self) -> int | None:
        """Steps since `start`; None before it."""
        return self.lm.engine.num_steps - self._marks[0][1] if self._marks else None

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return len(self._marks) == 2

    def start(self) -> None:
        """Start, after the device has finished its queue."""
        self._synchronize()
        self._profiler.start()
        self._mark()

    def stop(self) -> None:
        """Stop, after the device has finished its queue."""
        self._synchronize()
        self._mark()
        self._profiler.stop()

    def result(self) -> dict[str, Any]:
        """Microseconds a step: elapsed, busy, and by kernel; and the kernels of about the last step, in order.

        Concurrent kernels may add up to more than the busy time.

        Raises:
            RuntimeError: no step ran between start and stop.
        """
        (started, before), (stopped, behind) = self._marks
        steps = behind - before
        if steps < 1:
            raise RuntimeError("nothing ran while it was profiled: the requests ended before it began")
        time_of = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        found = [
            {"kernel": event.key[:90], "us": getattr(event, time_of) / steps, "launches": event.count / steps}
            for event in self._profiler.key_averages()
            if getattr(event, time_of)
        ]
        found.sort(key=lambda entry: -entry["us"])
        timed = sorted(
            (event for event in self._profiler.events() or () if getattr(event, time_of)),
            key=lambda e: e.time_range.start,
        )
        last = timed[-(len(timed) // steps) :]
        return {
            "steps": steps,
            "us": (stopped - started) / steps * 1e6,
            "busy_us": covered([event.time_range for event in timed]) / steps,
            "kernels": found[:KERNELS],
            "last_step": [(event.key[:60], getattr(event, time_of)) for event in last],
        }

    def _mark(self) -> None:
        self._marks.append((time.perf_counter(), self.lm.engine.num_steps))

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def covered(ranges: Iterable[Interval]) -> float:
    """Length of the union of the ranges."""
    total, until = 0.0, -math.inf
    for interval in sorted(ranges, key=lambda interval: interval.start):
        total += max(0.0, interval.end - max(interval.start, until))
        until = max(until, interval.end)
    return total
