"""Import and start-up time, each measured in a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class StartResult:
    """Seconds from a fresh process to an engine that serves; medians over the runs."""

    import_s: float
    """Of `import pymllm_interp`."""
    import_lm_s: float
    """Of `pymllm_interp.LM`, which imports torch and transformers."""
    start_s: float
    """Of `LM(model)`, on a CPU."""
    runs: list[list[float]]


def measure_start(model: str, dtype: str, load_format: str, repeats: int) -> StartResult:
    """Import the package and start an engine in `repeats` processes, one after the other.

    Raises:
        RuntimeError: the process failed; the message has its error.
    """
    runs = []
    for _ in range(repeats):
        command = [sys.executable, "-c", SCRIPT, model, dtype, load_format]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the start-up of {model} could not be measured: {done.stderr.strip()}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    medians = [statistics.median(seconds) for seconds in zip(*runs, strict=True)]
    return StartResult(import_s=medians[0], import_lm_s=medians[1], start_s=medians[2], runs=runs)
