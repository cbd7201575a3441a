"""The suites. "decode": plain serving, on a CPU beside transformers. "hooks": one request reads layers beside plain ones.

Everything goes through `LM`, including scheduler, sampler and detokenizer. Prompts are random token ids. Generation is greedy and
ignores the end-of-sequence token. A decode step takes ``(t(all new tokens) - t(1)) / (new tokens - 1)``, medians of all runs.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ..client.handle import RequestHandle
from ..config import EngineTuning
from ..lm import LM
from ..runner.interp_model_runner import InterpModelRunner
from .common import WARM_TOKENS, Prompts, generate, greedy, in_turns, random_prompts

PREFILL_PROMPTS = PREFILL_TIMES = 16
"""Number of prompts for prefill, and how many times longer they are than for decoding."""
MODES: dict[str, dict[str, Any]] = {
    "no graphs": {"disable_cuda_graph": True},
    **{how: {"tuning": EngineTuning(hook_execution=how)} for how in ("split", "eager", "auto")},
}
"""Engines of the hooks suite, and the options that they are loaded with."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Sizes and repetitions of a benchmark."""

    batches: tuple[int, ...] = (1, 32, 256)
    prompt_tokens: int = 128
    new_tokens: int = 256
    repeats: int = 3

    @classmethod
    def of(cls, on_cuda: bool, quick: bool = False, **given: Any) -> BenchSettings:
        """The sizes for a device, or the smallest ones, replaced by given ones."""
        found = cls() if on_cuda else cls(batches=(1, 8, 32), prompt_tokens=16, new_tokens=64)
        return replace(cls(batches=(1, 2), prompt_tokens=4, new_tokens=8, repeats=1) if quick else found, **given)

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
        return max(self.prompt_tokens + self.new_tokens, self.prefill_tokens) + WARM_TOKENS

    @property
    def kv_tokens(self) -> int:
        """Slots for all requests of any measurement, with a margin for partly used pages."""
        decode = max(self.batches) * (self.prompt_tokens + self.new_tokens + WARM_TOKENS)
        return 256 + max(decode, PREFILL_PROMPTS * (self.prefill_tokens + 1)) // 8 * 9


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to measure, and how `LM` loads it."""

    model: str
    dtype: str
    device: str
    load_format: str
    settings: BenchSettings

    def load(self, **options: Any) -> LM:
        """An engine that is large enough for the measurements."""
        settings = self.settings
        return LM(
            self.model, dtype=self.dtype, device=self.device, load_format=self.load_format, max_model_len=settings.longest,
            max_running_requests=max(*settings.batches, PREFILL_PROMPTS), kv_cache_tokens=settings.kv_tokens,
            **{"enable_prefix_caching": False, **options},  # prompts are repeated
        )  # fmt: skip


def records(suite: str, model: Model, machine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record of a run as it grows.

    Args:
        suite: "decode", "hooks", or "all".
        machine: see `describe_machine`.
    """
    record = {"suite": suite, "load_format": model.load_format, "settings": asdict(model.settings)}
    record |= {"machine": machine, "hooks": []}
    if suite in ("decode", "all"):
        record |= alone(decode_suite, model)
        yield record
    for mode in MODES if suite in ("hooks", "all") else ():
        found = alone(hooks_suite, model, mode)
        record["hooks"] += found.pop("rows")
        record |= found
        yield record


def alone(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The result of `measure`. Then the memory of its engine is released for the next one."""
    found = measure(*args)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def facts(lm: LM) -> dict[str, Any]:
    """Name, dtype and device of the model."""
    known = lm.backend.facts
    return {"model": known.name, "dtype": str(known.dtype).removeprefix("torch."), "device": known.device}


def decode_suite(model: Model) -> dict[str, Any]:
    """Start-up, decoding at each batch size, and prefill."""
    started = time.perf_counter()
    with model.load() as lm:
        start_s, settings = time.perf_counter() - started, model.settings
        # On the engine's thread: OpenMP workers of a second thread would slow down both sides.
        beside = None if lm.backend.facts.device.startswith("cuda") else lm.engine.call(lambda: _transformers_model(lm))
        return facts(lm) | {
            "start_s": start_s,
            **lm.backend.run(DescribeGraphs()),
            "decode": [measure_decode(lm, batch, settings, beside) for batch in settings.batches],
            "prefill": measure_prefill(lm, settings),
            "execution": lm.engine.stats()["execution"],
        }


def measure_decode(lm: LM, batch: int, settings: BenchSettings, beside: Any = None) -> dict[str, Any]:
    """A decode step, the replay of its graph without the rest of the step, and end-to-end tokens a second.

    Args:
        beside: transformers' model, which takes turns.
    """
    prompts, new_tokens = random_prompts(lm, batch, settings.prompt_tokens), settings.new_tokens
    runs: list[Callable[[int], object]] = [partial(generate, lm, prompts)]
    if beside is not None:
        runs.append(lambda n: lm.engine.call(lambda: reference_generate(beside, prompts, n)))
    ours, *theirs = in_turns(runs, (1, new_tokens), settings.repeats)
    found = {
        "batch": batch,
        "decode_ms": (ours[new_tokens] - ours[1]) / (new_tokens - 1) * 1e3,
        "graph_ms": lm.backend.run(ReplayGraph(batch)),
        "tokens_per_s": batch * new_tokens / ours[new_tokens],
        "first_token_ms": ours[1] * 1e3,
    }
    if theirs:
        found["transformers_tokens_per_s"] = batch * new_tokens / theirs[0][new_tokens]
    return found


@torch.inference_mode()
def reference_generate(model: Any, prompts: Prompts, new_tokens: int) -> None:
    """Generate with transformers."""
    ids = torch.tensor(prompts)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
    assert out.shape[1] == ids.shape[1] + new_tokens


def _transformers_model(lm: LM) -> Any:
    """The model in transformers' own class, with the same weights; random ones for dummy weights."""
    folder = lm.backend.facts.folder
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if folder is None:
        return AutoModelForCausalLM.from_config(lm.hf_config, dtype=lm.dtype).eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=lm.dtype, local_files_only=True).eval()


