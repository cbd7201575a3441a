"""Results and errors of a harvest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
