"""`ReplicaProcess`: starts an engine process that listens for fronts, and ends it when it is stuck. Used on one event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import zmq.asyncio

from ...wire import messages as m
from ...wire.failures import EngineError, Failure
from ..settings import EngineSettings, ServeSettings
from .call import Call, EngineDiedError
from .link import Link, LinkOwner
from .liveness import Liveness, WatchedEngine
from .owned_folders import OwnedFolder
from .roster import LinkKeys, Replica
from .start import StartingProcess, process_settings

logger = logging.getLogger(__name__)
INLINE_BYTES = 1 << 62
"""Captured states of any size travel over links: fronts may be on other machines."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings(EngineSettings):
    """Settings shared by the engine processes of all replicas."""

    keys: LinkKeys

    @classmethod
    def of(cls, serve: ServeSettings, keys: LinkKeys) -> ReplicaSettings:
        """The part of a server's settings that its replicas need."""
        return cls(keys=keys, **{one.name: getattr(serve, one.name) for one in fields(EngineSettings)})


class ReplicaProcess(LinkOwner, WatchedEngine):
    """One engine process.

    Args:
        host: address of this machine that it listens on.
        without: prefixes of environment variables that the process does not get.
    """

    def __init__(self, settings: ReplicaSettings, name: str, host: str, without: tuple[str, ...] = ()) -> None:
        self._settings, self.name, self._host, self._without = settings, name, host, without
        self.info: dict[str, Any] | None = None
        self._owned = OwnedFolder()
        self._starting: StartingProcess | None = None
        self._context = zmq.asyncio.Context()
        self._link: Link | None = None
        self._watcher: asyncio.Task[Any] | None = None

    async def start(self) -> Replica:
        """Start the process, and wait until its model is loaded.

        Raises:
            EngineError: an error of its model or engine.
            EngineDiedError: it just ended.
        """
        own = self._settings
        reading, writing = os.pipe()
        replica = {
            "name": self.name, "host": self._host, "front_key": own.keys.public, "announce": writing,
            "silence": own.limits.replica_silence_seconds,
        }  # fmt: skip
        folder = self._owned.path
        settings = process_settings(own, folder, store=str(folder), inline_bytes=INLINE_BYTES, replica=replica)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(self._without)}
        try:
            starting = self._starting = await StartingProcess.start(
                settings, own.limits.engine_start_seconds, pass_fds=(writing,), env=environment
            )
            self.process = process = starting.process
        finally:
            os.close(writing)
        with os.fdopen(reading) as file:
            line = await asyncio.to_thread(file.readline)
        if not line:
            status = await process.wait()
            raise EngineDiedError(f"replica {self.name} ended with status {status} before it was ready")
        found = json.loads(line)
        if "failure" in found:
            await process.wait()
            raise EngineError(Failure(**found["failure"]))
        starting.is_ready()
        replica = Replica.of(found)
        self._link = Link(
            replica, own.keys, self, self._context, own.limits.replica_silence_seconds, own.limits.max_queued_bytes
        )
        self._watcher = asyncio.create_task(Liveness(self, own.limits).watch())
        return replica

    async def wait(self) -> int:
        """Wait until the process has ended. Returns its status."""
        assert self.process is not None
        return await self.process.wait()

    @property
    def ready(self) -> bool:
        """Whether the process runs. One that is stuck does, too."""
        return self.process is not None and self.process.returncode is None and self.info is not None

    async def ask(self, make: Callable[[int], m.ToEngine]) -> Any:
        """The answer to a question, however long it takes. Raises Exception: the answer of the process."""
        assert self._link is not None
        while True:
            try:
                if self._link.up:
                    return await self._link.ask(make)
            except EngineDiedError:
                pass  # the link is opened again, if the process lives
            await asyncio.sleep(0.05)

    async def num_running(self) -> int:
        """Requests and traces that run or wait."""
        stats = await self.ask(m.AskStats)
        return sum(stats[name] for name in ("running", "waiting", "swapped", "traces"))

    async def close(self) -> None:
        """End the process, and remove its files."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._link is not None:
            await self._link.close("its process was ended")
        self.kill()
        if self.process is not None:
            await self.process.wait()
        self._context.destroy(linger=0)
        if self._starting is not None:
            self._starting.close()
        self._owned.remove()

    # -- callbacks of its link -----------------------------------------------------------------

    async def opened(self, link: Link) -> None:
        """Keep the process's description of itself."""
        assert link.ready is not None
        self.info = link.ready.info

    def lost(self, link: Link, calls: list[Call], why: str) -> None:
        """Fail all open calls."""
        for call in calls:
            call.put(EngineDiedError(f"replica {self.name} does not answer: {why}"))

    def deliver(self, call: Call, message: m.FromEngine) -> None:
        """Pass a message to its call."""
        call.put(message)
