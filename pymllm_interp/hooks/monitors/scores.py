"""`MonitorScores`: the scores of a monitor in one request. `RequestMonitors` takes them step by step, and decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..positions import Window, selected
from .monitor import BoundMonitor, Monitor


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
        fired: positions at which it fired, ascending.
        threshold: threshold of the monitor.
        stopped: whether it ended the request.
    """

    positions: torch.Tensor
    scores: torch.Tensor
    values: torch.Tensor
    fired: list[int]
    threshold: float
    stopped: bool = False

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
        """Inverse of `to_json`."""
        dtypes = {"positions": torch.int64, "scores": torch.float32, "values": torch.float32}
        return cls(**{**found, **{name: torch.tensor(found[name], dtype=dtype) for name, dtype in dtypes.items()}})


class ReducedScores:
    """The running reduction of a monitor's scores: see `Monitor.reduce`."""

    def __init__(self, monitor: Monitor) -> None:
        self._reduce, self._decay = monitor.reduce, monitor.decay
        self._count, self._value = 0, 0.0

    def take(self, scores: np.ndarray) -> np.ndarray:
        """[n] float32: the reduced values after each of the next scores [n]."""
        if self._reduce == "token" or not len(scores):
            return scores
        values = scores.astype(np.float64)
        first, self._count = self._count == 0, self._count + len(values)
        if self._reduce == "mean":
            sums = np.cumsum(values) + self._value
            self._value = float(sums[-1])
            return (sums / np.arange(self._count - len(values) + 1, self._count + 1)).astype(np.float32)
        if self._reduce == "max":
            values[0] = values[0] if first else max(values[0], self._value)
            values = np.maximum.accumulate(values)
        else:
            value, decay = values.item(0) if first else self._value, self._decay
            for i, score in enumerate(values.tolist()):
                value = decay * value + (1 - decay) * score
                values[i] = value
        self._value = values.item(-1)
        return values.astype(np.float32)


class _Progress:
    """One monitor of a request."""

    def __init__(self, bound: BoundMonitor) -> None:
        self.bound, self.monitor = bound, bound.spec
        self.probe: Any = bound.spec.probe
        self.reduced = ReducedScores(bound.spec)
        self.positions: list[np.ndarray] = []
        self.scores: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.fired: list[int] = []
        self.streak = 0
        self.sent = 0
        """Number of steps with scores in the stream."""

    def take(self, first: int, dots: np.ndarray) -> list[tuple[int, float]]:
        """(position, score) of each fire among the positions from `first` on, with dot products [slots, positions]."""
        bound, end = self.bound, first + dots.shape[1]
        if dots.shape[1] == 1:
            if not any(inside(window, first) for window in bound.windows):
                return []
            positions = np.array([first])
        else:
            positions = np.flatnonzero(selected(bound.windows, end)[first:]) + first
            if not len(positions):
                return []
        scores = self.probe.scores(dots[bound.slot : bound.slot + bound.num_dots, positions - first].T)
        values = self.reduced.take(scores)
        self.positions.append(positions)
        self.scores.append(scores)
        self.values.append(values)
        above, patience = values > self.monitor.threshold, self.monitor.patience
        if not above.any():
            self.streak = 0
            return []
        fires = []
        for position, score, is_above in zip(positions.tolist(), scores.tolist(), above.tolist(), strict=True):
            self.streak = self.streak + 1 if is_above else 0
            if self.streak >= patience:
                fires.append((position, score))
        self.fired += [position for position, _ in fires]
        return fires

    def unsent(self) -> list[tuple[int, float]]:
        """(position, score) of scores that no event had."""
        found = [
            (position, score)
            for positions, scores in zip(self.positions[self.sent :], self.scores[self.sent :], strict=True)
            for position, score in zip(positions.tolist(), scores.tolist(), strict=True)
        ]
        self.sent = len(self.positions)
        return found

    def result(self, stopped: bool) -> MonitorScores:
        parts = self.positions or [np.zeros(0, np.int64)], self.scores or [_NONE], self.values or [_NONE]
        positions, scores, values = (torch.from_numpy(np.concatenate(part)) for part in parts)
        return MonitorScores(positions, scores, values, self.fired, self.monitor.threshold, stopped)


_NONE = np.zeros(0, np.float32)


def inside(window: Window, position: int) -> bool:
    """Whether a window has a position."""
    offset = position - window.start
    return offset >= 0 and offset % window.step == 0 and (window.stop is None or position < window.stop)


@dataclass
class RequestMonitors:
    """The monitors of one request, on the engine's thread.

    Attributes:
        acted: slot of a flag -> first position at which its ops act; flags that were set since the last `take_acted`.
        calls: calls of callers' functions that are due.
        stopped_by: name of the monitor that ends the request, or None.
        stop_at: position at which it fired.
    """

    bound: Sequence[BoundMonitor]
    request_id: str
    prompt_len: int
    acted: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[Callable[[MonitorFire], Any], MonitorFire]] = field(default_factory=list)
    stopped_by: str | None = None
    stop_at: int | None = None

    def __post_init__(self) -> None:
        self._all = [_Progress(bound) for bound in self.bound]
        self._next, self._pending = 0, {bound.flag for bound in self.bound if bound.flag is not None}

    @property
    def may_act(self) -> bool:
        """Whether ops wait for a monitor to fire: the next step then depends on the scores of this one."""
        return bool(self._pending)

    def take(self, first: int, dots: np.ndarray) -> None:
        """Take the dot products [slots, positions] of a step, of the positions from `first` on. Known ones are left out."""
        skipped = max(self._next - first, 0)
        if skipped >= dots.shape[1]:
            return
        first, dots = first + skipped, dots[:, skipped:]
        self._next = first + dots.shape[1]
        for own in self._all:
            if fires := own.take(first, dots):
                self._act(own, fires)

    def _act(self, own: _Progress, fires: list[tuple[int, float]]) -> None:
        monitor, (position, _) = own.monitor, fires[0]
        if monitor.then == "stop" and (self.stop_at is None or position < self.stop_at):
            self.stop_at, self.stopped_by = position, own.bound.name
        if own.bound.flag in self._pending:
            self._pending.discard(own.bound.flag)
            assert own.bound.flag is not None
            self.acted[own.bound.flag] = max(position + 1, self.prompt_len)
        if callable(monitor.then):
            self.calls += [(monitor.then, MonitorFire(self.request_id, own.bound.name, *fire)) for fire in fires]

    def take_acted(self) -> dict[int, int]:
        """`acted`, once."""
        acted, self.acted = self.acted, {}
        return acted

    def unsent(self) -> dict[str, list[tuple[int, float]]]:
        """Name -> (position, score) of the scores since the last call."""
        return {own.bound.name: found for own in self._all if (found := own.unsent())}

    def results(self) -> Mapping[str, MonitorScores]:
        """Name -> scores of all positions."""
        return {own.bound.name: own.result(own.bound.name == self.stopped_by) for own in self._all}
