"""Speed of `lm.verbalize` and of prompts with embeddings, beside plain generation of the same number of tokens.

    python benchmarks/verbalize.py MODEL [--device cuda] [--states 1000] [--tokens 32] [--out FILE]

`ratio` is the rate of tokens of the readings over the rate of plain generation, by turns in one process; 1 is as fast.
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

from pymllm_interp import LM, SamplingParams
from pymllm_interp.bench import describe_machine

TEMPLATE_TOKENS, PLACE = 48, 40


def seconds(run: Callable[[], Any], turns: list[float]) -> None:
    """Append the seconds of a run."""
    started = time.perf_counter()
    run()
    turns.append(time.perf_counter() - started)


def measured(lm: LM, states: int, tokens: int, turns: int) -> dict[str, Any]:
    """Median tokens a second of plain generation, and of readings at two sites."""
    torch.manual_seed(0)
    vectors = torch.randn(states, lm.hidden_size)
    placeholder = 7
    template = [(11 + 3 * i) % 97 + 8 for i in range(TEMPLATE_TOKENS)]
    template[PLACE] = placeholder
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    plain = [[*template[:PLACE], 8 + i % 89, *template[PLACE + 1 :]] for i in range(states)]

    def read(site: str) -> None:
        lm.verbalize(
            vectors, template=template, placeholder=placeholder, site=site, norm="match", max_tokens=tokens,
            ignore_eos=True, progress=False,
        )  # fmt: skip

    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: lm.generate(plain, params, progress=False),
        "embed": lambda: read("embed"),
        "resid_post.1": lambda: read("resid_post.1"),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            lm.reset_prefix_cache()
            seconds(run, found[name])
        if turn == 0:  # kernels are compiled
            found = {name: [] for name in runs}
    rates = {name: states * tokens / statistics.median(times) for name, times in found.items()}
    return {
        "states": states, "tokens": tokens, "tokens_per_second": rates,
        "ratio": {name: rates[name] / rates["plain"] for name in runs},
        "executions": lm.engine.stats().get("steps"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with LM(given.model, device=given.device, load_format=given.load_format) as lm:
        result = {"machine": describe_machine(), "model": given.model, "device": lm.backend.facts.device}
        result |= measured(lm, given.states, given.tokens, given.turns)
    text = json.dumps(result, indent=1, default=str)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
