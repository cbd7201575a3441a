"""Server processes of tests that are stopped, killed and told to end, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from helpers_forks import children_of

SECONDS = 120


def wait_for(condition: Callable[[], Any]) -> Any:
    """What a condition returns, once it is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def pidfds() -> int:
    """Number of this process's open files of processes (`os.pidfd_open`)."""
    found = 0
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            found += os.readlink(f"/proc/self/fd/{file}") == "anon_inode:[pidfd]"
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def starting(model: Path, temporary: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A server that starts, with a folder of its own for temporary files."""
    command = [sys.executable, "-m", "pymllm_interp.cli", "serve", str(model), "--port", "0", *options]
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def engine_of(process: subprocess.Popen[str], phase: str) -> int:
    """The engine process, once it is so far: "first line", "import" or "ready"."""
    (pid,) = wait_for(lambda: children_of(process.pid))
    if phase == "import":
        wait_for(lambda: "libtorch" in Path(f"/proc/{pid}/maps").read_text())
    if phase == "ready":
        assert process.stdout is not None
        process.stdout.readline()
    return pid
