"""Threads that wait: asleep where other processes run, as they are otherwise, and as the user says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pymllm_interp.utils import busy_cores

CORES = os.cpu_count() or 1
SCRIPT = """
import os, sys
from pathlib import Path
from pymllm_interp.utils import busy_cores
busy_cores.LOADAVG = Path(sys.argv[1])
assert "torch" not in sys.modules
import pymllm_interp
pymllm_interp.LM if sys.argv[2] == "LM" else pymllm_interp.SamplingParams
print(os.environ.get("OMP_WAIT_POLICY"))
"""


def policy(tmp_path: Path, running: int, name: str = "LM", **given: str) -> str:
    """OMP_WAIT_POLICY of a fresh process that imports a name, while so many threads run on the machine."""
    (tmp_path / "loadavg").write_text(f"0.00 0.01 0.05 {running}/812 4711\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **given}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "loadavg"), name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("running", "given", "expected"),
    [
        (1, {}, "None"),  # this process alone
        (1 + 2 * CORES, {}, "PASSIVE"),
        (1 + 2 * CORES, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (1 + 2 * CORES, {"OMP_NUM_THREADS": "1"}, "None"),
    ],
)
def test_threads_sleep_where_others_run_and_nobody_has_chosen(
    running: int, given: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert policy(tmp_path, running, **given) == expected


def test_a_machine_that_does_not_say_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_cores, "LOADAVG", tmp_path / "none")
    assert busy_cores.others_running() == 0


@pytest.mark.skipif(not busy_cores.LOADAVG.exists(), reason="Linux only")
def test_busy_processes_are_seen() -> None:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * CORES)]
    try:
        assert max(busy_cores.others_running() for _ in range(20)) >= CORES
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
