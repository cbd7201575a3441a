"""What monitors cost: decode steps with monitors on every request, by plain steps of the same engine, by turns.

    python benchmarks/monitors.py --out benchmarks/results/NAME.json

A number is milliseconds of a decode step: the difference of a long and a short generation. A ratio is the median over the rounds.
The model has random weights in the shape of Llama 3 8B; --tiny is a small one, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import LARGE, TINY, machine
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.interventions import Monitor, Probe, Steer

SHORT, NEVER = 8, 1e30


def cases(lm: LM) -> dict[str, Callable[[int], list[Monitor]]]:
    """Name -> the monitors of a request, by its number."""
    width, layer = lm.hidden_size, lm.num_layers // 2
    noise = torch.Generator().manual_seed(0)
    rows = torch.randn(256, width, generator=noise) / width**0.5
    site = f"resid_post.{layer}"
    hidden = Probe(rows[:64], activation="relu", out_weight=[1.0] * 64)
    sixteen = [Monitor(site, rows[i], NEVER, name=str(i)) for i in range(16)]
    spread = [Monitor(f"resid_post.{i * lm.num_layers // 16}", rows[i], NEVER, name=str(i)) for i in range(16)]
    one, stop = Monitor(site, rows[0], NEVER), Monitor(site, rows[0], NEVER, then="stop")
    own = [[Monitor(site, row, NEVER)] for row in rows]
    acting = Monitor(site, rows[0], NEVER, then=Steer(site, rows[1]))
    return {
        "plain": lambda i: [],
        "one": lambda i: [one],
        "stop": lambda i: [stop],
        "one each": lambda i: own[i],
        "16 at a site": lambda i: sixteen,
        "16 sites": lambda i: spread,
        "mlp of 64": lambda i: [Monitor(site, hidden, NEVER)],
        "acting": lambda i: [acting],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    size = {"kv_cache_tokens": 81920} if torch.cuda.is_available() else {"kv_cache_tokens": 16384}
    config = LlamaConfig(**(TINY if args.tiny else LARGE))
    lm = LM(
        "dummy", load_format="dummy", hf_config=config, max_running_requests=256, enable_prefix_caching=False, **size
    )
    found, rows = cases(lm), []
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time

    def seconds(monitors: Any, batch: int, tokens: int) -> float:
        prompts = [[1 + (7 * i + 3 * j) % 500 for j in range(64)] for i in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = clock()
        lm.generate(prompts, params, monitors=[monitors(i) for i in range(batch)], progress=False)
        return clock() - began

    for batch in args.batches:
        times: dict[str, list[float]] = {name: [] for name in found}
        for number in range(args.rounds + 1):  # the first one warms up
            for name in list(found)[:: 1 if number % 2 else -1]:
                long, short = (seconds(found[name], batch, tokens) for tokens in (SHORT + args.steps, SHORT))
                if number:
                    times[name].append((long - short) / args.steps * 1e3)
        for name in found:
            ratios = [own / plain for own, plain in zip(times[name], times["plain"], strict=True)]
            row = {
                "case": name,
                "batch": batch,
                "ms": statistics.median(times[name]),
                "ratio": statistics.median(ratios),
            }
            rows.append(row | {"ratios": ratios})
            print(
                f"{name:14} {batch:4}  {row['ms']:9.3f} ms  x {row['ratio']:.3f}  ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )
        if args.out is not None:
            known = {**machine(Path(__file__).resolve().parent.parent)}
            known["commits"] = known["commits"]["new"]
            args.out.write_text(json.dumps({"suite": "monitors", **known, "rows": rows}, indent=1) + "\n")
    lm.shutdown()


if __name__ == "__main__":
    main()
