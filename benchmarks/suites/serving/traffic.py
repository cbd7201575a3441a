"""Latencies and throughput of a workload, on any engine: `measure`.

Requests are sent at their arrival times, whatever has ended by then. Each token gets the time at which the engine's caller sees it.
Generation is greedy and ignores the end-of-sequence token, so each run generates the same number of tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from .workloads import Workload


@dataclass
class TokenStream:
    """A request of a run, and the times at which its tokens arrived."""

    index: int
    """In the workload."""
    prompt: list[int]
    new_tokens: int
    due: float
    """When it should be sent, as `time.perf_counter` counts."""
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """Of its tokens, as `time.perf_counter` counts; the engine appends them."""
    traced: bool = False
    """A traced request does not stream: its tokens arrive together, at its end. The engine sets it."""


class ServingEngine(Protocol):
    """What `measure` needs of an engine. It is called from one thread."""

    name: str
    vocab_size: int
    max_model_len: int

    def submit(self, streams: Sequence[TokenStream]) -> None:
        """Start requests. Their tokens are greedy, and their times are appended as they arrive."""
        ...

    def serve(self, until: float | None) -> None:
        """Serve until a time of `time.perf_counter`; None: until all requests have ended.

        Raises:
            RuntimeError: a request failed.
        """
        ...

    def execution(self) -> Mapping[str, int]:
        """Steps so far, by how they ran; empty where the engine does not tell."""
        ...


class Percentiles(NamedTuple):
    """Of a latency, in milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """Percentiles with linear interpolation; NaN without values."""
        values = np.fromiter(seconds, dtype=np.float64)
        return cls(*(np.percentile(values, [50, 90, 99]) * 1e3).tolist()) if len(values) else cls(*[np.nan] * 3)


@dataclass(frozen=True, kw_only=True)
class ServingResult:
    """A workload on an engine. Latencies are measured on the requests that are neither traced nor in the background."""

    requests: int
    traced: int
    """How many of the requests are traced."""
    prompt_tokens: int
    new_tokens: int
    seconds: float
    """From the start to the last token."""
    tokens_per_s: float
    """New tokens of all requests, over `seconds`."""
    ttft_ms: Percentiles
    """Time to the first token, from the time at which the request was due."""
    itl_ms: Percentiles
    """Inter-token latency: all gaps between consecutive tokens of a request."""
    e2e_ms: Percentiles
    """Time to the last token, from the time at which the request was due."""
    late_ms: Percentiles
    """How late requests were sent: part of their latencies."""
    execution: Mapping[str, int]
    """Steps of this run, by how they ran."""

    @classmethod
    def of(
        cls, streams: Sequence[TokenStream], started: float, execution: Mapping[str, int], background: int = 0
    ) -> ServingResult:
        """The result of a run that began at `started`, with the last `background` streams in the background."""
        plain = [stream for stream in streams[: len(streams) - background] if not stream.traced]
        seconds = max(stream.times[-1] for stream in streams) - started
        new_tokens = sum(len(stream.times) for stream in streams)
        return cls(
            requests=len(streams),
            traced=sum(stream.traced for stream in streams),
            prompt_tokens=sum(len(stream.prompt) for stream in streams),
            new_tokens=new_tokens,
            seconds=seconds,
            tokens_per_s=new_tokens / seconds,
            ttft_ms=Percentiles.of(stream.times[0] - stream.due for stream in plain),
            itl_ms=Percentiles.of(gap for stream in plain for gap in np.diff(stream.times)),
            e2e_ms=Percentiles.of(stream.times[-1] - stream.due for stream in plain),
            late_ms=Percentiles.of(stream.sent - stream.due for stream in streams),
            execution=execution,
        )

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: value._asdict() if isinstance(value, Percentiles) else value for name, value in vars(self).items()
        }


def measure(engine: ServingEngine, workload: Workload) -> ServingResult:
    """Run a workload.

    Raises:
        RuntimeError: a request failed, or generated another number of tokens than it was asked for.
    """
    return run(engine, workload)[1]


def run(engine: ServingEngine, workload: Workload) -> tuple[list[TokenStream], ServingResult]:
    """`measure`, with the times of all tokens: (the requests, in their order; the result)."""
    before, started = Counter(engine.execution()), time.perf_counter()
    asked = zip(workload.prompts, workload.new_tokens, workload.arrivals, strict=True)
    streams = [TokenStream(i, prompt, new, started + arrival) for i, (prompt, new, arrival) in enumerate(asked)]
    for due, group in groupby(streams, key=lambda stream: stream.due):
        engine.serve(due)
        together, now = list(group), time.perf_counter()
        for stream in together:
            stream.sent = now
        engine.submit(together)
    engine.serve(None)
    for stream in streams:
        if (count := len(stream.times)) != stream.new_tokens:
            what = f"{engine.name}, {workload.name}: request {stream.index}"
            raise RuntimeError(f"{what} has {count} tokens of {stream.new_tokens}")
    execution = dict(Counter(engine.execution()) - before)
    return streams, ServingResult.of(streams, started, execution, workload.background)
