"""What the prefix cache saves: time to first token and reused tokens of requests that share a prefix, plain and steered.

Usage: python benchmarks/prefix_cache.py [--model demo] [--requests 64] [--prefix 2000] [--out FILE]

Requests come one after the other, so the time to first token has no queueing in it; then all of them in one call. The table shows
the process's CPU time where the device is a CPU, since other processes may use the machine; the record has both. Times of the tree
are medians over 500 rounds, the packing of the token ids included.
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

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.bench import describe_machine
from pymllm_interp.mem_cache.radix_cache import RadixCache, RadixKey

FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
TAIL = 20
"""Tokens of each prompt that are its own."""


def steered(lm: LM, count: int, positions: Any) -> list[list[Steer]]:
    """Another vector for each request."""
    width = lm.model_spec.hidden_size
    return [[Steer("resid_post.3", torch.randn(width), positions=positions)] for _ in range(count)]


def measure(lm: LM, prompts: list[list[int]], specs: list[Any], params: SamplingParams) -> dict[str, Any]:
    """Seconds to the first token of each request, and the share of tokens that were reused after the first."""
    lm.reset_prefix_cache()
    seconds, busy, cached = [], [], []
    for prompt, interventions in zip(prompts, specs, strict=True):
        started, began = time.perf_counter(), time.process_time()
        (out,) = lm.generate([prompt], params, interventions=interventions)
        seconds.append(time.perf_counter() - started)
        busy.append(time.process_time() - began)
        cached.append(out.num_cached_tokens / len(prompt))
    lm.reset_prefix_cache()
    started, began = time.perf_counter(), time.process_time()
    together = lm.generate(prompts, params, interventions=specs)
    return {
        "cold_s": seconds[0],
        "warm_s": statistics.median(seconds[1:]),
        "cold_cpu_s": busy[0],
        "warm_cpu_s": statistics.median(busy[1:]),
        "reused": statistics.mean(cached[1:]),
        "one_call_s": time.perf_counter() - started,
        "one_call_cpu_s": time.process_time() - began,
        "one_call_reused": statistics.mean(out.num_cached_tokens / len(out.prompt_token_ids) for out in together[1:]),
    }


def of_the_tree(tokens: int, page_size: int) -> dict[str, float]:
    """Microseconds to match a known sequence, and to insert a new one."""
    rng, pages = random.Random(0), list(range(1, tokens // page_size + 1))
    ids = [rng.randrange(100_000) for _ in range(tokens)]
    tree = RadixCache(page_size)
    tree.insert(tree.root, RadixKey(ids, page_size), 0, pages)

    def match() -> None:
        tree.match(RadixKey(ids, page_size), len(pages))

    def insert() -> None:
        empty = RadixCache(page_size)
        empty.insert(empty.root, RadixKey(ids, page_size), 0, pages)

    found = {}
    for name, run in (("match_us", match), ("insert_us", insert)):
        times = []
        for _ in range(500):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        found[name] = 1e6 * statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    rng, console = random.Random(0), Console()
    with LM(given.model, device=given.device, load_format=given.load_format) as lm:
        vocab = lm.limits.vocab_size
        prefix = [rng.randrange(vocab) for _ in range(given.prefix)]
        prompts = [prefix + [rng.randrange(vocab) for _ in range(TAIL)] for _ in range(given.requests)]
        lm.generate([prompts[0][:64]], FIRST_TOKEN)  # warm-up
        place = int(0.75 * given.prefix)
        cases = {
            "plain": [[] for _ in prompts],
            "steered differently at generated positions": steered(lm, len(prompts), "generated"),
            f"steered differently from position {place}": steered(lm, len(prompts), slice(place, None)),
            "equally steered": [steered(lm, 1, "all")[0]] * len(prompts),
        }
        rows = {name: measure(lm, prompts, specs, FIRST_TOKEN) for name, specs in cases.items()}
        rows["without a prefix cache"] = measure(
            lm, prompts[:3], [[]] * 3, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, skip_reading_prefix_cache=True)
        )  # fmt: skip
        page_size = lm.runner.server_config.page_size
        record = {
            "machine": describe_machine(), "model": given.model, "requests": given.requests, "prefix": given.prefix, "tail": TAIL,
            "engine": lm.backend.facts.engine_name, "tree": of_the_tree(given.prefix, page_size), "rows": rows,
        }  # fmt: skip
    table = Table("requests", "first, s", "later, s", "later / first", "reused", "one call, s", "reused in it")
    s = "cpu_s" if lm.runner.device == "cpu" else "s"
    for name, row in rows.items():
        cold, warm = row[f"cold_{s}"], row[f"warm_{s}"]
        table.add_row(
            name, f"{cold:.3f}", f"{warm:.3f}", f"{warm / cold:.1%}", f"{row['reused']:.1%}", f"{row[f'one_call_{s}']:.2f}",
            f"{row['one_call_reused']:.1%}",
        )  # fmt: skip
    console.print(table)
    console.print(record["tree"])
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
