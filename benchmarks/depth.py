"""What passes save that end after the last layer that anybody reads: a harvest of each layer, and the same through all layers.

    python benchmarks/depth.py [--model demo | FOLDER [--load-format dummy]] [--device cpu] [--layers 1 7 14 22 28] [--out FILE]
    python benchmarks/depth.py --meet 3 20 --layers

Both run by turns in one process; the order changes with each round. A ratio is the median of the rounds' ratios, and its aim the
share of the layers that run. The harvest through all layers also captures one position of `final_norm`. With --beside N, requests
that read run beside N that generate: in the same steps, which go through all layers, and in steps of their own. With --meet A B,
reads of two layers begin at once: all in the same steps, and by layer. Times are CPU seconds on a CPU, else seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pymllm_interp import LM, Capture, SamplingParams
from pymllm_interp.bench import describe_machine
from pymllm_interp.engine import waiting_queue

READ = SamplingParams(max_tokens=0)
PASS_TOKENS = waiting_queue.PASS_TOKENS


def documents_of(lm: LM, args: argparse.Namespace) -> list[list[int]]:
    """Random documents, each of another length around `args.length`."""
    rng = random.Random(1)
    lengths = [max(1, args.length * rng.randrange(50, 151) // 100) for _ in range(args.documents)]
    return [[rng.randrange(lm.limits.vocab_size) for _ in range(length)] for length in lengths]


def captures_of(layer: int, whole: bool) -> list[Capture]:
    """The states of a layer; with another capture that needs all layers, where asked for."""
    return [Capture(f"resid_post.{layer}"), *([Capture("final_norm", positions=[0])] if whole else [])]


def measure(lm: LM, layer: int, args: argparse.Namespace, clock: Any) -> dict[str, float]:
    """Seconds of both harvests."""
    documents, times = documents_of(lm, args), {False: list[float](), True: list[float]()}
    for turn in range(args.rounds + 1):
        for whole in (False, True) if turn % 2 else (True, False):
            with tempfile.TemporaryDirectory() as out:
                started = clock()
                lm.harvest(documents, capture=captures_of(layer, whole), out=out, progress=False)
                times[whole].append(clock() - started)
    early, whole = (found[1:] for found in times.values())  # the first round warms up
    ratio = statistics.median(a / b for a, b in zip(early, whole, strict=True))
    share = (layer + 1) / lm.num_layers
    return {
        "layer": layer, "early_s": statistics.median(early), "whole_s": statistics.median(whole), "ratio": ratio,
        "layers_that_run": share, "above": ratio / share - 1,
    }  # fmt: skip


def by_turns(lm: LM, kinds: dict[str, list[tuple[Any, ...]]], args: argparse.Namespace, clock: Any) -> dict[str, float]:
    """Seconds of each kind of calls, with one rule of steps and the other: rows together, or apart by their layers."""
    found = dict[str, list[float]]()
    for turn in range(args.rounds + 1):
        for name, calls in kinds.items():
            for rule, tokens in (("together", 1 << 60), ("apart", PASS_TOKENS))[:: 1 if turn % 2 else -1]:
                waiting_queue.PASS_TOKENS, started = tokens, clock()
                handles = [lm.submit(prompt, params, capture=capture) for prompt, params, capture in calls]
                for handle in handles:
                    handle.result()
                found.setdefault(f"{name}_{rule}_s", []).append(clock() - started)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def beside(lm: LM, layer: int, args: argparse.Namespace, clock: Any) -> dict[str, float]:
    """Seconds of reads and generations that begin together, each kind alone, and both."""
    documents, params = documents_of(lm, args), SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
    generate = [(text, params, None) for text in documents[: args.beside]]
    read = [(document, READ, captures_of(layer, False)) for document in documents]
    return by_turns(lm, {"generate": generate, "read": read, "both": generate + read}, args, clock)


def meet(lm: LM, layers: list[int], args: argparse.Namespace, clock: Any) -> dict[str, float]:
    """Seconds of reads of each of two layers, and of both in turns."""
    calls = {layer: [(d, READ, captures_of(layer, False)) for d in documents_of(lm, args)] for layer in layers}
    both = [call for pair in zip(*calls.values(), strict=True) for call in pair]
    return by_turns(lm, {**{f"layer_{layer}": one for layer, one in calls.items()}, "both": both}, args, clock)


def main() -> None:
    """Measure each layer, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, from config.json alone")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 7, 14, 22, 28])
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens of a document, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=int, default=0, help="generating requests; 0: leave that out")
    parser.add_argument("--at", type=int, default=14, help="layer that is read beside generations")
    parser.add_argument("--meet", type=int, nargs=2, help="two layers that are read at once")
    parser.add_argument("--new", type=int, default=32, help="tokens that they generate")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    options: dict[str, Any] = {
        "device": args.device, "dtype": args.dtype, "load_format": args.load_format, "enable_prefix_caching": False,
    }  # fmt: skip
    with LM(args.model, **options) as lm:
        rows = [measure(lm, layer, args, clock) for layer in args.layers if layer < lm.num_layers - 1]
    record: dict[str, Any] = {"machine": describe_machine(), "model": args.model, "layers": rows}
    for row in rows:
        print(" ".join(f"{name}={value:.3f}" for name, value in row.items()))
    with LM(args.model, **options) as lm:
        if args.beside:
            record["beside"] = beside(lm, args.at, args, clock)
        if args.meet:
            record["meet"] = meet(lm, args.meet, args, clock)
    for kind in ("beside", "meet"):
        if kind in record:
            print(kind, " ".join(f"{name}={value:.3f}" for name, value in record[kind].items()))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
