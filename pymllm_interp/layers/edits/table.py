"""Ops and captures that kernels read from device tables: the tables change between replays of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.forward_batch import Delta
from ...core.model_spec import LOGITS, final_norm_site
from ...core.norm_kind import Norm
from ...kernels.edit_codes import MAX_SCORES, OpTables, RowEncoder, TokenRows
from .base import add_norm_apart, sites_of
from .host import HostOps


class TableOps:
    """Ops and captures of a pass, from device tables.

    Args:
        rows: [tokens] int64, each token row's row of the request table; -1 for a request that declared nothing.
        positions: [tokens] int64.
        blocks: [2, tokens] int64, start and stop of each token row's record in the ring, in elements. Captures beyond the stop
            are skipped; start and stop are equal for rows without captures.
        flags: [tokens] int64, memory for the flags of gates. None: memory of the pass's own.
        scores: [MAX_SCORES, tokens] float32, memory for dot products. None: memory of the pass's own.
        features: [columns, tokens], memory for the results of encoders (`TokenRows`). None without.
        logits: the ops at the logits, which captured passes leave out; None without.
    """

    def __init__(
        self,
        tables: OpTables,
        rows: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        flags: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        logits: HostOps | None = None,
    ) -> None:
        flags = torch.zeros_like(rows) if flags is None else flags
        scores = rows.new_zeros(MAX_SCORES, len(rows), dtype=torch.float32) if scores is None else scores
        self.token_rows = TokenRows(rows, positions, blocks, flags, scores, features)
        self.tables, self.logits = tables, logits
        self.num_layers = tables.num_layers
        self.final_site = final_norm_site(self.num_layers)
        self.inner = tables.inner if logits is None else tables.inner | {LOGITS}

    def first_rows(self, count: int, logits: HostOps | None = None) -> TableOps:
        """The ops and captures of the first token rows, in the same memory, with these ops at the logits."""
        return TableOps(self.tables, *(_cut(tensor, 0, count) for tensor in self.token_rows), logits=logits)  # pyright: ignore[reportArgumentType]

    def rows_from(self, start: int, stop: int) -> TableOps:
        """The ops and captures of token rows `start` to `stop` of a decode pass, in separate memory. Scores are not copied."""
        cut = {name: _cut(tensor, start, stop) for name, tensor in self.token_rows._asdict().items()}
        copies: Any = [None if own is None else own if name == "scores" else own.clone() for name, own in cut.items()]
        logits = None if self.logits is None else self.logits.rows_from(start, stop)
        return TableOps(self.tables, *copies, logits=logits)

    def with_logits(self, logits: HostOps | None) -> TableOps:
        """A copy with these ops at the logits."""
        return TableOps(self.tables, *self.token_rows, logits=logits)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        from ...kernels.edit_ops import edit

        if site >= self.tables.ops.shape[1]:
            return value if self.logits is None else self.logits.at(site, value)
        encoders = self.tables.encoders.get(site, ())
        self._read([encoder for encoder in encoders if not encoder.after], value)
        value = edit(value, site, self.tables, self.token_rows)
        self._read([encoder for encoder in encoders if encoder.after], value)
        return value

    def _read(self, encoders: Sequence[RowEncoder], value: torch.Tensor) -> None:
        """Write the results of encoders for the rows of `value` [1, tokens, width] to the rows' memory."""
        rows, wanted = self.token_rows, self.tables.wanted
        for encoder in encoders:
            assert rows.features is not None and wanted is not None, "tables with encoders have both"
            encoder.read(value[0], wanted.index_select(0, rows.owners.clamp(min=0)), rows.features.T)

    def capture(self, site: int, value: torch.Tensor) -> None:
        from ...kernels.edit_ops import capture

        capture(value, site, self.tables, self.token_rows)

    def add_norm(
        self, residual_add: int, h: torch.Tensor, delta: Delta, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from ...kernels.edit_ops import edit_add_norm

        if not self.tables.encoded.isdisjoint(sites_of(residual_add, delta, self.num_layers)):
            return add_norm_apart(self, residual_add, h, delta, norm)
        return edit_add_norm(h, delta, norm, residual_add, self.tables, self.token_rows)


def _cut(tensor: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[..., start:stop]
