"""`RankWatch`: notices ranks and engines that were killed or stopped. vLLM names none, and waits minutes for a stopped one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...orphans import remove, shared_by
from ...results import host_name, pid_space

STOPPED_SECONDS = 4.0
"""A process that is stopped for this long has failed."""
LOOK_SECONDS = 1.0
"""Seconds between looks at whether a rank is stopped."""
STOPPED, ENDED = "T", "ZX"
"""States of a process in /proc."""


class RankWatch:
    """Watches the processes of this host, on the client's loop only. Other hosts and containers are left to vLLM.

    Args:
        ranks: answers of the ranks to `interp_open`.
        engines: vLLM's processes of engines, above their ranks (`multiprocessing.Process`). One rank by itself is its engine's.
        failed: called once, with the process and the cause.
    """

    def __init__(
        self, ranks: Sequence[Mapping[str, Any]], engines: Sequence[Any], failed: Callable[[str], None]
    ) -> None:
        self._failed: Callable[[str], None] | None = failed
        self._stopped: dict[int, float] = {}  # pid -> since when
        self._names: dict[int, str] = {}  # by pid
        self._files: dict[int, int] = {}  # pid -> pidfd: a number of a process may be given again
        for index, rank in enumerate(ranks):
            if (rank["host"], rank["pid_space"]) == (host_name(), pid_space()):
                self._names[rank["pid"]] = f"rank {index} of {len(ranks)}"
        self._engines = {one.pid: one for one in engines if one.pid not in self._names}
        for index, pid in enumerate(self._engines):
            self._names[pid] = f"the process of engine {index} of {len(self._engines)}, above its ranks,"
        for pid in (*self._engines, *self._names):
            with contextlib.suppress(OSError, AttributeError):  # it has ended already; Linux only
                if pid not in self._files:
                    self._files[pid] = os.pidfd_open(pid)
        # Without the names of this process: it may be the parent, and processes that it forks have its memory.
        self._shared = {
            name for pid in self._files for name in (*shared_by(pid), *shared_by(_parent(pid)))
        } - shared_by(os.getpid())
        for pid, file in self._files.items():
            asyncio.get_running_loop().add_reader(file, self._has_ended, pid)
        self._task = asyncio.get_running_loop().create_task(self._look())

    def _has_ended(self, pid: int) -> None:
        asyncio.get_running_loop().remove_reader(self._files[pid])
        name = _signal_of(pid)
        if (
            not name and pid in self._engines and (code := self._engines[pid].exitcode or 0) < 0
        ):  # vLLM has asked for it
            name = signal.Signals(-code).name
        self._tell(
            pid, f"was ended by {name}" if name else "has ended: it was killed, or has failed, and its log says which"
        )

    def look(self) -> None:
        """Notice processes that have ended, engines first: an engine ends its ranks."""
        for pid in self._files:
            if self._failed is not None and _stat(pid)[:1] in ([], *map(list, ENDED)):
                self._has_ended(pid)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for pid in self._files:
                if _stat(pid)[:1] != [STOPPED]:
                    self._stopped.pop(pid, None)
                elif time.monotonic() - self._stopped.setdefault(pid, time.monotonic()) >= STOPPED_SECONDS:
                    self._tell(pid, "is stopped (SIGSTOP)")

    def _tell(self, pid: int, cause: str) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            failed(f"{self._names[pid]} (process {pid}) {cause}")

    def close(self) -> None:
        """Stop watching. `release` or `kill` comes next."""
        self._failed = None
        self._task.cancel()
        for file in self._files.values():
            asyncio.get_running_loop().remove_reader(file)

    def release(self) -> None:
        """Close the files of the processes, which are a user's, and run. Called last, on any thread."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def kill(self) -> None:
        """Kill ranks that have not ended with the engine, as one that is stopped. Called last, on any thread.

        A killed process leaves its queues of vLLM in shared memory. Ranks on CPUs leave their memory of reductions at every end.
        Both are removed.
        """
        for file in self._files.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(file, signal.SIGKILL)
        self.release()
        remove(self._shared)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    """The engine's process of a rank; 0 if the rank is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _signal_of(pid: int) -> str:
    """The signal that ended a process, while its parent has not asked for it; "" where it cannot be read."""
    fields = _stat(pid)
    number = int(fields[-1]) & 0x7F if fields and fields[0] in ENDED else 0
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return ""
