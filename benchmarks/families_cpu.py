"""impl="transformers" beside transformers' own generate on one CPU thread, in turns: new tokens a second of CPU time.

    python benchmarks/families_cpu.py --out benchmarks/results/families-cpu.json

CPU time, since it does not count what other processes take. "equal": prompts of 64 tokens and 32 new tokens each. "mixed": prompts
of 16 to 96 tokens and 4 to 64 new tokens; transformers pads them, and generates until the longest has ended.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.bench import describe_machine

BATCHES = 1, 32
ROUNDS = 2


def lengths_of(shape: str, batch: int) -> list[tuple[int, int]]:
    """(tokens of the prompt, new tokens) of each request."""
    if shape == "equal":
        return [(64, 32)] * batch
    rng = random.Random(batch)
    return [(rng.randint(16, 96), rng.choice((4, 8, 16, 64))) for _ in range(batch)]


def cpu_seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def measure(lm: LM, theirs: Any, shape: str, batch: int) -> dict[str, Any]:
    """Best of some rounds of each side."""
    lengths, rng = lengths_of(shape, batch), random.Random(0)
    prompts = [[rng.randrange(1000, 40000) for _ in range(size)] for size, _ in lengths]
    params = [SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True) for _, new in lengths]
    width, longest = max(map(len, prompts)), max(new for _, new in lengths)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def generate() -> None:
        theirs.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0
        )

    ours = lambda: lm.generate(prompts, params)  # noqa: E731
    for run in (ours, generate):
        run()
    times = [(cpu_seconds(ours), cpu_seconds(generate)) for _ in range(ROUNDS)]
    tokens = sum(new for _, new in lengths)
    rates = [tokens / min(side) for side in zip(*times, strict=True)]
    return {
        "shape": shape,
        "batch": batch,
        "tokens_per_s": rates[0],
        "transformers": rates[1],
        "ratio": rates[0] / rates[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"suite": "families-cpu", "machine": describe_machine(), "results": []}
    for dtype in given.dtype:
        lm = LM(
            given.model, impl="transformers", device="cpu", dtype=dtype, enable_prefix_caching=False, max_running_requests=32,
            max_model_len=256, kv_cache_tokens=8192,
        )  # fmt: skip
        folder = lm.runner.source.folder  # pyright: ignore[reportOptionalMemberAccess]
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        for shape in ("equal", "mixed"):
            for batch in BATCHES:
                result = {"dtype": dtype, **measure(lm, theirs, shape, batch)}
                record["results"].append(result)
                print(json.dumps(result), flush=True)
                given.out.write_text(json.dumps(record, indent=1) + "\n")
        lm.shutdown()


if __name__ == "__main__":
    main()
