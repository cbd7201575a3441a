"""What the suffix wavefront saves: patch sweeps as one growing pass, and the same cells as requests.

Usage: python benchmarks/toolkit.py [--model demo] [--dtype float32] [--sizes 8:1 24:1 48:6] [--rounds 2] [--out FILE]

Both ways run in turns in one process. Requests use the prefix cache, as they do by default; rows without it say so. The prompts
differ from the first token on, so that every cell is run. Where the device is a CPU, the table shows the process's CPU time, since
other processes may use the machine; the record has both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pymllm_interp import LM
from pymllm_interp.bench import describe_machine


def gap(logits: torch.Tensor) -> torch.Tensor:
    """A logit difference."""
    return logits[:, 100] - logits[:, 200]


def prompts(lm: LM, count: int) -> list[list[int]]:
    """A base and a source prompt that differ everywhere."""
    rng = random.Random(count)
    return [[rng.randrange(lm.limits.vocab_size) for _ in range(count)] for _ in range(2)]


def measure(lm: LM, count: int, step: int, rounds: int) -> dict[str, Any]:
    """Seconds of each way, and how far their values are apart."""
    base, source = prompts(lm, count)
    positions = list(range(0, count, step))
    seconds: dict[str, list[float]] = {"wavefront": [], "requests": []}
    busy: dict[str, list[float]] = {"wavefront": [], "requests": []}
    values, floor, cells = {}, 0.0, 0
    lm.patch_sweep(base, source, metric=gap, positions=positions[:1], layers=[0])  # warm
    for _ in range(rounds):
        for how in seconds:
            lm.reset_prefix_cache()
            started, began = time.perf_counter(), time.process_time()
            sweep = lm.patch_sweep(base, source, metric=gap, positions=positions, how=how, progress=False)
            seconds[how].append(time.perf_counter() - started)
            busy[how].append(time.process_time() - began)
            values[how], floor, cells = sweep.values, max(floor, sweep.noise_floor), len(sweep)
    found: dict[str, Any] = {"tokens": count, "positions": len(positions), "cells": cells}
    for how in seconds:
        found[f"{how}_s"] = statistics.median(seconds[how])
        found[f"{how}_cpu_s"] = statistics.median(busy[how])
    found["ratio"] = found["wavefront_s"] / found["requests_s"]
    found["cpu_ratio"] = found["wavefront_cpu_s"] / found["requests_cpu_s"]
    found["largest_difference"] = (values["wavefront"] - values["requests"]).abs().max().item()
    found["noise_floor"] = floor
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument(
        "--sizes", nargs="+", default=["8:1", "24:1", "48:6"], help="tokens:step of the prompts and positions"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = [tuple(map(int, size.split(":"))) for size in args.sizes]
    record: dict[str, Any] = {
        "machine": describe_machine(), "model": args.model, "dtype": args.dtype, "site": "resid_post", "rounds": args.rounds
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for cached in (True, False):
        with LM(args.model, dtype=args.dtype, load_format=args.load_format, enable_prefix_caching=cached) as lm:
            record["engine"] = lm.backend.facts.engine_name
            for count, step in sizes if cached else sizes[len(sizes) // 2 :][:1]:
                rows.append({"prefix_cache": cached, **measure(lm, count, step, args.rounds)})
    record["sweeps"] = rows
    on_cpu = not torch.cuda.is_available()
    unit = "cpu_s" if on_cpu else "s"
    table = Table(title=f"patch sweep, {args.model}, {'CPU ' if on_cpu else ''}seconds")
    for name in ("tokens", "cells", "prefix cache", "wavefront", "requests", "ratio", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["tokens"]), str(row["cells"]), "on" if row["prefix_cache"] else "off", f"{row[f'wavefront_{unit}']:.2f}",
            f"{row[f'requests_{unit}']:.2f}", f"{row['cpu_ratio' if on_cpu else 'ratio']:.2f}", f"{row['largest_difference']:.1e}",
        )  # fmt: skip
    Console().print(table)
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
