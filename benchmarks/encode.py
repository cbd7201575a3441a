"""Embeddings beside plain prefill: the same prompts, by turns in one process.

    python benchmarks/encode.py [--model demo | FOLDER [--load-format dummy]] [--device cpu] [--prompts 256] [--length 512]

Plain prefill generates one token of each prompt. A ratio is the median of the rounds' ratios of seconds to plain prefill.
The aim is 1.05 for "last" and "mean". The prefix cache is off.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pymllm_interp import LM, SamplingParams
from pymllm_interp.bench import describe_machine

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def measure(lm: LM, prompts: list[list[int]], poolings: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds and ratios of plain prefill and of each pooling."""
    kinds: dict[str, Callable[[], Any]] = {"prefill": lambda: lm.generate(prompts, ONE, progress=False)}
    kinds |= {name: lambda name=name: lm.encode(prompts, pooling=name, progress=False) for name in poolings}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name in [*kinds][:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            kinds[name]()
            times[name].append(time.perf_counter() - started)
    tokens = sum(map(len, prompts))
    return {
        name: {
            "seconds": statistics.median(own[1:]),
            "tokens_per_second": tokens / statistics.median(own[1:]),
            "ratio": statistics.median(a / b for a, b in zip(own[1:], times["prefill"][1:], strict=True)),
        }
        for name, own in times.items()
    }


def main() -> None:
    """Measure, print and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, from config.json")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--poolings", nargs="*", default=["last", "mean", "cls", "max"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lm = LM(
        args.model, device=args.device, dtype=args.dtype, load_format=args.load_format, enable_prefix_caching=False,
    )  # fmt: skip
    rng = random.Random(1)
    prompts = [[rng.randrange(lm.vocab_size) for _ in range(args.length)] for _ in range(args.prompts)]
    found = measure(lm, prompts, args.poolings, args.rounds)
    record = {
        "machine": describe_machine(), "model": lm.backend.facts.name, "prompts": args.prompts, "length": args.length,
        "rounds": args.rounds, "kinds": found,
    }  # fmt: skip
    for name, own in found.items():
        print(f"{name:24} {own['seconds']:8.3f} s {own['tokens_per_second']:10.0f} tok/s  x {own['ratio']:.3f}")
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    lm.shutdown()


if __name__ == "__main__":
    main()
