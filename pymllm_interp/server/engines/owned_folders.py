"""Temporary folders of servers, each locked by its owner; folders of dead owners are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import zmq

SERVER_PREFIX = "pymllm-interp-server-"
STORE_PREFIX = "pymllm-interp-store-"


class OwnedFolder:
    """A folder for temporary files that this process holds a lock of. The kernel drops the lock when the process ends.

    Args:
        name: Name of a folder that several processes share; None makes a new one for this process.

    Attributes:
        path: The folder. Only this user can read it.
    """

    def __init__(self, name: str | None = None) -> None:
        remove_abandoned()
        while True:
            self.path = Path(
                tempfile.mkdtemp(prefix=SERVER_PREFIX) if name is None else Path(tempfile.gettempdir()) / name
            )
            self.path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if self.path.exists():  # another process may have removed it before it was locked
                    return
                os.close(self._lock)

    def address(self, name: str) -> str:
        """ZeroMQ address of a socket in the folder, for processes of this user while this process lives.

        A socket's path has at most 107 characters. A longer one is reached through the open descriptor of the folder.
        """
        path = str(self.path / name)
        if len(path.encode()) > zmq.IPC_PATH_MAX_LEN:
            path = f"/proc/{os.getpid()}/fd/{self._lock}/{name}"
        return f"ipc://{path}"

    def remove(self) -> None:
        """Remove the folder. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned() -> None:
    """Remove this user's folders without a live owner."""
    for prefix in (SERVER_PREFIX, STORE_PREFIX):
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # another user's, no folder, or its owner lives
                lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(lock).st_uid == os.getuid():
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
