"""Ends ranks after a client that was killed, and removes the shared memory of killed processes."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from .results import host_name, pid_space

SHARED = re.compile(r" /dev/shm/(psm_\w+|\S+-cpushm_\d+)$", re.MULTILINE)
"""Segments that vLLM makes, in a line of /proc/PID/maps. It makes all of them before its ranks answer."""
GRACE_SECONDS = 3.0
"""Time that vLLM has to end a rank by itself, once the client has ended."""


class ClientProcess(NamedTuple):
    """The process that started vLLM."""

    host: str
    pid_space: str
    pid: int

    @classmethod
    def here(cls) -> ClientProcess:
        """This process."""
        return cls(host_name(), pid_space(), os.getpid())


def end_with(client: ClientProcess) -> None:
    """End this rank after the client, which may be killed. vLLM's ranks would run on, and hold their memory.

    It is for clients on this host, in this container, and on Linux. An engine ends with its ranks.
    """
    if client[:2] != ClientProcess.here()[:2] or client.pid == os.getpid():
        return
    with contextlib.suppress(OSError, AttributeError):
        file = os.pidfd_open(client.pid)
        own = shared_by(os.getpid()) - shared_by(client.pid)  # a fork has its parent's
        Thread(target=_end_after, args=(file, own), name="orphan-watch", daemon=True).start()


def _end_after(file: int, segments: set[str]) -> None:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    poll.poll()
    time.sleep(GRACE_SECONDS)
    try:
        remove(segments)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # a rank on a CPU may wait in a kernel for one that has ended


def shared_by(pid: int) -> set[str]:
    """Names of the shared memory of Python, and of vLLM's ranks on CPUs, that a process has mapped."""
    with contextlib.suppress(OSError):
        return set(SHARED.findall(Path(f"/proc/{pid}/maps").read_text()))
    return set()


def remove(names: Iterable[str]) -> None:
    """Remove segments of shared memory. Others may have removed them before."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            left = SharedMemory(name)
            left.close()
            left.unlink()
