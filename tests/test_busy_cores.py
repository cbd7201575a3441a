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
pymllm_interp.LM
assert "torch" in sys.modules
print(os.environ.get("OMP_WAIT_POLICY"))
"""


def loadavg(folder: Path, running: int) -> Path:
    """A file as /proc/loadavg, while so many threads run on the machine."""
    (folder / "loadavg").write_text(f"0.00 0.01 0.05 {running}/812 4711\n")
    return folder / "loadavg"


def test_threads_sleep_where_others_run(tmp_path: Path) -> None:
    """In a fresh process: it is chosen before torch is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(loadavg(tmp_path, 1 + 2 * CORES))]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "PASSIVE"


@pytest.mark.parametrize(
    ("running", "given", "expected"),
    [
        (1, {}, None),  # this process alone
        (1 + 2 * CORES, {}, "PASSIVE"),
        (1 + 2 * CORES, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (1 + 2 * CORES, {"OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_nothing_is_chosen_on_a_quiet_machine_or_against_the_user(
    running: int, given: dict[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_cores, "LOADAVG", loadavg(tmp_path, running))
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    busy_cores.share_cores()
    assert given.get("OMP_WAIT_POLICY") == expected


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
