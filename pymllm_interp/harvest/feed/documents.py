"""`Document` and `Pass`: records of the documents in flight, and in the next shard of a harvest."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...client.chat import RenderedPrompt

SKIPPED = b"skipped"
"""The key of a skipped document."""


@dataclass
class Document:
    """A document, and its rows so far."""

    number: int
    key: bytes
    """Result of `document_key`, or `SKIPPED`."""
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    tokens: int = 0
    nbytes: int = 0
    error: Exception | None = None
    """Reason that the document is skipped, or None."""

    def add(self, name: str, rows: Tensor) -> None:
        """Append rows of a tensor of its shard."""
        self.rows.setdefault(name, []).append(rows)
        self.nbytes += rows.nbytes

    def skip(self, error: Exception) -> None:
        """Leave it out of its shard."""
        self.error, self.key, self.nbytes = self.error or error, SKIPPED, 0
        self.rows.clear()


@dataclass
class Pass:
    """A forward pass over a document, or over a part of it."""

    document: Document
    start: int
    """Position of its first token in the document."""
    is_last: bool
    prompt: RenderedPrompt
    """Its token ids, and its embeddings."""
