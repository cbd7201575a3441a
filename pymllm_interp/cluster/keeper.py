"""`Keeper`: the actor of one replica. It starts an engine process in its placement-group bundle, and starts it again when it ends.

Ray starts the keeper again if it or its node is lost. The engine process ends with its keeper.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ..harvest.on_ray.ray_version import load_ray
from ..server.engines.replica_process import ReplicaProcess, ReplicaSettings

NOT_INHERITED = ("RAY_",)
"""Prefixes of environment variables that engine processes do not get: code of traces is not connected to Ray by them."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before an engine process is started again; twice as long each time that it fails."""


class Keeper:
    """Keeps one engine process running.

    Args:
        name: name of the replica.
    """

    def __init__(self, settings: ReplicaSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._process: ReplicaProcess | None = None
        self._found: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._starts = 0

    async def state(self) -> dict[str, Any]:
        """`replica`: fields of its `Replica`, while it serves; `failure`: why the last start failed; `starts`; `node`;
        `pid`."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep())
        node = load_ray().get_runtime_context().get_node_id()
        return {"replica": None, "failure": "", **self._found, "starts": self._starts, "node": node, "pid": os.getpid()}

    async def num_running(self) -> int:
        """Requests and traces of the replica; 0 if it does not serve."""
        process = self._process
        return await process.num_running() if process is not None and process.ready else 0

    async def restart(self) -> None:
        """End the engine process; the next one is started at once."""
        self._found = {}
        if self._process is not None:
            self._process.kill()

    async def _keep(self) -> None:
        pause = FIRST_PAUSE
        while True:
            host = load_ray().util.get_node_ip_address()
            process = self._process = ReplicaProcess(self._settings, self._name, host, NOT_INHERITED)
            try:
                replica = await process.start()
                self._found, self._starts, pause = {"replica": vars(replica)}, self._starts + 1, FIRST_PAUSE
                await process.wait()
                self._found = {}
            except Exception as error:  # data, for the director
                self._found = {"failure": f"{type(error).__name__}: {error}"}
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            finally:
                await process.close()
