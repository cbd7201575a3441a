"""`FrontKeeper` and `Keeper`: actors of one front and of one replica. Each starts its process, again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
from dataclasses import replace
from typing import Any

from ..harvest.on_ray.ray_version import NAMESPACE, load_ray
from ..server.engines.owned_folders import OwnedFolder
from ..server.engines.replica_process import ReplicaProcess, ReplicaSettings
from ..server.engines.roster import LinkKeys, Replica
from ..server.front import greeting, roster_line
from ..server.settings import ServeSettings

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.25
"""Seconds between queries of the director for replicas."""
PING_SECONDS = 1.0
"""Seconds between messages that tell the front its replicas. It answers each with a line."""
MOST_UNANSWERED = 4
STOP_SECONDS = 10.0
"""Seconds that a front may take to end after its requests."""
_URL = re.compile(rb"is served at (https?://\S+:(\d+))")


class FrontKeeper:
    """Keeps one front running.

    Args:
        cluster: the cluster's name.
        store: name of the folder that the fronts of a machine share.
    """

    def __init__(self, cluster: str, settings: ServeSettings, keys: LinkKeys, store: str) -> None:
        self._owned = OwnedFolder(store) if settings.store is None else None
        self._settings = replace(
            settings, store=settings.store or (self._owned and self._owned.path), shared_store=True
        )
        self._cluster, self._keys = cluster, keys
        self._url, self._failure, self._starts = "", "", 0
        self._process: asyncio.subprocess.Process | None = None
        self._line = b""
        self._unanswered = 0
        self._task: asyncio.Future[Any] | None = None

    async def state(self) -> dict[str, Any]:
        """`url` while it serves, `failure`, `starts`, `node` and `pid`."""
        if self._task is None:
            self._task = asyncio.gather(self._keep(), self._follow(), self._ping())
        node = load_ray().get_runtime_context().get_node_id()
        return {"url": self._url, "failure": self._failure, "starts": self._starts, "node": node, "pid": os.getpid()}

    async def stop(self) -> None:
        """End the front, after its requests."""
        if self._task is not None:
            self._task.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), self._settings.drain_seconds + STOP_SECONDS)
            except TimeoutError:
                self._process.kill()

    async def remove_store(self) -> None:
        """Remove the files of this machine's fronts, which have all ended."""
        if self._owned is not None:
            self._owned.remove()

    async def _keep(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
        while True:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pymllm_interp.server.front", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 20, env=environment,
            )  # fmt: skip
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            said = asyncio.create_task(_pass_on(process.stderr))
            process.stdin.write(greeting(self._settings, self._keys) + self._line)
            while line := await process.stdout.readline():
                self._unanswered = 0
                if found := _URL.search(line):
                    self._url, self._failure, self._starts = found[1].decode(), "", self._starts + 1
                    self._settings = replace(self._settings, port=int(found[2]))  # the next one has the same address
            self._url = ""
            self._failure = f"the front's process ended with status {await process.wait()}: {await said}"
            await asyncio.sleep(POLL_SECONDS)

    async def _follow(self) -> None:
        ray = load_ray()
        while True:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # the director is being started again
                director = ray.get_actor(f"{self._cluster}/director", namespace=NAMESPACE)
                found = await director.roster.remote()
                if found is not None:
                    self._tell(roster_line([Replica(**replica) for replica in found]))
            await asyncio.sleep(POLL_SECONDS)

    async def _ping(self) -> None:
        """Send the front the replicas periodically, and end it if it does not answer. It is started again."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if not self._url or not self._line or self._process is None:
                self._unanswered = 0
            elif self._unanswered > max(MOST_UNANSWERED, self._settings.limits.engine_message_seconds / PING_SECONDS):
                logger.error("the front at %s does not answer, and is ended", self._url)
                self._process.kill()
            else:
                self._unanswered += 1
                self._write()

    def _tell(self, line: bytes) -> None:
        if line != self._line:
            self._line = line
            self._write()

    def _write(self) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(self._line)


async def _pass_on(log: asyncio.StreamReader) -> str:
    """Write a process's log to this one's. Returns its last line."""
    last = b""
    while line := await log.readline():
        last = line
        sys.stderr.buffer.write(line)
        sys.stderr.flush()
    return last.decode(errors="replace").strip()


NOT_INHERITED = ("RAY_",)
"""Prefixes of environment variables that engine processes do not get: code of traces is not connected to Ray by them."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before an engine process is started again; twice as long each time that it fails."""


class Keeper:
    """Keeps the engine process of one replica running, in its placement-group bundle.

    Ray starts the keeper again if it or its node is lost. The engine process ends with its keeper.

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
