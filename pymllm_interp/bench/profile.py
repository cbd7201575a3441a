"""Profiles of engine steps, by kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler_util import Interval
from torch.profiler import ProfilerActivity, profile

from ..lm import LM

KERNELS = 30
"""Kernels that are kept, longest first."""


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
        """Microseconds a step: elapsed, busy, and by kernel. Concurrent kernels may add up to more than the busy time.

        Raises:
            RuntimeError: no step ran between start and stop.
        """
        (started, first), (stopped, last) = self._marks
        steps = last - first
        if steps < 1:
            raise RuntimeError("nothing ran while it was profiled: the requests ended before it began")
        time_of = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        found = [
            {"kernel": event.key[:90], "us": getattr(event, time_of) / steps, "launches": event.count / steps}
            for event in self._profiler.key_averages()
            if getattr(event, time_of)
        ]
        found.sort(key=lambda entry: -entry["us"])
        return {
            "steps": steps,
            "us": (stopped - started) / steps * 1e6,
            "busy_us": covered([event.time_range for event in self._profiler.events() or () if getattr(event, time_of)])
            / steps,
            "kernels": found[:KERNELS],
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
