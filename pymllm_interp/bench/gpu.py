"""The suites for one GPU. "decode": plain serving. "hooks": one request reads a layer at every step, the others are plain.

Everything goes through `LM`, including scheduler, sampler and detokenizer. Prompts are random token ids. Generation is greedy and
ignores the end-of-sequence token. Numbers are medians of several runs after a warm-up. The suites run on a CPU, too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from ..client.handle import RequestHandle
from ..lm import LM
from ..runner.interp_model_runner import InterpModelRunner
from .common import Prompts, generate, greedy, random_prompts, timed
from .profile import StepProfile

PREFILL_PROMPTS = PREFILL_TIMES = 16
"""Number of prompts for prefill, and how many times longer they are than for decoding."""
LEAD = 16
"""Additional new tokens of the traced request: the prompts of the plain requests are computed after its own."""
PROFILED_STEPS = 20
WAYS: dict[str, dict[str, Any]] = {
    "no graphs": {"disable_cuda_graph": True},
    "split": {"hook_execution": "split"},
    "eager": {"hook_execution": "eager"},
    "auto": {"hook_execution": "auto"},
}
"""Engines of the hooks suite, and the options that they are loaded with."""


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """What is measured, and how often."""

    batches: tuple[int, ...] = (1, 32, 256)
    prompt_tokens: int = 128
    new_tokens: int = 256
    repeats: int = 3

    @classmethod
    def quick(cls) -> GpuSettings:
        """The smallest sizes."""
        return cls(batches=(1, 2), prompt_tokens=4, new_tokens=8, repeats=1)

    def __post_init__(self) -> None:
        if self.new_tokens < 4:
            raise ValueError(
                f"new_tokens={self.new_tokens}: at least 4 are expected, to have steps between first and last"
            )

    @property
    def prefill_tokens(self) -> int:
        """Tokens of a prompt for prefill."""
        return PREFILL_TIMES * self.prompt_tokens

    @property
    def longest(self) -> int:
        """Upper bound of a request, in tokens."""
        return max(self.prompt_tokens + self.new_tokens + LEAD, self.prefill_tokens + 1)

    @property
    def kv_tokens(self) -> int:
        """Slots for all requests of any measurement, with a margin for partly used pages."""
        decode = max(self.batches) * (self.prompt_tokens + self.new_tokens + LEAD)
        tokens = max(decode, PREFILL_PROMPTS * (self.prefill_tokens + 1))
        return 256 + tokens // 8 * 9


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to measure, and how `LM` loads it."""

    model: str
    dtype: str
    device: str
    load_format: str
    settings: GpuSettings

    def load(self, **options: Any) -> LM:
        """An engine that is large enough for the measurements."""
        settings = self.settings
        return LM(
            self.model, dtype=self.dtype, device=self.device, load_format=self.load_format, max_model_len=settings.longest,
            max_running_requests=max(*settings.batches, PREFILL_PROMPTS), kv_cache_tokens=settings.kv_tokens,
            **{"enable_prefix_caching": False, **options},  # prompts are repeated
        )  # fmt: skip


def records(suite: str, model: Model, machine: dict[str, Any], with_profiles: bool) -> Iterator[dict[str, Any]]:
    """The record of a run as it grows.

    Args:
        suite: "decode", "hooks", or "all".
        machine: see `describe_machine`.
        with_profiles: profile steps, too. Profiles come last: launches are slower in a process in which a profiler ran.
    """
    record = {"suite": suite, "load_format": model.load_format, "settings": asdict(model.settings)}
    record |= {"machine": machine, "hooks": [], "profile": {}}
    ways = WAYS if suite in ("hooks", "all") else {}
    if suite in ("decode", "all"):
        record |= _alone(decode_suite, model)
        yield record
    for way in ways:
        found = _alone(hooks_suite, model, way)
        record["hooks"] += found.pop("rows")
        record |= found
        yield record
    if with_profiles:
        if suite in ("decode", "all"):
            record["profile"] |= _alone(decode_profiles, model)
            yield record
        for way in ways:
            if "hook_execution" in WAYS[way]:
                record["profile"] |= _alone(hooks_profiles, model, way)
                yield record


