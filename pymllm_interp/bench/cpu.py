"""The CPU suite: start-up time, speed of plain decoding beside transformers' own, and what reading layers costs.

All sides of a comparison take turns in one process, so that a busy machine slows each of them. Prompts are random token ids.
Generation is greedy and ignores the end-of-sequence token, so each run generates the same number of tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ..lm import LM
from .common import Prompts, default_path, generate, greedy, random_prompts, timed, write
from .startup import StartResult, measure_start


@dataclass(frozen=True, kw_only=True)
class CpuSettings:
    """What is measured, and how often."""

    batches: tuple[int, ...] = (1, 8, 32)
    """Batch sizes of plain decoding."""
    trace_batches: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (8, 8))
    """(requests, traced requests among them)"""
    prompt_tokens: int = 16
    new_tokens: int = 64
    repeats: int = 3
    """Of start-up, of which the median counts, and of plain decoding, of which the best counts."""
    trace_repeats: int = 7
    """Of traced decoding; the median of the differences counts."""

    @classmethod
    def quick(cls) -> CpuSettings:
        """The smallest sizes."""
        return cls(batches=(1, 2), trace_batches=((2, 1),), prompt_tokens=4, new_tokens=4, repeats=1, trace_repeats=1)


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """New tokens a second of a batch, including prefill."""

    batch: int
    tokens_per_s: float
    transformers_tokens_per_s: float
    runs: list[float]
    transformers_runs: list[float]


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """A decode step that saves the last position of some layers, against a step of the same batch without traces."""

    batch: int
    traced: int
    layers: int
    plain_ms: float
    """Median duration of a step."""
    traced_ms: float
    percent: float
    """Median over the rounds of (traced - plain) / plain."""


def run_cpu(
    model: str, dtype: str, load_format: str, settings: CpuSettings, machine: dict[str, Any], out: Path | None
) -> Path:
    """Measure, print the tables, and write the JSON file; returns its path.

    Args:
        model: what `LM` takes; a folder with a config.json is enough with load_format="dummy".
        machine: see `describe_machine`.
        out: the file; default: `cpu-<model>-<dtype>.json`, see `default_path`.
    """
    console = Console()
    _warn_if_busy(console, machine["load_average_before"])
    console.print(f"Loading {model} ...")
    lm = LM(model, dtype=dtype, device="cpu", load_format=load_format, enable_prefix_caching=False)
    with lm:
        # On the engine's thread: OpenMP workers of a second thread would slow down both sides.
        reference = lm.engine.call(lambda: _transformers_model(lm))
        with Progress(console=console, transient=True) as progress:
            decode = _bench_decode(lm, reference, settings, progress)
            del reference
            trace = _bench_traces(lm, settings, progress)
        name, dtype_name = lm.backend.facts.name, str(lm.dtype).removeprefix("torch.")
    start = measure_start(model, dtype, load_format, settings.repeats)
    console.print(_start_table(start), _decode_table(decode, name, dtype_name), _trace_table(trace))
    path = out or default_path(f"cpu-{Path(name).name}-{dtype_name}.json")
    record = {
        "suite": "cpu",
        "model": name,
        "dtype": dtype_name,
        "load_format": load_format,
        "settings": asdict(settings),
        "machine": machine,
        "start": asdict(start),
        "decode": [asdict(result) for result in decode],
        "trace": [asdict(result) for result in trace],
    }
    write(record, path)
    console.print(f"Written: {path}")
    return path


# -- plain decoding -----------------------------------------------------------------------


def _bench_decode(lm: LM, reference: Any, settings: CpuSettings, progress: Progress) -> list[DecodeResult]:
    task = progress.add_task("plain decoding", total=len(settings.batches) * settings.repeats)
    results = []
    for batch in settings.batches:
        prompts = random_prompts(lm, batch, settings.prompt_tokens)
        sides = [
            lambda n, p=prompts: generate(lm, p, n),
            lambda n, p=prompts: lm.engine.call(lambda: reference_generate(reference, p, n)),
        ]
        for side in sides:
            side(min(4, settings.new_tokens))  # warm
        runs: list[list[float]] = [[], []]
        for _ in range(settings.repeats):
            for side, times in zip(sides, runs, strict=True):
                times.append(timed(lambda side=side: side(settings.new_tokens)))
            progress.advance(task)
        tokens = batch * settings.new_tokens
        results.append(
            DecodeResult(
                batch=batch,
                tokens_per_s=tokens / min(runs[0]),
                transformers_tokens_per_s=tokens / min(runs[1]),
                runs=[tokens / seconds for seconds in runs[0]],
                transformers_runs=[tokens / seconds for seconds in runs[1]],
            )
        )
    return results


@torch.inference_mode()
def reference_generate(model: Any, prompts: Prompts, new_tokens: int) -> None:
    """`generate` by transformers."""
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


# -- traces -----------------------------------------------------------------------------------


def _bench_traces(lm: LM, settings: CpuSettings, progress: Progress) -> list[TraceResult]:
    total = len(settings.trace_batches) * settings.trace_repeats
    task = progress.add_task("traced decoding", total=total)
    depth = len(lm.model.layers)
    selections = [[depth // 2], list(range(depth))]
    results = []
    for batch, traced in settings.trace_batches:
        prompts = random_prompts(lm, batch, settings.prompt_tokens)
        sides: list[Callable[[], None]] = [lambda p=prompts: generate(lm, p, settings.new_tokens)]
        for layers in selections:
            sides.append(lambda p=prompts, t=traced, ls=layers: generate_traced(lm, p, t, ls, settings.new_tokens))
        for side in sides:
            side()  # warm
        rounds = []
        for i in range(settings.trace_repeats):
            order = range(len(sides)) if i % 2 == 0 else reversed(range(len(sides)))
            times = {side: timed(sides[side]) * 1000 / settings.new_tokens for side in order}
            rounds.append([times[side] for side in range(len(sides))])
            progress.advance(task)
        for side, layers in enumerate(selections, start=1):
            results.append(
                TraceResult(
                    batch=batch,
                    traced=traced,
                    layers=len(layers),
                    plain_ms=statistics.median(times[0] for times in rounds),
                    traced_ms=statistics.median(times[side] for times in rounds),
                    percent=100 * statistics.median((times[side] - times[0]) / times[0] for times in rounds),
                )
            )
    return results


def generate_traced(
    lm: LM, prompts: Prompts, traced: int, layers: list[int], new_tokens: int, edits: bool = False
) -> None:
    """`generate`, with the last position of `layers` saved, or edited, in the first `traced` requests at each step."""
    handles = [lm.submit(prompt, greedy(new_tokens)) for prompt in prompts[traced:]]
    with lm.generate(max_new_tokens=new_tokens, ignore_eos=True) as tracer:
        for prompt in prompts[:traced]:
            with tracer.invoke(prompt):
                kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
                for _ in tracer.iter[:]:
                    for layer in layers:
                        if edits:
                            lm.model.layers[layer].output[0, -1] += 1e-3
                        else:
                            kept.append(lm.model.layers[layer].output[0, -1])
    assert all(receipt.reads == len(layers) * new_tokens for receipt in tracer.receipts)
    for handle in handles:
        assert len(handle.result().token_ids) == new_tokens


# -- the rest -----------------------------------------------------------------------------------


def _warn_if_busy(console: Console, load: list[float]) -> None:
    console.print(f"Load average before: {load[0]:.2f} (1 minute), {load[1]:.2f} (5 minutes)")
    if load[0] > 0.5:
        console.print("[yellow]The machine is busy; these numbers will not mean much.[/]")


def _start_table(start: StartResult) -> Table:
    table = Table(title="Start-up in a fresh process: seconds", title_justify="left")
    for column in ("import pymllm_interp", "pymllm_interp.LM", "LM(model)"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{seconds:.2f}" for seconds in (start.import_s, start.import_lm_s, start.start_s)))
    return table


def _decode_table(results: list[DecodeResult], model: str, dtype: str) -> Table:
    table = Table(title=f"Plain decoding, {model}, {dtype}: new tokens a second", title_justify="left")
    for column in ("batch", "pymllm-interp", "transformers", "ratio"):
        table.add_column(column, justify="right")
    for result in results:
        ours, theirs = result.tokens_per_s, result.transformers_tokens_per_s
        table.add_row(str(result.batch), f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}")
    return table


def _trace_table(results: list[TraceResult]) -> Table:
    table = Table(title="Reading layers: milliseconds a step", title_justify="left")
    for column in ("batch", "traced", "layers read", "plain", "traced", "cost"):
        table.add_column(column, justify="right")
    for r in results:
        cells = f"{r.plain_ms:.2f}", f"{r.traced_ms:.2f}", f"{r.percent:+.1f} %"
        table.add_row(str(r.batch), str(r.traced), str(r.layers), *cells)
    return table
