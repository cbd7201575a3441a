"""`MonitorScores`: the scores of a monitor in one request. `RequestMonitors` takes them step by step, and decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..positions import Window, selected
from .monitor import BoundMonitor, Monitor
from .probe import Probe


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
        """Inverse of `to_json`. null, which JSON has for a number that is not finite, is NaN."""
        dtypes = {"positions": torch.int64, "scores": torch.float32, "values": torch.float32}
        lists = {name: [math.nan if value is None else value for value in found[name]] for name in dtypes}
        return cls(**{**found, **{name: torch.tensor(lists[name], dtype=dtype) for name, dtype in dtypes.items()}})


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


class _Group:
    """Monitors of a request that are taken together: a single one, or several with equal positions and plain dot products.

    Attributes:
        scores, values: [positions, monitors] of each step.
        positions: [n] int64 or one number for each step.
        fired: positions at which each monitor fired.
        sent: number of steps with scores in the stream.
    """

    def __init__(self, bounds: Sequence[BoundMonitor]) -> None:
        self.bounds, first = bounds, bounds[0]
        self._windows, self._monitor = first.windows, first.spec
        self._probe: Any = first.spec.probe
        self._reduced = None if is_plain(first.spec) else ReducedScores(first.spec)
        self._slots = np.array([bound.slot for bound in bounds])
        self._bias = np.array([bound.spec.probe.bias[0] for bound in bounds], np.float32) if is_plain(first.spec) else 0
        self._thresholds = np.array([bound.spec.threshold for bound in bounds], np.float32)
        self._streak = 0
        self.positions: list[int | np.ndarray] = []
        self.scores: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.fired: list[list[np.ndarray]] = [[] for _ in bounds]
        self.sent = 0

    def take(self, first: int, dots: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(index, positions, scores) of each monitor that fired among the positions from `first` on.

        Args:
            dots: [slots, positions] of the request.
        """
        if dots.shape[1] == 1:  # most steps have hundreds of these
            if not any(inside(window, first) for window in self._windows):
                return []
            positions, columns = first, slice(0, 1)
        else:
            positions = np.flatnonzero(selected(self._windows, first + dots.shape[1])[first:]) + first
            if not len(positions):
                return []
            columns = positions - first
        if self._reduced is None:
            scores = values = dots[self._slots][:, columns].T + self._bias
        else:
            own = slice(self.bounds[0].slot, self.bounds[0].slot + self.bounds[0].num_dots)
            scores = self._probe.scores(dots[own, columns].T)[:, None]
            values = self._reduced.take(scores[:, 0])[:, None]
        self.positions.append(positions)
        self.scores.append(scores)
        self.values.append(values)
        above = ~(values <= self._thresholds)  # NaN is above: an edit that makes states NaN evades no monitor
        if not above.any():
            self._streak = 0
            return []
        return self._fires(np.atleast_1d(positions), scores, above)

    def _fires(
        self, positions: np.ndarray, scores: np.ndarray, above: np.ndarray
    ) -> list[tuple[int, np.ndarray, np.ndarray]]:
        if self._reduced is not None:  # a single monitor, which may have patience
            for i, is_above in enumerate(above[:, 0].tolist()):
                self._streak = self._streak + 1 if is_above else 0
                above[i] = self._streak >= self._monitor.patience
        found = []
        for column in np.flatnonzero(above.any(0)).tolist():
            fired = above[:, column]
            found.append((column, positions[fired], scores[fired, column]))
            self.fired[column].append(positions[fired])
        return found

    def unsent(self) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
        """(monitor, (positions, scores) that no event had)."""
        positions = np.concatenate([np.atleast_1d(own) for own in self.positions[self.sent :]] or [_NO_POSITIONS])
        if len(positions):
            scores = np.concatenate(self.scores[self.sent :])
            for column, bound in enumerate(self.bounds):
                yield bound.name, (positions, scores[:, column])
        self.sent = len(self.positions)

    def results(self, stopped_by: str | None) -> Iterator[tuple[str, MonitorScores]]:
        """(monitor, scores of all positions)."""
        positions = torch.from_numpy(np.concatenate([np.atleast_1d(own) for own in self.positions] or [_NO_POSITIONS]))
        nothing = [np.zeros((0, len(self.bounds)), np.float32)]
        scores, values = (torch.from_numpy(np.concatenate(part or nothing)) for part in (self.scores, self.values))
        for column, bound in enumerate(self.bounds):
            fired = np.concatenate(self.fired[column] or [_NO_POSITIONS])
            yield bound.name, MonitorScores(
                positions, scores[:, column].clone(), values[:, column].clone(), fired.tolist(), bound.spec.threshold,
                bound.name == stopped_by,
            )  # fmt: skip


_NO_POSITIONS = np.zeros(0, np.int64)


def is_plain(monitor: Monitor) -> bool:
    """Whether the score is a dot product and a bias, and compared as it is."""
    probe = monitor.probe
    linear = isinstance(probe, Probe) and len(probe.weight) == 1 and probe.activation == "identity"
    return linear and probe.out_weight is None and probe.output == "linear" and is_direct(monitor)


def is_direct(monitor: Monitor) -> bool:
    """Whether each score is compared by itself."""
    return monitor.reduce == "token" and monitor.patience == 1


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
        plain: dict[tuple[Window, ...], list[BoundMonitor]] = {}
        for bound in self.bound:
            if is_plain(bound.spec):
                plain.setdefault(bound.windows, []).append(bound)
        self._groups = [_Group(bounds) for bounds in plain.values()]
        self._groups += [_Group([bound]) for bound in self.bound if not is_plain(bound.spec)]
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
        for group in self._groups:
            for index, positions, scores in group.take(first, dots):
                self._act(group.bounds[index], positions, scores)

    def _act(self, bound: BoundMonitor, positions: np.ndarray, scores: np.ndarray) -> None:
        then, position = bound.spec.then, positions.item(0)
        if then == "stop" and (self.stop_at is None or position < self.stop_at):
            self.stop_at, self.stopped_by = position, bound.name
        if bound.flag in self._pending:
            self._pending.discard(bound.flag)
            assert bound.flag is not None
            self.acted[bound.flag] = max(position + 1, self.prompt_len)
        if callable(then):
            fires = zip(positions.tolist(), scores.tolist(), strict=True)
            self.calls += [(then, MonitorFire(self.request_id, bound.name, *fire)) for fire in fires]

    def take_acted(self) -> dict[int, int]:
        """`acted`, once."""
        acted, self.acted = self.acted, {}
        return acted

    def unsent(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name -> (positions, scores) since the last call. A long prompt has millions: they become numbers on other threads."""
        return {name: found for group in self._groups for name, found in group.unsent()}

    def results(self) -> Mapping[str, MonitorScores]:
        """Name -> scores of all positions."""
        found = {name: scores for group in self._groups for name, scores in group.results(self.stopped_by)}
        return {bound.name: found[bound.name] for bound in self.bound}