def _alone(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The result of `measure`. Then the memory of its engine is released for the next one."""
    found = measure(*args)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def facts(lm: LM) -> dict[str, Any]:
    """Model, dtype and device."""
    known = lm.backend.facts
    return {"model": known.name, "dtype": str(known.dtype).removeprefix("torch."), "device": known.device}


# -- plain serving ---------------------------------------------------------------------------------


def decode_suite(model: Model) -> dict[str, Any]:
    """Start-up, decoding at each batch size, and prefill."""
    started = time.perf_counter()
    with model.load() as lm:
        start_s, settings = time.perf_counter() - started, model.settings
        found = facts(lm) | {
            "start_s": start_s,
            **lm.backend.run(DescribeGraphs()),
            "decode": [measure_decode(lm, batch, settings) for batch in settings.batches],
            "prefill": measure_prefill(lm, settings),
            "execution": lm.engine.stats()["execution"],
        }
    return found


def decode_profiles(model: Model) -> dict[str, Any]:
    """Profiles of decode steps at each batch size, and of prefill."""
    with model.load() as lm:
        settings = model.settings
        found = {f"decode {n}": profile_decode(lm, n, settings) for n in settings.batches}
        found["prefill"] = profile_prefill(lm, settings)
    return found


def median_seconds(lm: LM, prompts: Prompts, new_tokens: int, repeats: int) -> float:
    """Median seconds of a generation with all prompts in one batch."""
    return statistics.median(timed(lambda: generate(lm, prompts, new_tokens)) for _ in range(repeats))


def measure_decode(lm: LM, batch: int, settings: GpuSettings) -> dict[str, Any]:
    """A decode step, the replay of its graph without the rest of the step, and end-to-end tokens a second.

    A step takes ``(t(all new tokens) - t(1)) / (new tokens - 1)``.
    """
    prompts, new_tokens = random_prompts(lm, batch, settings.prompt_tokens), settings.new_tokens
    generate(lm, prompts, 4)
    first = median_seconds(lm, prompts, 1, settings.repeats)
    whole = median_seconds(lm, prompts, new_tokens, settings.repeats)
    return {
        "batch": batch,
        "decode_ms": (whole - first) / (new_tokens - 1) * 1e3,
        "graph_ms": graph_ms(lm, batch),
        "tokens_per_s": batch * new_tokens / whole,
        "first_token_ms": first * 1e3,
    }


def graph_ms(lm: LM, batch: int, repeats: int = 20) -> float | None:
    """GPU milliseconds of one replay of the batch's graph, with the inputs of its last step; None without graphs."""
    return lm.backend.run(ReplayGraph(batch, repeats))


@dataclass(frozen=True)
class ReplayGraph:
    """Replay the graph of a batch size."""

    batch: int
    repeats: int

    def run(self, runner: InterpModelRunner) -> float | None:
        """Milliseconds of one replay; None without graphs."""
        captured = runner.graph_runner
        return captured and replay_ms(captured.graphs[captured.padded_size(self.batch)], self.repeats)


@dataclass(frozen=True)
class DescribeGraphs:
    """Read what is captured for decode steps."""

    def run(self, runner: InterpModelRunner) -> dict[str, Any]:
        """Number and size of the graphs, and the attention backend."""
        captured = runner.graph_runner
        return {
            "graphs": len(captured.graphs) if captured else 0,
            "graphs_mib": captured.memory_usage / 2**20 if captured else 0.0,
            "attention": type(runner.attn_backend).__name__,
        }


def replay_ms(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """GPU milliseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def measure_prefill(lm: LM, settings: GpuSettings) -> dict[str, Any]:
    """Prompt tokens a second. Each prompt generates one token."""
    prompts = random_prompts(lm, PREFILL_PROMPTS, settings.prefill_tokens)
    generate(lm, prompts, 1)
    seconds = median_seconds(lm, prompts, 1, settings.repeats)
    return {
        "batch": PREFILL_PROMPTS,
        "prompt_tokens": settings.prefill_tokens,
        "tokens_per_s": PREFILL_PROMPTS * settings.prefill_tokens / seconds,
    }


def profile_decode(lm: LM, batch: int, settings: GpuSettings) -> dict[str, Any]:
    """Profile of some decode steps."""
    profile, engine = StepProfile(lm), lm.engine
    params = greedy(settings.longest - settings.prompt_tokens)
    prompts = random_prompts(lm, batch, settings.prompt_tokens)
    handles: list[RequestHandle] = engine.call(lambda: [lm.submit(prompt, params) for prompt in prompts])
    while not handles[-1].requests[0].output_token_ids:
        time.sleep(1e-3)
    engine.call(profile.start)
    while (profile.steps or 0) < PROFILED_STEPS and not handles[0].done:
        time.sleep(1e-3)
    engine.call(profile.stop)
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle.wait()
    return profile.result()


def profile_prefill(lm: LM, settings: GpuSettings) -> dict[str, Any]:
    """Profile of prefill."""
    profile = StepProfile(lm)
    lm.engine.call(profile.start)
    generate(lm, random_prompts(lm, PREFILL_PROMPTS, settings.prefill_tokens), 1)
    lm.engine.call(profile.stop)
    return profile.result()


# -- one request that reads, beside others ---------------------------------------------------------


def hooks_suite(model: Model, way: str) -> dict[str, Any]:
    """Steps of one of the engines in `WAYS`: plain steps, and steps with one request that reads layers."""
    with model.load(**WAYS[way]) as lm:
        depth, settings = len(lm.model.layers), model.settings
        one, every = [depth // 2], list(range(depth))
        selections: dict[str, list[list[int]]] = {
            "no graphs": [[]], "split": [one], "eager": [one, every], "auto": [[], one, every],
        }  # fmt: skip
        rows = []
        for batch, layers in product(settings.batches, selections[way]):
            before = Counter(lm.engine.stats()["execution"])
            row = measure_reading(lm, batch, layers, settings) if layers else measure_plain(lm, batch, settings)
            steps = Counter(lm.engine.stats()["execution"]) - before
            rows.append({"way": way, "batch": batch, "layers": len(layers), **row, "execution": dict(steps)})
        found = facts(lm) | {"rows": rows}
    return found


def hooks_profiles(model: Model, way: str) -> dict[str, Any]:
    """Profiles of steps in which one request reads one layer."""
    with model.load(**WAYS[way]) as lm:
        one = [len(lm.model.layers) // 2]
        found = {f"{way} {n}": profile_reading(lm, n, one, model.settings) for n in model.settings.batches}
    return found


def measure_plain(lm: LM, batch: int, settings: GpuSettings) -> dict[str, Any]:
    """A step of plain requests. Their tokens a second exclude one request, for comparison with `measure_reading`."""
    ms = measure_decode(lm, batch, settings)["decode_ms"]
    return {"ms": ms, "plain_tokens_per_s": (batch - 1) / ms * 1e3}


class Tick(NamedTuple):
    """A step, as seen by the block of the traced request."""

    seconds: float
    step: int
    """Step count of the engine."""
    running: bool
    """Whether all plain requests decode."""


class TracedWindow:
    """The steps in which one traced request and all plain ones decode together.

    Its methods run in the block of the traced request, on the engine's thread, so there is no race.

    Args:
        prompts: of the plain requests. They are submitted after the traced request has computed its prompt.
    """

    def __init__(self, lm: LM, prompts: Prompts, new_tokens: int, profile: StepProfile | None = None) -> None:
        self._lm, self._prompts, self._new_tokens, self._profile = lm, prompts, new_tokens, profile
        self.handles: list[RequestHandle] = []
        self.ticks: list[Tick] = []

    def tick(self) -> None:
        """Record a step."""
        if not self.ticks:
            self.handles = [self._lm.submit(prompt, greedy(self._new_tokens)) for prompt in self._prompts]
        running = bool(self.ticks) and self._all_decode()
        self.ticks.append(Tick(time.perf_counter(), self._lm.engine.num_steps, running))
        if self._profile is not None and running:
            self._advance_profile(self._profile)

    def _all_decode(self) -> bool:
        """Whether all plain requests decode: the last one has begun, and the first one has not ended."""
        if not self.handles:
            return True
        return bool(self.handles[-1].requests[0].output_token_ids) and not self.handles[0].done

    @staticmethod
    def _advance_profile(profile: StepProfile) -> None:
        if profile.steps is None:
            profile.start()
        elif profile.steps >= PROFILED_STEPS and not profile.stopped:
            profile.stop()

    def result(self) -> dict[str, float]:
        """Milliseconds of a step, and tokens a second of the plain requests, which get one token each in a step.

        Raises:
            ValueError: the window has no step.
        """
        ticks = [tick for tick in self.ticks if tick.running]
        if len(ticks) < 2:
            raise ValueError(
                f"{self._new_tokens} new tokens are too few: no step held all {1 + len(self._prompts)} requests"
            )
        ms = (ticks[-1].seconds - ticks[0].seconds) / (ticks[-1].step - ticks[0].step) * 1e3
        return {"ms": ms, "plain_tokens_per_s": len(self._prompts) / ms * 1e3}


def run_reading(
    lm: LM, prompts: Prompts, layers: list[int], new_tokens: int, profile: StepProfile | None = None
) -> TracedWindow:
    """The first prompt is traced and saves the last position of `layers` at each step; the others are plain requests."""
    window = TracedWindow(lm, prompts[1:], new_tokens, profile)
    with lm.generate(prompts[0], max_new_tokens=new_tokens + LEAD, ignore_eos=True) as tracer:
        kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[:]:
            for layer in layers:
                kept.append(lm.model.layers[layer].output[0, -1])
            window.tick()
    assert tracer.receipt.reads == len(layers) * (new_tokens + LEAD)
    for handle in window.handles:
        assert len(handle.result().token_ids) == new_tokens
    return window


def measure_reading(lm: LM, batch: int, layers: list[int], settings: GpuSettings) -> dict[str, Any]:
    """A step in which one of `batch` requests reads `layers`; medians over the runs."""
    prompts = random_prompts(lm, batch, settings.prompt_tokens)
    run_reading(lm, prompts, layers, min(32, settings.new_tokens))
    runs = [run_reading(lm, prompts, layers, settings.new_tokens).result() for _ in range(settings.repeats)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def profile_reading(lm: LM, batch: int, layers: list[int], settings: GpuSettings) -> dict[str, Any]:
    """Profile of steps in which one of `batch` requests reads `layers`."""
    profile = StepProfile(lm)
    run_reading(lm, random_prompts(lm, batch, settings.prompt_tokens), layers, settings.new_tokens, profile)
    if not profile.stopped:  # there were fewer steps
        lm.engine.call(profile.stop)
    return profile.result()
