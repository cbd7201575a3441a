"""What the suites share: prompts, timing, and the description of the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..client.handle import RequestHandle
from ..core.sampling_params import SamplingParams
from ..doctor import cpu_model, installed_version
from ..hooks.interventions.specs import Steer
from ..lm import LM
from ..runner.interp_model_runner import InterpModelRunner

Prompts = list[list[int]]
RESULTS = Path("benchmarks/results")
WARM_TOKENS = 16
"""New tokens of warm-up runs."""
MARGIN = 8
"""Steps before and after the steps that `steady_ms` measures."""
POLL_S = 2e-3
PAIRS = 5
"""Of `against_plain`."""


def random_prompts(lm: LM, batch: int, tokens: int) -> Prompts:
    """`batch` prompts of seeded random token ids."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(lm.limits.vocab_size, (batch, tokens), generator=generator).tolist()


def greedy(new_tokens: int) -> SamplingParams:
    """Greedy sampling of exactly `new_tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


def one_site(lm: LM) -> Steer:
    """A small vector at the output of the middle layer."""
    vector = torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(0))
    return Steer(f"resid_post.{lm.num_layers // 2}", vector / vector.norm(), 0.1)


def generate(lm: LM, prompts: Prompts, new_tokens: int) -> None:
    """Generate exactly `new_tokens` tokens for each prompt, greedily, in one batch."""
    outputs = lm.generate(prompts, greedy(new_tokens))
    assert all(len(output.token_ids) == new_tokens for output in outputs)


def eighths(depth: int) -> list[int]:
    """Eight layers of a model of `depth` layers, evenly spaced; fewer where it has fewer."""
    return sorted({depth * i // 8 for i in range(8)})


def timed(function: Callable[[], None]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


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


def describe_machine(noted_commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions, load and commit of a measurement.

    Args:
        noted_commit: in place of the checkout's, if these files are a copy.
    """
    found = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_before": list(os.getloadavg()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"pymllm-interp": __version__}
        | {name: installed_version(name) for name in ("torch", "transformers", "nnsight")},
        "commit": noted_commit or commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["versions"] |= {"cuda": torch.version.cuda} | {
            name: installed_version(name) for name in ("triton", "flashinfer-python")
        }
    return found


def commit() -> str | None:
    """The commit of the checkout, with "-dirty" if files were changed; None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def default_path(name: str) -> Path:
    """Default path of a result: in `benchmarks/results` if that folder exists, else in the working directory."""
    return (RESULTS if RESULTS.is_dir() else Path(".")) / name


def write(record: dict[str, Any], path: Path) -> None:
    """Write the record as JSON; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
