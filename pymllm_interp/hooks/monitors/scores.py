"""`MonitorScores`: the scores of a monitor in one request, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch


class MonitorFire(NamedTuple):
    """A position at which a monitor fired."""

    request_id: str
    name: str
    position: int
    score: float


@dataclass
class MonitorScores:
    """The scores of a monitor in one request.

    Attributes:
        positions: [n] int64, the positions that were scored, ascending.
        scores: [n] float32, the score of each.
        values: [n] float32, values that were compared with the threshold: see `Monitor.reduce`.
        fired_at: [m] int64, the positions at which it fired, ascending.
        threshold: threshold of the monitor.
        stopped: whether it ended the request.
    """

    positions: torch.Tensor
    scores: torch.Tensor
    values: torch.Tensor
    fired_at: torch.Tensor
    threshold: float
    stopped: bool = False

    @cached_property
    def fired(self) -> list[int]:
        """`fired_at` as a list."""
        return self.fired_at.tolist()

    def __repr__(self) -> str:
        highest = f", highest {self.values.max().item():.3g}" if len(self.values) else ""
        fired = f", fired at {self.fired[:4]}{'...' if len(self.fired) > 4 else ''}" if self.fired else ""
        return f"MonitorScores({len(self.scores)} positions, threshold {self.threshold:g}{highest}{fired})"

    def to_json(self) -> dict[str, Any]:
        """The fields, with lists in place of tensors."""
        lists = {name: getattr(self, name).tolist() for name in ("positions", "scores", "values")}
        return {**lists, "fired": self.fired, "threshold": self.threshold, "stopped": self.stopped}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> MonitorScores:
        """Inverse of `to_json`. null, which JSON has for a number that is not finite, is NaN."""
        dtypes = {"positions": torch.int64, "scores": torch.float32, "values": torch.float32, "fired": torch.int64}
        lists = {name: [math.nan if value is None else value for value in found[name]] for name in dtypes}
        positions, scores, values, fired = (torch.tensor(lists[name], dtype=dtype) for name, dtype in dtypes.items())
        return cls(positions, scores, values, fired, found["threshold"], found.get("stopped", False))


def scores_from_json(
    found: Mapping[str, Sequence[tuple[int, float | None]]] | None,
) -> dict[str, list[tuple[int, float]]] | None:
    """(position, score) of monitors by name; null is NaN, as in `MonitorScores.from_json`."""
    return (
        found
        if found is None
        else {
            name: [(position, math.nan if score is None else score) for position, score in pairs]
            for name, pairs in found.items()
        }
    )
