"""Progress of a harvest on standard error (a bar on a terminal, lines elsewhere), its result and its error."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


class HarvestProgress:
    """Documents, tokens, rates and the time left, shown while it is entered.

    Args:
        enabled: show it; None: a bar if standard error is a terminal, and otherwise lines, the first after some seconds.
        total: documents of the input; None if unknown.
        done: documents that earlier runs harvested.

    Attributes:
        workers: number of computing workers, if there are several.
    """

    workers = 0

    def __init__(self, enabled: bool | None, total: int | None, done: int) -> None:
        console = Console(stderr=True)
        self._total, self._done, self._first = total, done, done
        self._lines = enabled is not False and not console.is_terminal
        self._last_line = bool(enabled)  # asked for: also at the end of a short run
        self._bar = Progress(
            TextColumn("{task.completed:,} documents"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=console, disable=enabled is False or self._lines,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, rate="")
        self._started = self._shown = time.perf_counter()
        self._tokens = self._bytes = self._skipped = 0

    def __enter__(self) -> HarvestProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
        if self._lines and self._last_line:
            self._print_line(time.perf_counter())

    def advance(self, tokens: int, nbytes: int, skipped: int = 0, documents: int = 1) -> None:
        """Count a document, or several.

        Args:
            tokens: number of tokens of the documents.
            nbytes: bytes of their rows.
            skipped: number of the documents that failed and are omitted.
        """
        self._done, self._skipped = self._done + documents, self._skipped + skipped
        self._tokens, self._bytes = self._tokens + tokens, self._bytes + nbytes
        now = time.perf_counter()
        if not self._lines:
            self._bar.update(self._task, advance=documents, rate=self._rate(now))
        elif now - self._shown >= SECONDS_BETWEEN_LINES:
            self._print_line(now)
            self._last_line = True

    def _rate(self, now: float) -> str:
        seconds = max(now - self._started, 1e-9)
        rate = (
            f"{self._tokens:,} tokens, {self._tokens / seconds:,.0f} a second, {self._bytes / seconds / 1e9:.2f} GB/s"
        )
        rate = f"{rate}, {self._skipped} skipped" if self._skipped else rate
        return f"{rate}, {self.workers} workers" if self.workers else rate

    def _print_line(self, now: float) -> None:
        self._shown = now
        of_all = "" if self._total is None else f" of {self._total:,}"
        print(f"{self._done:,}{of_all} documents, {self._rate(now)}{self._time_left(now)}", file=sys.stderr, flush=True)

    def _time_left(self, now: float) -> str:
        new = self._done - self._first
        if self._total is None or not new or self._done >= self._total:
            return ""
        seconds = (now - self._started) / new * (self._total - self._done)
        return f", {timedelta(seconds=round(seconds))} left"


class HarvestError(RuntimeError):
    """A harvest stopped before the end of its input. The message has the reason, the kept part, and how to resume."""


@dataclass(frozen=True)
class HarvestResult:
    """The contents of a harvest's folder, and the additions of this run."""

    folder: Path
    shards: int
    documents: int
    """Number of documents in the folder, including earlier runs, without skipped ones."""
    tokens: int
    rows: dict[str, int]
    """Number of rows by site."""
    bytes: int
    new_documents: int
    """Computed by this run."""
    new_bytes: int
    """Written by this run."""
    seconds: float
    """Duration of this run, until all shards were on disk."""
    skipped: dict[int, str]
    """Documents that `on_error="skip"` left out, including earlier runs: index in the input -> the error."""

    @property
    def gb_per_second(self) -> float:
        """Write rate of this run, in 1e9 bytes a second."""
        return self.new_bytes / self.seconds / 1e9
