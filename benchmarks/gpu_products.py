"""Matrix products of decode steps: torch.mm, cuBLASLt's algorithms, and our Triton tilings, timed in a CUDA graph.

    python benchmarks/gpu_products.py --config benchmarks/configs/llama8b --rows 64 128 256 --out benchmarks/results/NAME.json

Weights rotate, so that none is read from the cache. Prints microseconds of torch.mm, of cuBLASLt's best algorithm that does not
divide K, of its best one with memory for partial sums, of our best tiling, of what kernels/products/fastest.py chooses (and the
seconds that it takes to choose), and the limit: bytes at 4.54 TB/s or operations at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_times import microseconds

from pymllm_interp.kernels.products import fastest, fixed
from pymllm_interp.kernels.products.library import proposals, run

ROWS = (48, 64, 96, 128, 160, 192, 224, 256)
FLOPS, BANDWIDTH = 790e12, 4.54e12
TILINGS = (
    (64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (128, 64, 64, 4, 5), (128, 64, 128, 4, 4), (128, 128, 64, 8, 5), (128, 256, 64, 8, 4),
    (64, 256, 64, 8, 4),
)  # fmt: skip
"""Tried tilings of `fixed`: channels, rows, depth, warps, stages."""
COLUMNS = "mm", "undivided", "divided", "tiling", "chosen"
Call = Callable[[torch.Tensor], Any]
"""A product by a weight."""


def best(calls: Iterable[tuple[Any, Call]], weights: list[torch.Tensor], wanted: torch.Tensor) -> tuple[float, Any]:
    """The least microseconds of products that are right, and which it is. A call returns the product, or None if it is refused."""
    times = []
    for name, call in calls:
        try:
            found = call(weights[0])
            if found is not None and (found.float() - wanted).norm() / wanted.norm() < 1e-2:
                times.append((microseconds([partial(call, weight) for weight in weights], 4), name))
        except (RuntimeError, ValueError) as error:  # such as a tiling with too much shared memory
            print(f"      {name}: {str(error).splitlines()[0][:90]}")
    return min(times, default=(float("nan"), None))


def measured(m: int, name: str, n: int, k: int) -> dict[str, Any]:
    """Microseconds of [m, k] times [k, n]."""
    copies = max(2, min(6, (1 << 30) // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    wanted = x.float() @ weights[0].float().t()

    def by_library(workspace: int) -> Iterable[tuple[Any, Call]]:
        for i, one in enumerate(proposals(0, m, n, k, torch.bfloat16, workspace)):
            label = f"#{i} {'+'.join(map(str, one.code[:2]))}, {one.workspace >> 10} KiB"
            yield label, lambda weight, one=one: out if run(one, x, weight, out) else None

    started = time.perf_counter()
    shape = fastest.Shape(0, n, k, next(most for most in fastest.RANGES if m <= most), torch.bfloat16)
    chosen = fastest.measured(shape, weights[0])
    seconds = time.perf_counter() - started
    tilings = (
        (one, lambda weight, one=one: fixed.product(x, weight, tiling=fixed.ProductTiling(*one))) for one in TILINGS
    )
    calls: dict[str, Iterable[tuple[Any, Call]]] = {
        "mm": [("mm", lambda weight: torch.mm(x, weight.t(), out=out))],
        "undivided": by_library(0),
        "divided": by_library(fastest.WORKSPACE),
        "tiling": tilings if n <= 1 << 15 else [],
        "chosen": [] if chosen is None else [("chosen", lambda weight: out if run(chosen, x, weight, out) else None)],
    }
    found = {column: best(calls[column], weights, wanted) for column in COLUMNS}
    again, _ = best([("mm", lambda weight: torch.mm(x, weight.t(), out=out))], weights, wanted)  # of a warm device
    row: dict[str, Any] = {"m": m, "name": name, "n": n, "k": k, "choice_s": seconds}
    for column, (us, which) in found.items():
        row |= {f"{column}_us": us, f"{column}_is": which}
    row["mm_us"] = min(again, row["mm_us"])
    if chosen is None:
        row["chosen_us"], row["chosen_is"] = row["mm_us"], "mm"
    row["limit_us"] = max(2 * m * n * k / FLOPS, 2 * (n * k + m * (n + k)) / BANDWIDTH) * 1e6
    print(line(row), flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    times = "".join(f"  {column} {row[f'{column}_us']:7.1f}" for column in COLUMNS)
    text = f"{row['m']:5} {row['name']:8}{times}  limit {row['limit_us']:6.1f}  chosen/mm {row['chosen_us'] / row['mm_us']:.3f}"
    labels = [row.get(f"{column}_is") for column in ("divided", "tiling")]
    return f"{text}  {row['choice_s']:.2f} s  {labels}" if "choice_s" in row else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("benchmarks/configs/llama8b"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    config = json.loads((args.config / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    qkv = head * (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    shapes = {
        "qkv": (qkv, hidden),
        "o": (hidden, head * config["num_attention_heads"]),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config["vocab_size"], hidden),
    }
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for m in args.rows:
        rows = [measured(m, name, n, k) for name, (n, k) in shapes.items()]
        record["rows"] += rows
        keys = [f"{column}_us" for column in COLUMNS] + ["limit_us"]
        layer = {key: sum(row[key] for row in rows if row["name"] != "head") for key in keys}
        print(line({"m": m, "name": "layer", **layer}), flush=True)
        if args.out:  # a run may be cut off
            args.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
