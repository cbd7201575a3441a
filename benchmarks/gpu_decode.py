"""Decode and prefill speed on one GPU, through `LM.generate`: scheduler, sampler and all.

Usage: python benchmarks/gpu_decode.py [--config llama8b llama1b] [--out benchmarks/results/gpu-decode.json]
       [--batches 1 32 256] [--eager] [--profile]

Random weights in bfloat16, random prompts of 128 tokens, 256 new ones, greedy. A decode step is
(t(256 new) - t(1 new)) / 255; "graph" is the GPU time of that step's CUDA graph alone, replayed without an engine. Prefill is
16 prompts of 2,048 tokens with one new token each. Times are medians of three, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pymllm_interp import LM, SamplingParams
from pymllm_interp.bench import commit, random_prompts, timed

CONFIGS = Path(__file__).parent / "configs"
PROMPT_TOKENS, NEW_TOKENS, REPEATS = 128, 256, 3
PREFILL_BATCH, PREFILL_TOKENS = 16, 2048


def generate_seconds(lm: LM, prompts: list[list[int]], new_tokens: int, repeats: int = REPEATS) -> float:
    """Median seconds of a generation, all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return statistics.median(timed(lambda: lm.generate(prompts, params)) for _ in range(repeats))


def graph_ms(lm: LM, batch: int, repeats: int = 20) -> float | None:
    """Milliseconds of the GPU for one replay of the batch's graph, over the inputs of its last step."""
    runner = lm.runner.graph_runner
    if runner is None or batch > runner.max_bs:
        return None
    graph = runner.graphs[runner.padded_size(batch)]

    def replays() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    return lm.engine.call(replays)


def profiled(lm: LM, prompts: list[list[int]], new_tokens: int, skip_steps: int, steps: int) -> dict[str, Any]:
    """What the GPU does in some steps of a generation: microseconds a step, by the clock, busy, and by kernel."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    engine, times, marks = lm.engine, [], []

    def mark(function: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        function()
        times.append(time.perf_counter())
        marks.append(engine.num_steps)

    first = engine.num_steps + skip_steps
    handles = lm.engine.call(lambda: [lm.submit(prompt, params) for prompt in prompts])
    while engine.num_steps < first:
        time.sleep(1e-4)
    engine.call(lambda: mark(profiler.start))
    while engine.num_steps < marks[0] + steps and not all(handle.done for handle in handles):
        time.sleep(1e-4)
    engine.call(lambda: mark(profiler.stop))
    for handle in handles:
        handle.result()
    count = marks[1] - marks[0]
    found = [
        {"kernel": event.key[:90], "us": event.self_device_time_total / count, "launches": event.count / count}
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
    found.sort(key=lambda entry: -entry["us"])
    return {
        "steps": count,
        "us": (times[1] - times[0]) / count * 1e6,
        "busy_us": sum(entry["us"] for entry in found),
        "kernels": found[:30],
    }


def measure_decode(lm: LM, batch: int) -> dict[str, Any]:
    """Decode milliseconds a step, and new tokens a second end to end."""
    prompts = random_prompts(lm, batch, PROMPT_TOKENS)
    generate_seconds(lm, prompts, 4, repeats=1)
    first, whole = generate_seconds(lm, prompts, 1), generate_seconds(lm, prompts, NEW_TOKENS)
    return {
        "batch": batch,
        "decode_ms": (whole - first) / (NEW_TOKENS - 1) * 1e3,
        "graph_ms": graph_ms(lm, batch),
        "tokens_per_s": batch * NEW_TOKENS / whole,
        "first_token_ms": first * 1e3,
    }


def measure_prefill(lm: LM) -> dict[str, Any]:
    """Prompt tokens a second."""
    prompts = random_prompts(lm, PREFILL_BATCH, PREFILL_TOKENS)
    generate_seconds(lm, prompts, 1, repeats=1)
    seconds = generate_seconds(lm, prompts, 1)
    return {
        "batch": PREFILL_BATCH,
        "prompt_tokens": PREFILL_TOKENS,
        "tokens_per_s": PREFILL_BATCH * PREFILL_TOKENS / seconds,
    }


def profiles(lm: LM, batches: list[int]) -> dict[str, Any]:
    """Profiles of decode steps at each batch size, and of prefill."""
    found = {
        f"decode {n}": profiled(lm, random_prompts(lm, n, PROMPT_TOKENS), 100, skip_steps=20, steps=20) for n in batches
    }
    prompts = random_prompts(lm, PREFILL_BATCH, PREFILL_TOKENS)
    return found | {"prefill": profiled(lm, prompts, 1, skip_steps=0, steps=4)}


def measure(config: str, batches: list[int], eager: bool, profile: bool) -> dict[str, Any]:
    """All numbers of one model."""
    started = time.perf_counter()
    folder = CONFIGS / config if (CONFIGS / config).is_dir() else Path(config)
    tokens = max(max(batches) * (PROMPT_TOKENS + NEW_TOKENS), PREFILL_BATCH * (PREFILL_TOKENS + 1)) * 11 // 10
    lm = LM(
        folder, load_format="dummy", dtype="bfloat16", device="cuda", max_model_len=4096,
        max_running_requests=max(*batches, PREFILL_BATCH), kv_cache_tokens=tokens // 16 * 16, disable_cuda_graph=eager,
    )  # fmt: skip
    with lm:
        graphs = lm.runner.graph_runner
        result = {
            "config": config,
            "eager": eager,
            "start_s": time.perf_counter() - started,
            "graphs": len(graphs.graphs) if graphs else 0,
            "graphs_mib": graphs.memory_usage / 2**20 if graphs else 0.0,
            "attention": type(lm.runner.attn_backend).__name__,
            "decode": [measure_decode(lm, batch) for batch in batches],
            "prefill": measure_prefill(lm),
            "profile": profiles(lm, batches) if profile else {},
            "execution": lm.engine.stats()["execution"],
        }
    torch.cuda.empty_cache()
    return result | {"total_s": time.perf_counter() - started}


def describe_gpu() -> dict[str, Any]:
    """What a number cannot be read without."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("flashinfer-python", "triton", "transformers", "nnsight"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"gpu": torch.cuda.get_device_name(), "versions": versions, "commit": commit()}


