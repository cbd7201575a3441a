"""`HarvestProgress`: a progress bar on standard error."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class HarvestProgress:
    """Documents, tokens and GB/s, shown while it is entered.

    Args:
        enabled: show it; None: only if standard error is a terminal.
        total: documents of the input; None where unknown.
        done: documents that earlier runs harvested.
    """

    def __init__(self, enabled: bool | None, total: int | None, done: int) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.completed:,} documents"), BarColumn(), TextColumn("{task.fields[tokens]:,} tokens"),
            TextColumn("{task.fields[speed]:.2f} GB/s"), TimeElapsedColumn(),
            console=console, disable=not (console.is_terminal if enabled is None else enabled),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, tokens=0, speed=0.0)
        self._started, self._tokens, self._bytes = time.perf_counter(), 0, 0

    def __enter__(self) -> HarvestProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def advance(self, tokens: int, nbytes: int) -> None:
        """Count a document.

        Args:
            tokens: of the document.
            nbytes: bytes of its rows.
        """
        self._tokens, self._bytes = self._tokens + tokens, self._bytes + nbytes
        speed = self._bytes / (time.perf_counter() - self._started) / 1e9
        self._bar.update(self._task, advance=1, tokens=self._tokens, speed=speed)
