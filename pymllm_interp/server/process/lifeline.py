"""`Lifeline`: the engine process's end of the socket that ties it to its parent. Used before anything large is imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time

BEAT_SECONDS = 0.5
"""Seconds between progress messages to the parent during the start."""
ORDERLY_SECONDS = 10.0
"""Seconds that a serving process may take to end after its parent."""
PR_SET_PDEATHSIG = 1


class Lifeline:
    """Sends bytes to the parent while the process starts, and ends the process when the parent has ended.

    The socket is standard input. The end of the parent is the end of the stream, whatever ended it.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":  # a stopped process continues when its parent ends, and ends itself
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
        self._socket = socket.socket(fileno=os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # processes that this one starts have no end of the socket
        os.close(nothing)
        self._folder = ""
        self.ready = False

    def read_settings(self) -> str:
        """The line of JSON that the parent sends first. From then on, the parent is watched."""
        line = b""
        while not line.endswith(b"\n"):
            part = self._socket.recv(1 << 16)
            if not part:
                raise SystemExit(1)
            line += part
        self._socket.setblocking(False)
        threading.Thread(target=self._watch, name="pymllm-interp-lifeline", daemon=True).start()
        return line.decode()

    def remove_at_end(self, folder: str) -> None:
        """Remove a folder of the parent's if the parent ends first."""
        self._folder = folder

    def _watch(self) -> None:
        while True:
            readable, _, _ = select.select([self._socket], [], [], BEAT_SECONDS)
            if readable and self._ended():
                break
            if not self.ready:
                with contextlib.suppress(OSError):  # the parent does not read now, or has ended
                    self._socket.send(b".")
        if self.ready:  # the door ends the process, in order
            time.sleep(ORDERLY_SECONDS)
        self.clean()
        os._exit(1)

    def _ended(self) -> bool:
        try:
            return not self._socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def clean(self) -> None:
        """Remove the parent's folder, if the parent has ended."""
        if self._folder and self._ended():
            shutil.rmtree(self._folder, ignore_errors=True)