def print_table(results: list[dict[str, Any]]) -> None:
    """Ten lines that say it all."""
    print(f"{'model':<10}{'batch':>6}{'ms/step':>10}{'graph ms':>10}{'tok/s':>10}{'first ms':>10}")
    for result in results:
        for row in result["decode"]:
            graph = "-" if row["graph_ms"] is None else f"{row['graph_ms']:.3f}"
            print(
                f"{result['config']:<10}{row['batch']:>6}{row['decode_ms']:>10.3f}{graph:>10}{row['tokens_per_s']:>10.0f}"
                f"{row['first_token_ms']:>10.1f}"
            )
        print(
            f"{result['config']:<10} prefill {result['prefill']['tokens_per_s']:.0f} tok/s; {result['graphs']} graphs, "
            f"{result['graphs_mib']:.0f} MiB; start {result['start_s']:.0f} s, all {result['total_s']:.0f} s; "
            f"{result['attention']}"
        )
        for what, step in result["profile"].items():
            print(f"  {what}: {step['us']:.0f} us a step, {step['busy_us']:.0f} busy ({step['steps']} steps)")
            for entry in step["kernels"][:18]:
                print(f"    {entry['us']:>9.1f} us {entry['launches']:>6.0f} x  {entry['kernel']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", nargs="+", default=["llama8b", "llama1b"], help="folders in benchmarks/configs, or paths"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="time the kernels of steps")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file to write")
    args = parser.parse_args()
    results = []
    for config in args.config:
        results.append(measure(config, args.batches, args.eager, args.profile))
        if args.out is not None:  # after each model: a later one may fail
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"machine": describe_gpu(), "results": results}, indent=2) + "\n")
    print_table(results)


if __name__ == "__main__":
    main()
