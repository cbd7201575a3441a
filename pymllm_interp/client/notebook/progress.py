"""`CallProgress`: a bar for calls that run many requests."""

from __future__ import annotations

import time
from typing import Any

SECONDS_BEFORE = 2.0
"""Seconds until a call shows a progress bar."""


class CallProgress:
    """A progress bar on standard error, or in a notebook's output, shown while it is entered.

    Args:
        enabled: True shows the bar at once, False never. None shows it in notebooks and on terminals, after two seconds.
        total: number of parts of the call.
        what: word before the bar.
    """

    def __init__(self, enabled: bool | None, total: int, what: str) -> None:
        self._enabled, self._total, self._what = enabled, total, what
        self._started, self._done = time.perf_counter(), 0
        self._bar: Any = None

    def __enter__(self) -> CallProgress:
        if self._enabled:
            self._show()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """Count a part that has ended."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(0, completed=self._done)
        elif self._enabled is None and time.perf_counter() - self._started >= SECONDS_BEFORE:
            self._show()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        if self._enabled is None and not (console.is_terminal or console.is_jupyter):
            self._enabled = False
            return
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._bar.add_task(self._what, total=self._total, completed=self._done)
        self._bar.start()