def measure_prefill(lm: LM, settings: BenchSettings) -> dict[str, Any]:
    """Prompt tokens a second. Each prompt generates one token."""
    prompts = random_prompts(lm, PREFILL_PROMPTS, settings.prefill_tokens)
    (seconds,) = in_turns([partial(generate, lm, prompts)], (1,), settings.repeats)
    return {
        "batch": PREFILL_PROMPTS,
        "prompt_tokens": settings.prefill_tokens,
        "tokens_per_s": PREFILL_PROMPTS * settings.prefill_tokens / seconds[1],
    }


@dataclass(frozen=True)
class DescribeGraphs:
    """Read the captures of decode steps."""

    def run(self, runner: InterpModelRunner) -> dict[str, Any]:
        """Number and size of the graphs, and the attention backend."""
        captured = runner.graph_runner
        return {
            "graphs": len(captured.graphs) if captured else 0,
            "graphs_mib": captured.memory_usage / 2**20 if captured else 0.0,
            "attention": type(runner.attn_backend).__name__,
        }


@dataclass(frozen=True)
class ReplayGraph:
    """Replay the graph of a batch size, with the inputs of its last step."""

    batch: int
    repeats: int = 20

    def run(self, runner: InterpModelRunner) -> float | None:
        """Milliseconds of one replay; None without graphs."""
        captured = runner.graph_runner
        return captured and replay_ms(captured.graphs[captured.padded_size(self.batch)], self.repeats)


def replay_ms(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """GPU milliseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def hooks_suite(model: Model, mode: str) -> dict[str, Any]:
    """Steps of one of the engines in `MODES`: plain ones, and with one request that reads layers. They take turns."""
    with model.load(lower_traces="off", **MODES[mode]) as lm:  # lowered blocks read nothing in the step
        one, every, count = [lm.num_layers // 2], list(range(lm.num_layers)), model.settings.new_tokens
        selections: dict[str, list[list[int]]] = {
            "no graphs": [[]], "split": [one], "eager": [one, every], "auto": [[], one, every],
        }  # fmt: skip
        rows = []
        for batch in model.settings.batches:
            prompts = random_prompts(lm, batch, model.settings.prompt_tokens)
            runs = [partial(generate_reading, lm, layers, prompts) for layers in selections[mode]]
            times = in_turns(runs, (1, count), model.settings.repeats)
            for run, layers, seconds in zip(runs, selections[mode], times, strict=True):
                before, ms = Counter(lm.engine.stats()["execution"]), (seconds[count] - seconds[1]) / (count - 1) * 1e3
                run(min(WARM_TOKENS, count))
                row = {
                    "way": mode,
                    "batch": batch,
                    "layers": len(layers),
                    "ms": ms,
                    "plain_tokens_per_s": (batch - 1) / ms * 1e3,
                }
                rows.append(row | {"execution": dict(Counter(lm.engine.stats()["execution"]) - before)})
        return facts(lm) | {"rows": rows}


def generate_reading(lm: LM, layers: list[int], prompts: Prompts, new_tokens: int) -> None:
    """`generate`, with the last position of `layers` saved at each step of the first request, which is a step ahead."""
    if not layers:
        return generate(lm, prompts, new_tokens)
    handles: list[RequestHandle] = []
    with lm.generate(prompts[0], max_new_tokens=new_tokens + 1, ignore_eos=True) as tracer:
        kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[:]:
            for layer in layers:
                kept.append(lm.model.layers[layer].output[0, -1])
            if not handles:
                handles += [lm.submit(prompt, greedy(new_tokens)) for prompt in prompts[1:]]
    assert tracer.receipt.reads == len(layers) * (new_tokens + 1)
    for handle in handles:
        assert len(handle.result().token_ids) == new_tokens
