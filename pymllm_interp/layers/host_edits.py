"""Ops and captures as functions on the rows of their requests: what a CPU runs, and passes with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .edits import INNER, LOGITS, edited, final_norm_site, stream_site, total
from .norm import rms_norm

Rows = tuple[int, int]
"""First row, and rows, of a request in a pass."""
NO_INNER: frozenset[str] = frozenset()
ALL_INNER = frozenset({*INNER, LOGITS})


class HostEdits:
    """Ops as functions: (site) -> what each of its requests does to its rows, in order.

    Args:
        by_site: site -> (rows, [rows, width] -> [rows, width]).
        taps: site -> (rows, what takes their state [rows, width]).
        num_layers: of the model.

    The rows of the logits' site are those of the head's.
    """

    def __init__(
        self,
        by_site: dict[int, list[tuple[Rows, Callable[[torch.Tensor], torch.Tensor]]]],
        taps: dict[int, list[tuple[Rows, Callable[[torch.Tensor], None]]]],
        num_layers: int,
    ) -> None:
        self.by_site, self.taps, self.num_layers = by_site, taps, num_layers
        self.final_site = final_norm_site(num_layers)
        self.inner = ALL_INNER if any(site > self.final_site for site in (*by_site, *taps)) else NO_INNER

    def rows_from(self, start: int, stop: int) -> HostEdits:
        """Those of the token rows from `start` to `stop`, which are whole requests', counted from `start`."""

        def cut(by_site: dict[int, list[Any]]) -> dict[int, list[Any]]:
            return {
                site: [((first - start, size), found) for (first, size), found in entries if start <= first < stop]
                for site, entries in by_site.items()
            }

        return HostEdits(cut(self.by_site), cut(self.taps), self.num_layers)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        ops = self.by_site.get(site)
        if ops:
            value = value.clone()
            for (start, size), op in ops:
                rows = value[0, start : start + size]
                rows.copy_(op(rows))
        return value

    def take(self, site: int, value: torch.Tensor) -> None:
        for (start, size), tap in self.taps.get(site, ()):
            tap(value[0, start : start + size])

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = total(h, delta, self, place)
        normed = rms_norm(h, weight, eps)
        return h, edited(normed, self, self.final_site) if stream_site(place) + 1 == self.final_site else normed
