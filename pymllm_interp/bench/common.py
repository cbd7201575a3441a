"""Prompts, timing, the description of the machine, and files of results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..core.sampling_params import SamplingParams
from ..doctor import cpu_model, installed_version
from ..lm import LM

Prompts = list[list[int]]
RESULTS = Path("benchmarks/results")
WARM_TOKENS = 16
"""New tokens of warm-up runs."""


def random_prompts(lm: LM, batch: int, tokens: int) -> Prompts:
    """`batch` prompts of seeded random token ids."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(lm.limits.vocab_size, (batch, tokens), generator=generator).tolist()


def greedy(new_tokens: int) -> SamplingParams:
    """Greedy sampling of exactly `new_tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


def generate(lm: LM, prompts: Prompts, new_tokens: int) -> None:
    """Generate exactly `new_tokens` tokens for each prompt, greedily, in one batch."""
    outputs = lm.generate(prompts, greedy(new_tokens))
    assert all(len(output.token_ids) == new_tokens for output in outputs)


def timed(function: Callable[[], object]) -> float:
    """Duration of a call in seconds."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turns(runs: Sequence[Callable[[int], object]], lengths: Sequence[int], repeats: int) -> list[dict[int, float]]:
    """Median seconds of each run, by number of new tokens. Runs take turns, so a busy machine slows all of them.

    Args:
        runs: called with a number of new tokens, after a warm-up in which graphs are captured.
    """
    for run in runs:
        run(min(WARM_TOKENS, max(lengths)))
    turns = [[[timed(lambda: run(n)) for n in lengths] for run in runs] for _ in range(repeats)]  # noqa: B023
    seconds = [zip(*(turn[i] for turn in turns), strict=True) for i in range(len(runs))]
    return [dict(zip(lengths, map(statistics.median, found), strict=True)) for found in seconds]


def describe_machine(noted_commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions, load and commit of a measurement.

    Args:
        noted_commit: commit to record instead of the checkout's, if these files are a copy.
    """
    found = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_before": list(os.getloadavg()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"pymllm-interp": __version__}
        | {name: installed_version(name) for name in ("torch", "transformers", "nnsight")},
        "commit": noted_commit or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["versions"] |= {"cuda": torch.version.cuda} | {
            name: installed_version(name) for name in ("triton", "flashinfer-python")
        }
    return found


def _commit() -> str | None:
    """The commit of the checkout, with "-dirty" if files were changed; None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def default_path(name: str) -> Path:
    """Default path of a result: in `benchmarks/results` if that folder exists, else in the working directory."""
    return (RESULTS if RESULTS.is_dir() else Path(".")) / name


def write(record: dict[str, Any], path: Path) -> None:
    """Write the record as JSON; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
