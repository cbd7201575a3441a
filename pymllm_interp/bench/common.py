"""What the suites share: prompts, a clock, and what a number cannot be read without."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..core.request import SamplingParams
from ..doctor import cpu_model
from ..engine.lm import LM

Prompts = list[list[int]]
RESULTS = Path("benchmarks/results")


def random_prompts(lm: LM, batch: int, tokens: int) -> Prompts:
    """`batch` prompts of seeded random token ids."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(lm.runner.vocab_size, (batch, tokens), generator=generator).tolist()


def greedy(new_tokens: int) -> SamplingParams:
    """Exactly `new_tokens`, each the likeliest."""
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


def generate(lm: LM, prompts: Prompts, new_tokens: int) -> None:
    """Greedy, exactly `new_tokens` each, all prompts at once."""
    outputs = lm.generate(prompts, greedy(new_tokens))
    assert all(len(output.token_ids) == new_tokens for output in outputs)


def timed(function: Callable[[], None]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def describe_machine(commit_if_unknown: str | None = None) -> dict[str, Any]:
    """What a number cannot be read without.

    Args:
        commit_if_unknown: what to note outside of a checkout.
    """
    found = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_before": list(os.getloadavg()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("pymllm-interp", "torch", "transformers", "nnsight")},
        "commit": commit() or commit_if_unknown,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["versions"] |= {"cuda": torch.version.cuda} | {
            name: _version(name) for name in ("triton", "flashinfer-python")
        }
    return found


def commit() -> str | None:
    """The commit that this package is at, marked where files differ from it; None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def default_path(name: str) -> Path:
    """Where a file of this name goes unless the user says otherwise: `benchmarks/results`, where that is, else here."""
    return (RESULTS if RESULTS.is_dir() else Path(".")) / name


def write(record: dict[str, Any], path: Path) -> None:
    """The record as JSON, its folder made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
