"""Ops and captures as functions on the rows of their requests: what a CPU runs, and passes with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...core.model_spec import INNER_SITES, LOGITS, final_norm_site, input_add
from ..norm import rms_norm
from .base import apply_and_capture, residual_sum

Rows = tuple[int, int]
"""First row, and rows, of a request in a pass."""


class Added(NamedTuple):
    """An op that adds a vector to rows. Those of requests side by side are one addition."""

    vector: torch.Tensor
    """[width] float32, on the CPU."""
    touched: torch.Tensor
    """[rows] bool, on the CPU."""
    everywhere: bool
    """All of them are."""


Op = Added | Callable[[torch.Tensor], torch.Tensor]
"""Or any function, [rows, width] -> [rows, width]."""
NO_INNER: frozenset[str] = frozenset()
ALL_INNER = frozenset({*INNER_SITES, LOGITS})


class HostOps:
    """Ops as functions: (site) -> what each of its requests does to its rows.

    Args:
        by_site: site -> (rows, op), first the first op of each request there, in batch order, then the second ones, and so on.
        taps: site -> (rows, what takes their state [rows, width]).
        num_layers: of the model.

    The rows of the logits' site are those of the head's.
    """

    def __init__(
        self,
        by_site: dict[int, list[tuple[Rows, Op]]],
        taps: dict[int, list[tuple[Rows, Callable[[torch.Tensor], None]]]],
        num_layers: int,
    ) -> None:
        self.by_site, self.taps, self.num_layers = by_site, taps, num_layers
        self.final_site = final_norm_site(num_layers)
        self.inner = ALL_INNER if any(site > self.final_site for site in (*by_site, *taps)) else NO_INNER

    def rows_from(self, start: int, stop: int) -> HostOps:
        """Those of the token rows from `start` to `stop`, which are whole requests', counted from `start`."""

        def cut(by_site: dict[int, list[Any]]) -> dict[int, list[Any]]:
            return {
                site: [((first - start, size), found) for (first, size), found in entries if start <= first < stop]
                for site, entries in by_site.items()
            }

        return HostOps(cut(self.by_site), cut(self.taps), self.num_layers)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        ops = self.by_site.get(site)
        if ops:
            value = value.clone()
            side_by_side: list[Added] = []
            end = 0
            for (start, size), op in ops:
                if side_by_side and (start != end or not isinstance(op, Added)):
                    _add(value[0, :end], side_by_side)
                    side_by_side = []
                if isinstance(op, Added):
                    side_by_side.append(op)
                else:
                    rows = value[0, start : start + size]
                    rows.copy_(op(rows))
                end = start + size
            if side_by_side:
                _add(value[0, :end], side_by_side)
        return value

    def capture(self, site: int, value: torch.Tensor) -> None:
        for (start, size), tap in self.taps.get(site, ()):
            tap(value[0, start : start + size])

    def add_rms_norm(
        self, residual_add: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = residual_sum(h, delta, self, residual_add)
        normed = rms_norm(h, weight, eps)
        is_last = residual_add == input_add(self.num_layers)
        return h, apply_and_capture(normed, self, self.final_site) if is_last else normed


def _add(value: torch.Tensor, ops: Sequence[Added]) -> None:
    """Let `ops` act on the last rows of `value` [rows, width], side by side, in place."""
    count = sum([len(op.touched) for op in ops])
    rows = value[-count:]
    added = ops[0].vector if len(ops) == 1 else torch.cat([op.vector.expand(len(op.touched), -1) for op in ops])
    summed = rows.float() + added.to(rows.device)
    if not all(op.everywhere for op in ops):
        touched = torch.cat([op.touched for op in ops])[:, None].to(rows.device)
        summed = torch.where(touched, summed.to(rows.dtype), rows)
    rows.copy_(summed)
