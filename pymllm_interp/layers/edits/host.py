"""Ops and captures as functions on rows: for passes on a CPU, and for passes with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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
"""An op on a request's rows: [rows, width] -> [rows, width], or one that is computed with other requests' ops."""


class RowTaker(Protocol):
    """Store of a request's states (`hooks/captures/rows.py`)."""

    def put(
        self, column: int, first: int, states: torch.Tensor, integers: np.ndarray | None, row: int, count: int
    ) -> None:
        """Keep states [tokens, width] of a site: `count` rows from `row` on, of the positions from `first` on.

        `integers` are the same memory, as NumPy sees it; None on a device.
        """
        ...


class RowCapture(NamedTuple):
    """Captured rows of a request at a site. `first` is the position of `row`, and `column` is the taker's."""

    row: int
    size: int
    first: int
    taker: RowTaker
    column: int


NO_INNER: frozenset[str] = frozenset()
ALL_INNER = frozenset({*INNER_SITES, LOGITS})


class HostOps:
    """Ops and captures of a pass as functions, by site.

    Args:
        by_site: site -> (rows, op): the first op of each request in batch order, then the second ones, and so on.
        captures: site -> captured rows.

    Rows are token rows; at the logits' site they are rows of the logits.
    """

    def __init__(
        self,
        by_site: dict[int, list[tuple[RowRange, RowFunction]]],
        captures: dict[int, list[RowCapture]],
        num_layers: int,
    ) -> None:
        self.by_site, self.captures, self.num_layers = by_site, captures, num_layers
        self.final_site = final_norm_site(num_layers)
        sites = {*by_site, *captures}
        self._adds = {
            min(site, self.final_site - 1) // 2 for site in sites if site <= self.final_site
        }  # a delta, a sum
        inner = [site - self.final_site - 1 for site in sites if site > self.final_site]
        self._layers_within = {place // len(INNER_SITES) for place in inner}
        self.inner = ALL_INNER if any(site > self.final_site for site in (*by_site, *captures)) else NO_INNER

    def rows_from(self, start: int, stop: int) -> HostOps:
        """The ops and captures of the rows from `start` to `stop`, with rows counted from `start`.

        Only ops with a `part` are cut: rows of all others are whole requests.
        """

        def cut(rows: RowRange, op: Any) -> list[tuple[RowRange, Any]]:
            first, end = max(rows[0], start), min(sum(rows), stop)
            if first >= end:
                return []
            whole = rows == (first, end - first)
            return [((first - start, end - first), op if whole else op.part(first - rows[0], end - rows[0]))]

        ops = {site: [own for entry in found for own in cut(*entry)] for site, found in self.by_site.items()}
        captures = {
            site: [each._replace(row=each.row - start) for each in found if start <= each.row < stop]
            for site, found in self.captures.items()
        }
        return HostOps(ops, captures, self.num_layers)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        ops = self.by_site.get(site)
        if ops:
            value = value.clone()
            together: list[tuple[RowRange, Added]] = []
            for (start, size), op in ops:
                if together and not (isinstance(op, Added) and start == sum(together[-1][0])):
                    _add(value[0], together)
                    together = []
                if isinstance(op, Added):
                    together.append(((start, size), op))
                else:
                    rows = value[0, start : start + size]
                    rows.copy_(op(rows))
            if together:
                _add(value[0], together)
        return value

    def capture(self, site: int, value: torch.Tensor) -> None:
        found = self.captures.get(site)
        if found:
            states = value[0].detach()
            integers = None if states.is_cuda else as_integers(states)  # one view for all requests
            for row, count, first, taker, column in found:
                taker.put(column, first, states, integers, row, count)

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


def _add(value: torch.Tensor, together: Sequence[tuple[RowRange, Added]]) -> None:
    """Apply the ops of adjacent requests to their rows of `value` [rows, width], in place."""
    ops, counts = [op for _, op in together], [count for (_, count), _ in together]
    first = together[0][0][0]
    rows = value[first : first + sum(counts)]
    if len(counts) == sum(counts):
        added = torch.stack([op.vector for op in ops])
    else:
        added = torch.cat([op.vector.expand(count, -1) for op, count in zip(ops, counts, strict=True)])
    summed = rows.float() + added.to(rows.device)
    if not all(op.all_selected for op in ops):
        selected = torch.cat([op.selected for op in ops])[:, None].to(rows.device)
        summed = torch.where(selected, summed.to(rows.dtype), rows)
    rows.copy_(summed)
