"""Ops and captures as functions on rows: for passes on a CPU, and for passes with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.forward_batch import Delta, ParallelDelta
from ...core.model_spec import INNER_SITES, LOGITS, attention_add, final_norm_site
from ...core.norm_kind import Norm
from ...utils.integers import as_integers
from .base import add_norm_apart

RowRange = tuple[int, int]
"""(first row, number of rows) of a request in a pass."""


class Added(NamedTuple):
    """An op that adds a vector to rows. Ops of adjacent requests are computed as one addition."""

    vector: torch.Tensor
    """[width] float32, on the CPU."""
    selected: torch.Tensor
    """[rows] bool, on the CPU: the rows that it acts on."""
    all_selected: bool


RowFunction = Added | Callable[[torch.Tensor], torch.Tensor]
"""An op on a request's rows: [rows, width] -> [rows, width], or an addition."""
CaptureSink = Callable[[torch.Tensor], None]
"""Receives a request's rows [rows, width]."""


class RowSink(NamedTuple):
    """What keeps a request's one row as it is. The rows of all requests are one view of NumPy's.

    Attributes:
        keep: takes `column`, `ordinal` and the row [width], as integers.
    """

    keep: Callable[[int, int, np.ndarray], None]
    column: int
    ordinal: int


NO_INNER: frozenset[str] = frozenset()
ALL_INNER = frozenset({*INNER_SITES, LOGITS})


class HostOps:
    """Ops and captures of a pass as functions, by site.

    Args:
        by_site: site -> (rows, op): the first op of each request in batch order, then the second ones, and so on.
        capture_sinks: site -> (rows, sink).
        num_layers: of the model.

    Rows are token rows; at the logits' site they are rows of the logits.
    """

    def __init__(
        self,
        by_site: dict[int, list[tuple[RowRange, RowFunction]]],
        capture_sinks: dict[int, list[tuple[RowRange, CaptureSink | RowSink]]],
        num_layers: int,
    ) -> None:
        self.by_site, self.capture_sinks, self.num_layers = by_site, capture_sinks, num_layers
        self.final_site = final_norm_site(num_layers)
        sites = {*by_site, *capture_sinks}
        self._adds = {min(site, self.final_site - 1) // 2 for site in sites if site <= self.final_site}  # a delta, a sum
        inner = [site - self.final_site - 1 for site in sites if site > self.final_site]
        self._layers_within = {place // len(INNER_SITES) for place in inner}
        self.inner = ALL_INNER if any(site > self.final_site for site in (*by_site, *capture_sinks)) else NO_INNER

    def rows_from(self, start: int, stop: int) -> HostOps:
        """The ops and captures of the token rows from `start` to `stop`, which are whole requests."""

        def cut(by_site: dict[int, list[Any]]) -> dict[int, list[Any]]:
            return {
                site: [((first - start, size), found) for (first, size), found in entries if start <= first < stop]
                for site, entries in by_site.items()
            }

        return HostOps(cut(self.by_site), cut(self.capture_sinks), self.num_layers)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        ops = self.by_site.get(site)
        if ops:
            value = value.clone()
            adjacent: list[Added] = []
            end = 0
            for (start, size), op in ops:
                if adjacent and (start != end or not isinstance(op, Added)):
                    _add(value[0, :end], adjacent)
                    adjacent = []
                if isinstance(op, Added):
                    adjacent.append(op)
                else:
                    rows = value[0, start : start + size]
                    rows.copy_(op(rows))
                end = start + size
            if adjacent:
                _add(value[0, :end], adjacent)
        return value

    def capture(self, site: int, value: torch.Tensor) -> None:
        states = None
        for (start, size), sink in self.capture_sinks.get(site, ()):
            if isinstance(sink, RowSink):
                if states is None:
                    states = as_integers(value[0].detach().cpu())
                sink.keep(sink.column, sink.ordinal, states[start])
            else:
                sink(value[0, start : start + size])

    def acts_at(self, residual_add: int, delta: Delta) -> bool:
        """Whether there is an op or a capture at a residual add."""
        parallel = isinstance(delta, ParallelDelta) and residual_add - 1 in self._adds
        return parallel or residual_add in self._adds

    def acts_within(self, layer: int) -> bool:
        """Whether there is an op or a capture in a layer, behind its input and before its output."""
        return layer in self._layers_within or attention_add(layer) in self._adds

    def add_norm(
        self, residual_add: int, h: torch.Tensor, delta: Delta, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.acts_at(residual_add, delta):
            return norm.add_normalize(h, delta)
        return add_norm_apart(self, residual_add, h, delta, norm)


def _add(value: torch.Tensor, ops: Sequence[Added]) -> None:
    """Apply the ops of adjacent requests to the last rows of `value` [rows, width], in place."""
    counts = [op.selected.shape[0] for op in ops]
    rows = value[-sum(counts) :]
    if len(counts) == sum(counts):
        added = torch.stack([op.vector for op in ops])
    else:
        added = torch.cat([op.vector.expand(count, -1) for op, count in zip(ops, counts, strict=True)])
    summed = rows.float() + added.to(rows.device)
    if not all(op.all_selected for op in ops):
        selected = torch.cat([op.selected for op in ops])[:, None].to(rows.device)
        summed = torch.where(selected, summed.to(rows.dtype), rows)
    rows.copy_(summed)
