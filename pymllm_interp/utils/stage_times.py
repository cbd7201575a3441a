"""Time of captured steps by stage, for benchmarks. Off unless the environment sets `VARIABLE`."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

VARIABLE = "PYMLLM_INTERP_STAGES"
"""Environment variable; "1" measures stages in processes started with it."""


class StageTimes:
    """Totals of each stage of this process. Thread-safe.

    A stage has calls, seconds, CPU seconds and page faults of the calling thread, and bytes. Seconds without CPU seconds are spent
    waiting: for the GIL, a lock or the device.

    Args:
        on: measure. Otherwise `of` does nothing. None: as the environment says when it is first asked.
    """

    def __init__(self, on: bool | None = None) -> None:
        self._told = on
        self._totals: dict[str, list[float]] = {}
        self._lock = threading.RLock()  # a collection, which is a stage, may begin inside of `add`
        self._since = time.perf_counter(), time.process_time(), _faults(of_process=True)
        self._collecting: _Measured | None = None

    @cached_property
    def on(self) -> bool:
        """Whether it measures. Collections of the process are then a stage, if the environment says so."""
        if self._told is not None:
            return self._told
        if found := os.environ.get(VARIABLE) == "1":
            gc.callbacks.append(self.collects)
        return found

    def of(self, name: str, nbytes: int = 0) -> AbstractContextManager[Any]:
        """Measures a block of code as a call of a stage. Stages may be nested: each has its own totals."""
        return _Measured(self, name, nbytes) if self.on else _NOTHING

    def add(self, name: str, seconds: float, cpu: float = 0.0, faults: int = 0, nbytes: int = 0) -> None:
        """Add a call to a stage."""
        if self.on:
            with self._lock:
                totals = self._totals.setdefault(name, [0, 0.0, 0.0, 0, 0])
                for i, value in enumerate((1, seconds, cpu, faults, nbytes)):
                    totals[i] += value

    def taken(self) -> dict[str, dict[str, float]]:
        """The totals by stage since the last call, for all threads of the process. Zeros are omitted."""
        now = time.perf_counter(), time.process_time(), _faults(of_process=True)
        with self._lock:
            totals, self._totals = self._totals, {}
            since, self._since = self._since, now
        if self.on:
            totals["process: all threads"] = [1, *(a - b for a, b in zip(now, since, strict=True)), 0]
        names = "calls", "seconds", "cpu", "faults", "bytes"
        return {
            stage: {name: round(value, 6) for name, value in zip(names, own, strict=True) if value}
            for stage, own in sorted(totals.items())
        }

    def collects(self, phase: str, _: object) -> None:
        """A callback of `gc`: collections are a stage."""
        if phase == "start":
            begun = _Measured(self, "process: garbage collection", 0)
            begun.__enter__()
            self._collecting = begun
        elif self._collecting is not None:
            self._collecting.__exit__()
            self._collecting = None


class _Measured:
    def __init__(self, times: StageTimes, name: str, nbytes: int) -> None:
        self._times, self._name, self._bytes = times, name, nbytes

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.thread_time(), _faults()

    def __exit__(self, *error: object) -> None:
        wall, cpu, faults = self._start
        took = time.perf_counter() - wall, time.thread_time() - cpu, _faults() - faults
        self._times.add(self._name, *took, self._bytes)


def _faults(of_process: bool = False) -> int:
    """Page faults of this thread so far, if the system counts them."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF if of_process else resource.RUSAGE_THREAD).ru_minflt


_NOTHING = nullcontext()
TIMES = StageTimes()
"""Stage times of this process."""
