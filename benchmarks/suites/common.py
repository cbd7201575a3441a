"""What the suites share: paired measurements of decode steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from pymllm_interp import LM, Steer
from pymllm_interp.bench.common import WARM_TOKENS, Prompts, greedy, timed
from pymllm_interp.client.handle import RequestHandle
from pymllm_interp.runner.interp_model_runner import InterpModelRunner

MARGIN = 8
"""Steps before and after the steps that `steady_ms` measures."""
POLL_S = 2e-3
PAIRS = 5
"""Of `against_plain`."""


def one_site(lm: LM) -> Steer:
    """A small vector at the output of the middle layer."""
    vector = torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(0))
    return Steer(f"resid_post.{lm.num_layers // 2}", vector / vector.norm(), 0.1)


def eighths(depth: int) -> list[int]:
    """Eight layers of a model of `depth` layers, evenly spaced; fewer where it has fewer."""
    return sorted({depth * i // 8 for i in range(8)})


def compare(plain: Callable[[int], None], given: Callable[[int], None], new_tokens: int, pairs: int) -> dict[str, Any]:
    """Duration of a decode step of `given` against one of `plain`. Both are called with a number of new tokens.

    A step takes ``(t(all new tokens) - t(1)) / (new tokens - 1)``. It includes all work for each saved value, until the caller has
    it. Work that is done once for each request is excluded. The two sides take turns on one engine.
    """
    runs = (plain, given)
    for run in runs:
        # Graphs are captured in the warm-up, once all rows decode together.
        run(min(WARM_TOKENS, new_tokens))
    first = [statistics.median(timed(lambda run=run: run(1)) for _ in range(3)) for run in runs]

    def step_ms(i: int) -> float:
        return (timed(lambda: runs[i](new_tokens)) - first[i]) / (new_tokens - 1) * 1e3

    return summary([(step_ms(0), step_ms(1)) for _ in range(pairs)])


@dataclass(frozen=True)
class CapturesArrive:
    """Note when the captures of the steps so far have arrived on the host."""

    def run(self, runner: InterpModelRunner) -> Future[float]:
        """The time, by `time.perf_counter`."""
        arrived: Future[float] = Future()

        def stamp() -> None:
            arrived.set_result(time.perf_counter())

        if runner.capture_ring is None:
            stamp()
        else:
            runner.capture_ring.after(stamp)
        return arrived


def steady_ms(lm: LM, submit: Callable[[int], list[RequestHandle]], new_tokens: int) -> float:
    """Milliseconds of a step while all requests decode. Work that is done once for each request is excluded.

    If requests capture states, a step takes at least as long as its states need to arrive in the results.

    Args:
        submit: called on the engine's thread with a number of new tokens; returns the handles in order of submission.
        new_tokens: number of measured steps; some more tokens are generated before and after.
    """
    engine = lm.engine

    def mark() -> tuple[int, float, Future[float]]:
        """(steps launched, time now, time at which the captures of these steps have arrived)."""
        return engine.num_steps, time.perf_counter(), lm.backend.run(CapturesArrive())

    handles: list[RequestHandle] = engine.call(lambda: submit(new_tokens + 2 * MARGIN))
    first, last = handles[0].requests[0], handles[-1].requests[0]
    while len(last.output_token_ids) < MARGIN:
        time.sleep(POLL_S)
    before, launched, arrived = engine.call(mark)
    while len(first.output_token_ids) < MARGIN + new_tokens and not handles[0].done:
        time.sleep(POLL_S)
    after, last_launched, last_arrived = engine.call(mark)
    for handle in handles:
        handle.result()
    seconds = max(last_launched - launched, last_arrived.result() - arrived.result())
    return seconds / (after - before) * 1e3


def against_plain(
    lm: LM,
    prompts: Prompts,
    declared: Sequence[dict[str, Any]],
    new_tokens: int,
    plain: Sequence[dict[str, Any]] | None = None,
    pairs: int = PAIRS,
) -> dict[str, Any]:
    """Steps of requests against plain ones, in turns. Every second pair begins with the other side.

    Args:
        declared: arguments of `LM.submit` for each prompt.
        plain: arguments for the plain requests; None: no arguments.
        pairs: how often each side is measured.
    """

    def step_ms(given: Sequence[dict[str, Any]]) -> float:
        def submit(count: int) -> list[RequestHandle]:
            own = zip(prompts, given, strict=True)
            return [lm.submit(prompt, greedy(count), **arguments) for prompt, arguments in own]

        return steady_ms(lm, submit, new_tokens)

    step_ms(declared)  # warm-up: compiles, and captures graphs
    others = [{}] * len(prompts) if plain is None else plain
    found: list[tuple[float, float]] = []
    for i in range(pairs):
        if i % 2:
            ms = step_ms(declared)
            found.append((step_ms(others), ms))
        else:
            found.append((step_ms(others), step_ms(declared)))
    return summary(found)


def summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of the pairs (ms of plain, ms of the other side) and of their ratios; lowest and highest ratio."""
    ratios = [other / plain for plain, other in pairs]
    return {
        "plain_ms": statistics.median(plain for plain, _ in pairs),
        "ms": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }
