"""Matrix products of decode steps: torch.mm, and the kernels of cuBLASLt that do not divide K, timed in a CUDA graph.

    python benchmarks/gpu_products.py --config benchmarks/configs/llama8b --out benchmarks/results/NAME.json

Weights rotate, so that none is read from the cache. Prints microseconds of torch.mm, of the best proposal, and the limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from pymllm_interp.kernels.products.library import proposals, run

ROWS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
FLOPS, BANDWIDTH = 790e12, 4.54e12


def graph_us(run: Any, weights: list[torch.Tensor], repeats: int) -> float:
    """Median microseconds of a product, from replays of a graph that has one for each weight."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights[:2]:
            run(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for weight in weights:
            run(weight)
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(weights) * 1e3)
    return sorted(times[1:])[repeats // 2]


def measured(m: int, name: str, n: int, k: int) -> dict[str, Any]:
    """Microseconds of [m, k] times [k, n]."""
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(6)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    plain = graph_us(lambda weight: torch.mm(x, weight.t(), out=out), weights, 6)
    expected = torch.mm(x.float(), weights[-1].float().t())
    times = []
    for i, algorithm in enumerate(proposals(0, m, n, k, torch.bfloat16)):
        if not run(algorithm, x, weights[0], out):
            continue
        us = graph_us(lambda weight, one=algorithm: run(one, x, weight, out), weights, 4)
        if (out.float() - expected).norm() / expected.norm() < 1e-2:
            times.append((us, i))
    us, number = min(times)
    limit = max(2 * m * n * k / FLOPS, 2 * n * k / BANDWIDTH) * 1e6
    print(f"{m:5} {name:8} mm {plain:7.1f}  best {us:7.1f} (#{number} of {len(times)})  limit {limit:6.1f}", flush=True)
    return {"m": m, "name": name, "mm_us": plain, "best_us": min(us, plain), "proposal": number, "limit_us": limit}


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
    }
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for m in args.rows:
        rows = [measured(m, name, n, k) for name, (n, k) in shapes.items()]
        record["rows"] += rows
        mm, best, limit = (sum(row[key] for row in rows) for key in ("mm_us", "best_us", "limit_us"))
        print(f"{m:5} layer    mm {mm:7.1f}  best {best:7.1f}  limit {limit:6.1f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
