"""Steps of vLLM with blocks of traces: milliseconds a step of a batch, as JSON.

    python benchmarks/vllm_blocks.py MODEL --batch 32 --tokens 64 --out blocks.json

Four cases, by turns, in one process: no block; one request with a block that waits for one step; one with a block in every step;
and one that steers every layer, too. A step's time is the difference of a long and a short call: each call has further costs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import torch

from pymllm_interp import LM, SamplingParams, Steer


def one_step(lm: Any, ids: list[int], tokens: int) -> Any:
    with lm.generate(ids, max_new_tokens=tokens, temperature=0, ignore_eos=True) as tracer:
        for _ in tracer.iter[3:4]:
            lm.model.layers[2].self_attn.q_proj.output.save()
    return tracer.receipt.steps


def every_step(lm: Any, ids: list[int], tokens: int) -> Any:
    with lm.generate(ids, max_new_tokens=tokens, temperature=0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[2].output[:] *= 1.0
    return tracer.receipt.steps


def every_step_and_steered(lm: Any, ids: list[int], tokens: int) -> Any:
    vector = torch.ones(lm.hidden_size)
    options = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with lm.generate(ids, interventions=[Steer("resid_post.*", vector, 1e-3)], **options) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[2].output[:] *= 1.0
    return tracer.receipt.steps


def seconds_of(lm: Any, batch: int, tokens: int, block: Any) -> tuple[float, dict[str, int]]:
    """Seconds of a batch of generations, one of them with a block; and the steps of that one."""
    prompts = [[1 + (7 * i + j) % 50 for j in range(16)] for i in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    plain = prompts if block is None else prompts[1:]
    steps: dict[str, int] = {}
    start = time.perf_counter()
    beside = Thread(target=lambda: plain and lm.generate(plain, params))
    beside.start()
    if block is not None:
        steps = dict(block(lm, prompts[0], tokens))
    beside.join()
    return time.perf_counter() - start, steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--eager", action="store_true", help="without graphs and compiler")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {"load_format": "dummy"} if args.dummy else {}
    cases: dict[str, Any] = {
        "no block": None, "a block in one step": one_step, "a block in every step": every_step,
        "the same, steered": every_step_and_steered,
    }  # fmt: skip
    found: dict[str, Any] = {}
    few = max(args.tokens // 4, 5)  # the block's one step is among them
    with LM(
        args.model,
        engine="vllm",
        lower_traces="off",
        disable_cuda_graph=args.eager,
        tensor_parallel_size=args.tensor_parallel_size,
        **options,
    ) as lm:
        for batch in args.batch:
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
            steps: dict[str, dict[str, int]] = {}
            for turn in range(args.rounds + 1):
                for name, block in cases.items():
                    short, _ = seconds_of(lm, batch, few, block)
                    long, steps[name] = seconds_of(lm, batch, args.tokens, block)
                    if turn:  # the first warms up
                        step = (long - short) / (args.tokens - few)
                        times[name].append((1000 * step, 1000 * (short - few * step)))
            found[str(batch)] = {
                name: {
                    "ms_a_step": round(median(step for step, _ in own), 3),
                    "ms_a_call": round(median(call for _, call in own), 2), "steps": steps[name],
                }
                for name, own in times.items()
            }  # fmt: skip
    text = json.dumps(
        {"model": str(args.model), "eager": args.eager, "ranks": args.tensor_parallel_size, "batches": found}, indent=1
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
