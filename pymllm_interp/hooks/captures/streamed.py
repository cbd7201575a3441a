"""`StreamedRows`: captured rows that a piece of a stream has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .activations import Activations
from .layer_rows import LayerCaptures
from .rows import CapturedRows

PART_BYTES = 1 << 20
"""Bytes of a piece, about. A position with more has a piece of its own."""


@dataclass(frozen=True, slots=True)
class StreamedRows:
    """Rows of a request that were captured since its last event (`Capture(stream=True)`).

    It holds numbers of positions, and no copy. Rows that wait for a slow client stay in the memory of the request's result.
    Who reads them copies them, on its own thread.

    Attributes:
        start: first position.
        token_ids: tokens of the positions from `start` on.
        ended: the result of a request that has ended. Its pools are part of the last piece.
    """

    sources: Sequence[CapturedRows | LayerCaptures[Any]]
    start: int
    token_ids: Sequence[int]
    ended: Activations | None = None

    def parts(self) -> Iterator[Activations]:
        """The rows in order of position, about `PART_BYTES` at a time; nothing where the captures are lost."""
        count = max(PART_BYTES // max(sum(source.streamed_bytes for source in self.sources), 1), 1)
        for first in range(0, len(self.token_ids), count):
            tokens, start = self.token_ids[first : first + count], self.start + first
            pieces = [p for source in self.sources for p in source.rows_since(start, start + len(tokens), tokens)]
            if names := {site for piece in pieces for site in piece.sites}:
                order = tuple(site for source in self.sources for site in source.order if site in names)
                yield Activations(self.sources[0].num_layers, pieces, order)
        if self.ended is not None and self.ended.error is None:
            found = Activations(self.sources[0].num_layers)
            for site in (site for source in self.sources for site in source.pooled_sites):
                own = self.ended.positions[site].clone(), self.ended.token_ids[site].clone()
                found.add(site, self.ended[site].clone(), *own)
            if found:
                yield found

    def sent(self) -> list[SentRows]:
        """The rows for another process."""
        return [SentRows(part.to_bytes(), self.named_tokens(part)) for part in self.parts()]

    def named_tokens(self, part: Activations) -> list[int]:
        """Token ids that a lens named in a part, ascending."""
        sites = {site for source in self.sources for site in source.lens_sites} & set(part)
        return torch.cat([part.indexes[site].flatten() for site in sites]).unique().tolist() if sites else []


class SentRows(NamedTuple):
    """A part of captured rows, of another process (`core.events.RowParts`)."""

    body: bytes
    """Rows as safetensors."""
    tokens: Sequence[int] = ()
    """`StreamedRows.named_tokens` of the part."""

    def parts(self) -> Iterator[Activations]:
        """The rows."""
        yield Activations.from_bytes(self.body)

    def named_tokens(self, part: Activations) -> Sequence[int]:
        """Token ids that a lens named."""
        return self.tokens
