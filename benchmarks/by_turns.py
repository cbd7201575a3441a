"""Two source trees of this package on one device, by turns: what did a change cost?

    python benchmarks/by_turns.py OLD_TREE --out benchmarks/results/NAME.json

OLD_TREE is a folder with the package of an earlier commit (``git archive COMMIT pymllm_interp | tar -x -C OLD_TREE``). Both trees
are loaded at once, each in a process of its own, and run the same cases in turns; every second round begins
with the other one.
Only public names are used, which both trees have. A number is the median of the rounds; a ratio is the median of their ratios.

- decode, steered, captured, one layer, eight layers, in the passes, eight in the passes: milliseconds a decode step, the
  difference of a long and a short generation. "captured" and "steered" are all `resid_post`, captured of generated tokens
  only; "one layer" and "eight layers" are lowered blocks; "in the passes" is a block of one layer with `lower_traces="off"`,
  "eight in the passes" one of eight.
- prefill, mix, sweep, harvest: milliseconds of the whole call.

The model has random weights in the shape of Llama 3 8B. --tiny is a small one, for a CPU, where times are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS = (3, 7, 11, 15, 19, 23, 27, 31)
LARGE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY = LARGE | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
SHORT = 8
BY_STEP = ("decode", "steered", "captured", "one layer", "eight layers", "in the passes", "eight in the passes")
BY_CALL = ("prefill", "mix", "sweep", "harvest")


def worker(tiny: bool, steps: int) -> None:
    """Load the package of ``PYTHONPATH``, and answer each line ``[case, batch]`` with milliseconds."""
    import torch
    from transformers import LlamaConfig

    from pymllm_interp import LM, Capture, SamplingParams, Steer

    cuda = torch.cuda.is_available()
    scale = 1 if cuda and not tiny else 16
    clock = time.perf_counter if cuda else time.process_time
    size = {"kv_cache_tokens": 81920, "capture_ring_bytes": 1 << 30} if cuda else {"kv_cache_tokens": 16384}
    config = LlamaConfig(**(TINY if tiny else LARGE))
    lm = LM(
        "dummy", load_format="dummy", hf_config=config, max_running_requests=256, enable_prefix_caching=False, **size
    )
    noise = torch.Generator().manual_seed(0)
    vector = 0.01 * torch.randn(config.hidden_size, generator=noise)
    order = random.Random(0)

    def prompts(count: int, length: int = 128) -> list[list[int]]:
        return [[1 + (7 * i + 3 * j) % 500 for j in range(max(2, length // scale))] for i in range(count)]

    def greedy(tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def block(count: int, tokens: int, layers: tuple[int, ...]) -> None:
        with lm.generate(max_new_tokens=tokens, ignore_eos=True) as tracer:
            for prompt in prompts(count):
                with tracer.invoke(prompt):
                    kept = list().save()
                    for _ in tracer.iter[:]:
                        for layer in layers:
                            kept.append(lm.model.layers[layer].output[0, -1])
        assert len(kept) == tokens * len(layers)

    def in_the_passes(count: int, tokens: int, layers: tuple[int, ...] = (15,)) -> None:
        lowered = lm.backend.lowered
        mode, lowered.mode = lowered.mode, "off"
        block(count, tokens, layers)
        lowered.mode = mode

    def sweep(count: int, tokens: int) -> None:
        with lm.generate(max_new_tokens=1, ignore_eos=True) as tracer:
            states = list().save()
            for prompt in prompts(count, 32):
                with tracer.invoke(prompt):
                    states.append(lm.model.layers[15].output[0, -1])
        assert len(states) == count

    def harvest(count: int, tokens: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            lm.harvest(
                prompts(count, 512), capture=["resid_post.15"], out=f"{folder}/out", too_long="split", progress=False
            )

    mixed = [
        (order.randint(16, 1024) // scale + 2, order.randint(8, 200) // (1 if scale == 1 else 8) + 1)
        for _ in range(192)
    ]
    runs: dict[str, Callable[[int, int], Any]] = {
        "decode": lambda count, tokens: lm.generate(prompts(count), greedy(tokens)),
        "steered": lambda count, tokens: lm.generate(
            prompts(count), greedy(tokens), interventions=[Steer("resid_post.*", vector)]
        ),
        "captured": lambda count, tokens: lm.generate(
            prompts(count), greedy(tokens), capture=[Capture("resid_post.*", positions="generated")]
        ),
        "one layer": lambda count, tokens: block(count, tokens, (15,)),
        "eight layers": lambda count, tokens: block(count, tokens, LAYERS),
        "in the passes": in_the_passes,
        "eight in the passes": lambda count, tokens: in_the_passes(count, tokens, LAYERS),
        "prefill": lambda count, tokens: lm.generate(prompts(count, 2048), greedy(1)),
        "mix": lambda count, tokens: lm.generate(
            [prompts(1, length * scale)[0] for length, _ in mixed[:count]], [greedy(new) for _, new in mixed[:count]]
        ),
        "sweep": sweep,
        "harvest": harvest,
    }

    def seconds(case: str, count: int, tokens: int) -> float:
        began = clock()
        runs[case](count, tokens)
        return clock() - began

    print("ready", flush=True)
    for line in sys.stdin:
        case, count = json.loads(line)
        if case in BY_STEP:
            long = SHORT + (min(steps, 16) if "in the passes" in case else steps)
            ms = (seconds(case, count, long) - seconds(case, count, SHORT)) / (long - SHORT) * 1e3
        else:
            ms = seconds(case, count, 1) * 1e3
        print(json.dumps(ms), flush=True)
    lm.shutdown()


class Side:
    """A worker process over one source tree."""

    def __init__(self, tree: Path, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(tree), "--worker", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))},
        )  # fmt: skip
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        return line.strip()

    def ms(self, case: str, batch: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps([case, batch]), file=self._process.stdin, flush=True)
        while not (line := self._line()).replace(".", "").replace("e-", "").lstrip("-").isdigit():
            print(line, file=sys.stderr)
        return float(line)


def measured(sides: dict[str, Side], case: str, batch: int, rounds: int) -> dict[str, Any]:
    """A row: medians, and the rounds' ratios of new to old."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):  # the first one warms up
        for name in list(sides)[:: 1 if number % 2 else -1]:
            ms = sides[name].ms(case, batch)
            if number:
                times[name].append(ms)
    ratios = [new / old for new, old in zip(times["new"], times["old"], strict=True)]
    row: dict[str, Any] = {"case": case, "batch": batch, "ratio": statistics.median(ratios), "ratios": ratios}
    return row | {f"{name}_ms": statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", choices=BY_STEP + BY_CALL, default=BY_STEP + BY_CALL)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.worker:
        worker(args.tiny, args.steps)
        return
    options = ["--steps", str(args.steps), *(["--tiny"] if args.tiny else [])]
    sides = {"old": Side(args.old.resolve(), options), "new": Side(Path(__file__).resolve().parent.parent, options)}
    calls = {"prefill": 16, "mix": 192, "sweep": 512, "harvest": 128}
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        for batch in args.batches if case in BY_STEP else [calls[case]]:
            rows.append(measured(sides, case, batch, args.rounds))
            row = rows[-1]
            print(
                f"{case:14} {batch:4}  old {row['old_ms']:9.3f}  new {row['new_ms']:9.3f} ms  x {row['ratio']:.3f}"
                f"  ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})",
                flush=True,
            )
            if args.out is not None:
                args.out.write_text(
                    json.dumps({"suite": "by turns", **machine(args.old), "rows": rows}, indent=1) + "\n"
                )


def machine(old: Path) -> dict[str, Any]:
    """Device, versions and commits; a tree without git may name its commit in a file COMMIT."""
    import torch

    def commit(tree: Path) -> str:
        if (tree / "COMMIT").exists():
            return (tree / "COMMIT").read_text().strip()
        found = subprocess.run(
            ["git", "-C", str(tree), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
        return found.stdout.strip()

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    trees = {"old": commit(old), "new": commit(Path(__file__).resolve().parent.parent)}
    return {"device": device, "torch": torch.__version__, "commits": trees}


if __name__ == "__main__":
    main()
