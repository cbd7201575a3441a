"""`Liveness`: ends an engine process that is stuck. The restart policy of the server follows.

| stuck | means |
|---|---|
| the message loop | two questions in a row had no answer, each for half of `engine_message_seconds` |
| a step | requests wait or run, and for `engine_step_seconds` no step, command or block of a trace has ended |

A block of a trace has its own watchdog, `trace_step_timeout`, which ends its request. A step counts as stuck only if the
block outlives that as well, as native code can.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ...wire import messages as m
from ..settings import ServeLimits
from .call import EngineDiedError

logger = logging.getLogger("pymllm_interp.server")


class WatchedEngine(ABC):
    """An engine process that `Liveness` asks and ends."""

    process: asyncio.subprocess.Process | None = None
    info: dict[str, Any] | None

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether calls can be made."""

    @abstractmethod
    async def ask(self, make: Callable[[int], m.ToEngine]) -> Any:
        """The answer to a call. Raises EngineDiedError."""

    def kill(self) -> None:
        """End the engine process at once. Its end is handled like any other."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


class Liveness:
    """Asks the engine process how far it is.

    Args:
        engine: the process.
        limits: time limits of the engine.
    """

    def __init__(self, engine: WatchedEngine, limits: ServeLimits) -> None:
        self._engine, self._limits = engine, limits
        self._why = ""
        self._stuck: asyncio.subprocess.Process | None = None
        self._forget()

    @property
    def stuck(self) -> str:
        """Description of the stuck part, until the process has ended; empty if none is."""
        process = self._engine.process  # another one after a restart, which may take less than a pause
        return self._why if process is not None and process is self._stuck and process.returncode is None else ""

    def _forget(self) -> None:
        self._unanswered, self._progress, self._since = 0, "", time.monotonic()

    async def watch(self) -> None:
        """Watch the engine process until cancelled."""
        limits = self._limits
        pause = min(5.0, limits.engine_message_seconds / 4, limits.engine_step_seconds / 4)
        while True:
            began = time.monotonic()
            await asyncio.sleep(pause)
            if time.monotonic() - began > 2 * pause:  # this process did not run, and may be not the engine's either
                self._forget()
            if not self._engine.ready:
                self._forget()
                continue
            try:
                await self._look()
            except EngineDiedError:
                self._forget()

    async def _look(self) -> None:
        half = self._limits.engine_message_seconds / 2
        try:
            found = await asyncio.wait_for(self._engine.ask(m.AskProgress), half)
        except TimeoutError:
            self._unanswered += 1
            if self._unanswered == 2:  # one may be unanswered because this process did not run
                self._end(f"its message loop has not answered for {2 * half:g} s (engine_message_seconds)")
            return
        self._unanswered = 0
        now = time.monotonic()
        if not found["busy"] or found["progress"] != self._progress:
            self._progress, self._since = found["progress"], now
        elif now - self._since > self._allowed(found["in_block"]):
            self._end(f"its engine has ended no step for {now - self._since:.0f} s (engine_step_seconds)")

    def _allowed(self, in_block: bool) -> float:
        """Seconds that a step may take."""
        most = self._limits.engine_step_seconds
        if not in_block or self._engine.info is None:
            return most
        block = self._engine.info["limits"]["trace_step_timeout"]
        return float("inf") if block is None else most + block

    def _end(self, why: str) -> None:
        self._why, self._stuck = why, self._engine.process
        self._forget()
        logger.error("the engine process is stuck, and is ended: %s", why, extra={"event": "engine_stuck"})
        self._engine.kill()
