"""Ops and captures from device tables, read by the kernel that adds and norms: the tables change, a captured graph does not."""

from __future__ import annotations

from typing import Protocol, Self

import torch

from ...core.model_spec import LOGITS, final_norm_site
from .codes import (
    OpTables,
)


class LogitSiteOps(Protocol):
    """Ops at the logits, which no captured pass computes."""

    def rows_from(self, start: int, stop: int) -> Self:
        """Those of the rows from `start` to `stop` of a decode pass, counted from `start`."""
        ...

    def at(self, value: torch.Tensor) -> torch.Tensor:
        """Logits [1, rows, vocab] after the ops, in fresh memory."""
        ...


class TableOps:
    """Ops and captures from tables.

    Args:
        rows, positions: [tokens] int64, each token row's row of the request table, -1 for one that declared nothing; and its
            position.
        blocks: [2, tokens] int64, each token row's block of the ring: its first element, and the one after its last. What does
            not fit in is not captured: the two are equal where nothing is.
        logits: None where there are no ops at them.
    """

    def __init__(
        self,
        tables: OpTables,
        rows: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        logits: LogitSiteOps | None = None,
    ) -> None:
        self.tables, self.rows, self.positions, self.blocks, self.logits = tables, rows, positions, blocks, logits
        self.num_layers = tables.num_layers
        self.final_site = final_norm_site(self.num_layers)
        self.inner = tables.inner if logits is None else tables.inner | {LOGITS}

    def rows_from(self, start: int, stop: int) -> TableOps:
        """Those of the token rows from `start` to `stop` of a decode pass, in memory of their own."""
        rows, positions, blocks = self.rows[start:stop], self.positions[start:stop], self.blocks[:, start:stop]
        logits = None if self.logits is None else self.logits.rows_from(start, stop)
        return TableOps(self.tables, rows.clone(), positions.clone(), blocks.clone(), logits)

    def with_logits(self, logits: LogitSiteOps | None) -> TableOps:
        """The same in a pass with these ops at its logits."""
        return TableOps(self.tables, self.rows, self.positions, self.blocks, logits)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        from .kernels import edit

        if site >= self.tables.ops.shape[1]:
            return value if self.logits is None else self.logits.at(value)
        return edit(value, site, self)

    def capture(self, site: int, value: torch.Tensor) -> None:
        from .kernels import capture

        capture(value, site, self)

    def add_rms_norm(
        self, residual_add: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from .kernels import edit_add_rms_norm

        return edit_add_rms_norm(h, delta, weight, eps, residual_add, self)
