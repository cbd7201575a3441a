"""Whether other processes use this machine's cores, what torch's threads do then, and how threads share Python's lock."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LOADAVG = Path("/proc/loadavg")
SAMPLES = 3
SWITCH_SECONDS = 1e-4
"""Longest time that a thread of a serving process keeps Python's lock while others wait for it."""


def share_lock() -> None:
    """Have this process's threads hand Python's lock over after `SWITCH_SECONDS`. Otherwise it is 5 ms.

    The thread that launches passes gives the lock away in each launch of a kernel. Beside threads that read requests and write
    answers it waits for the lock each time.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def share_cores() -> None:
    """Make torch's OpenMP threads sleep at barriers if other processes run. Call it before torch is imported.

    By default they spin, which is fastest on a quiet machine. On a busy one each barrier waits for a thread without a
    core. Beside 8 processes on 2 cores, 24 tokens of the demo model took over a minute. Sleeping threads took 3.3 s.
    OpenMP reads the variable once, so nothing changes after torch's import. Variables set by the user are kept.
    """
    chosen = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys()
    if "torch" not in sys.modules and not chosen and others_running() >= max(1, (os.cpu_count() or 1) // 4):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def others_running() -> int:
    """Threads of the machine that run or wait for a core, without this one; 0 except on Linux."""
    try:
        found = []
        for _ in range(SAMPLES):
            found.append(int(LOADAVG.read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(0.002)
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, min(found))
