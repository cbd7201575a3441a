"""Seconds of a test run by folder, beside what each folder is meant to take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BUDGET = {
    "adapters": 30, "attention": 70, "bench": 40, "client": 140, "cluster": 35, "docs": 100, "engine": 125, "evals": 10,
    "fuzz": 25, "golden": 5, "gpu": 20, "harvest": 25, "hooks": 300, "kernels": 35, "layers": 5, "lens": 30,
    "mem_cache": 5, "models": 150, "plots": 15, "runner": 65, "sampling": 10, "server": 300, "speculative": 55,
    "toolkit": 15, "utils": 5, "vision": 50, "vllm_engine": 15, "tests": 45,
}  # fmt: skip
"""Seconds that the tests of a folder are meant to take on a CPU, in one process. A run over it says so; it does not fail."""


def seconds_by_test(reports: Iterable[Any]) -> Counter[str]:
    """Node id -> seconds of set-up, call and teardown."""
    found: Counter[str] = Counter()
    for report in reports:
        if hasattr(report, "nodeid") and hasattr(report, "duration"):
            found[report.nodeid] += report.duration
    return found


def folder_of(nodeid: str) -> str:
    """The folder of `tests` that a test stands in; "tests" for its own files."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"


def summary(seconds: Counter[str]) -> list[str]:
    """Lines of a table: folder, seconds, and the budget where it is exceeded."""
    folders: Counter[str] = Counter()
    for nodeid, taken in seconds.items():
        folders[folder_of(nodeid)] += taken
    lines = [f"seconds by folder ({sum(folders.values()):.0f} in all):"]
    for folder, taken in folders.most_common():
        budget = BUDGET.get(folder)
        over = f", over its budget of {budget}" if budget is not None and taken > budget else ""
        lines.append(f"  {folder}: {taken:.0f}{over}")
    return lines


def write(path: Path, seconds: Counter[str]) -> None:
    """Write a JSON object, node id -> seconds, the slowest test first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({nodeid: round(taken, 3) for nodeid, taken in seconds.most_common()}, indent=0))
