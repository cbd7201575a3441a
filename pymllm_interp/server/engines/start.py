"""Starts engine processes, and ends those that show no sign of life while they start."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..settings import EngineSettings

logger = logging.getLogger("pymllm_interp.server")


def process_settings(own: EngineSettings, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of an engine process, as JSON.

    Args:
        folder: Folder of its files, which only this user can read.
        more: Further settings, and those that differ.
    """
    found = {one.name: getattr(own, one.name) for one in fields(EngineSettings) if one.name != "limits"}
    return found | {
        "tokenizer": str(folder / "tokenizer"), "folder": str(folder), "queued_bytes": own.limits.max_queued_bytes,
        "parent": os.getpid(), "restarts": 0, **more,
    }  # fmt: skip


class StartingProcess:
    """An engine process, and this process's end of the socket that ties the two.

    The engine process sends bytes until it is ready, from before its imports on. It ends when the socket closes.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter, watcher: asyncio.Task[None]
    ) -> None:
        self.process, self._writer, self._watcher = process, writer, watcher

    @classmethod
    async def start(cls, settings: dict[str, Any], seconds: float, **options: Any) -> StartingProcess:
        """Start the process.

        Args:
            settings: Settings of the engine process, as JSON.
            seconds: Time without a byte after which the process is killed (`engine_start_seconds`).
            options: Arguments of `asyncio.create_subprocess_exec`.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pymllm_interp.server.process", stdin=theirs.fileno(), **options
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(json.dumps(settings).encode() + b"\n")
        return cls(process, writer, asyncio.create_task(_watch(process, reader, seconds)))

    def is_ready(self) -> None:
        """The process is ready: `Liveness` watches it from now on."""
        self._watcher.cancel()

    def close(self) -> None:
        """Let the process go; if it runs, it ends."""
        self._watcher.cancel()
        self._writer.close()


async def _watch(process: asyncio.subprocess.Process, reader: asyncio.StreamReader, seconds: float) -> None:
    """Kill a process after `seconds` of silence, in two halves: in one, this process may not have run."""
    silent = 0
    while silent < 2:
        try:
            if not await asyncio.wait_for(reader.read(1 << 16), seconds / 2):
                return
            silent = 0
        except ConnectionError:
            return
        except TimeoutError:
            silent += 1
    text = "the engine process gave no sign of life for %g s while it started, and is ended (engine_start_seconds)"
    logger.error(text, seconds, extra={"event": "engine_stuck"})
    process.kill()
