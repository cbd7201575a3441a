"""The suite "startup": seconds of the import and of the start, each in a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pymllm_interp.bench.suites import Model

SCRIPT = """
import json, sys, time

started = time.perf_counter()
import pymllm_interp

imported = time.perf_counter()
LM = pymllm_interp.LM  # imports torch and transformers
loaded = time.perf_counter()
model, dtype, load_format = sys.argv[1:]
with LM(model, dtype=dtype, device="cpu", load_format=load_format):
    ready = time.perf_counter()
print(json.dumps([imported - started, loaded - imported, ready - loaded]))
"""


def startup_suite(model: Model) -> Iterator[dict[str, Any]]:
    """Import the package and start an engine on a CPU, in one process after the other. Yields the record.

    Raises:
        RuntimeError: the process failed; the message has its error.
    """
    runs = []
    for _ in range(model.settings.repeats):
        command = [sys.executable, "-c", SCRIPT, model.model, model.dtype, model.load_format]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the start-up of {model.model} could not be measured: {done.stderr.strip()}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    medians = map(statistics.median, zip(*runs, strict=True))
    row = dict(zip(("import_s", "import_lm_s", "start_s"), medians, strict=True))
    yield {"model": Path(model.model).name, "dtype": model.dtype, "rows": [row], "runs": runs}


def startup_lines(record: dict[str, Any], conditions: str) -> list[str]:
    """The table of the suite."""
    (row,) = record["rows"]
    return [
        f"### {record['model']}: start-up in a fresh process", "", conditions, "",
        "| seconds | import pymllm_interp | pymllm_interp.LM | LM(model) |", "|---" * 4 + "|",
        "| median | " + " | ".join(f"{seconds:.2f}" for seconds in row.values()) + " |",
    ]  # fmt: skip
