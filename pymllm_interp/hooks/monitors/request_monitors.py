"""`RequestMonitors`: takes the dot products of a request's monitors step by step, and decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..positions import Window, selected
from .monitor import BoundMonitor, Monitor
from .probe import Probe
from .scores import MonitorFire, MonitorScores

MAX_WAITING = 64
"""Most steps of a request with scores that wait to be read."""
SIGMOID_ERROR, LIMIT_MARGIN = 1e-6, 1e-5
"""Bounds of rounding errors in float32: of a probability, and of a sum relative to its terms."""


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
            values[0] = values[0] if first else np.maximum(values[0], self._value)
            values = np.maximum.accumulate(values)
        else:
            decay = self._decay
            values[first:] *= 1 - decay
            if not first:
                values[0] += decay * self._value
            shift = 1
            while shift < len(values) and (factor := decay**shift):  # each value has the last 2 * shift scores, or all
                values[shift:] += factor * values[:-shift]
                shift *= 2
        self._value = values.item(-1)
        return values.astype(np.float32)


class _Group:
    """Monitors of a request that are taken together: a single one, or several with equal positions and plain dot products.

    Attributes:
        scores, values: [positions, monitors] of each part that was taken.
        positions: [n] int64 of each part.
        fired: positions at which each monitor fired.
        sent: number of parts with scores in the stream.
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
        self.positions: list[np.ndarray] = []
        self.scores: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.fired: list[list[np.ndarray]] = [[] for _ in bounds]
        self.sent = 0

    def take(self, first: int, dots: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(index, positions, scores) of each monitor that fired among the positions from `first` on.

        Args:
            dots: [slots, positions] of the request.
        """
        positions = np.flatnonzero(selected(self._windows, first + dots.shape[1], first)) + first
        if not len(positions):
            return []
        if len(positions) < dots.shape[1]:
            dots = dots[:, positions - first]
        if self._reduced is None:
            scores = values = dots[self._slots].T + self._bias
        else:
            own = slice(self.bounds[0].slot, self.bounds[0].slot + self.bounds[0].num_dots)
            scores = self._probe.scores(dots[own].T)[:, None]
            values = self._reduced.take(scores[:, 0])[:, None]
        self.positions.append(positions)
        self.scores.append(scores)
        self.values.append(values)
        above = ~(values <= self._thresholds)  # NaN is above: an edit that makes states NaN evades no monitor
        if self._monitor.patience > 1:  # a single monitor
            runs = runs_of(above[:, 0], self._streak)
            self._streak, above = runs.item(-1), (runs >= self._monitor.patience)[:, None]
        return self._fires(positions, scores, above) if above.any() else []

    def _fires(
        self, positions: np.ndarray, scores: np.ndarray, above: np.ndarray
    ) -> list[tuple[int, np.ndarray, np.ndarray]]:
        found = []
        for column in np.flatnonzero(above.any(0)).tolist():
            fired = above[:, column]
            found.append((column, positions[fired], scores[fired, column]))
            self.fired[column].append(positions[fired])
        return found

    def unsent(self) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
        """(monitor, (positions, scores) that no event had)."""
        if self.sent < len(self.positions):
            positions, scores = (np.concatenate(part[self.sent :]) for part in (self.positions, self.scores))
            for column, bound in enumerate(self.bounds):
                yield bound.name, (positions, scores[:, column])
        self.sent = len(self.positions)

    def results(self, stopped_by: str | None) -> Iterator[tuple[str, MonitorScores]]:
        """(monitor, scores of all positions)."""
        positions = torch.from_numpy(np.concatenate(self.positions or [_NO_POSITIONS]))
        nothing = [np.zeros((0, len(self.bounds)), np.float32)]
        scores, values = (torch.from_numpy(np.concatenate(part or nothing)) for part in (self.scores, self.values))
        for column, bound in enumerate(self.bounds):
            fired = torch.from_numpy(np.concatenate(self.fired[column] or [_NO_POSITIONS]))
            yield bound.name, MonitorScores(
                positions, scores[:, column].clone(), values[:, column].clone(), fired, bound.spec.threshold,
                bound.name == stopped_by,
            )  # fmt: skip


_NO_POSITIONS = np.zeros(0, np.int64)


def runs_of(above: np.ndarray, before: int) -> np.ndarray:
    """[n] int64: true values in a row up to each of `above` [n], after `before` of them."""
    places = np.arange(1, len(above) + 1)
    return places - np.maximum.accumulate(np.where(above, -before, places))


def is_plain(monitor: Monitor) -> bool:
    """Whether the score is a dot product and a bias, and each is compared by itself."""
    return is_linear(monitor.probe) and monitor.probe.output == "linear" and is_direct(monitor)


def is_linear(probe: Any) -> bool:
    """Whether the score grows with the one dot product."""
    return (
        isinstance(probe, Probe)
        and len(probe.weight) == 1
        and probe.activation == "identity"
        and probe.out_weight is None
    )


def is_direct(monitor: Monitor) -> bool:
    """Whether each score is compared by itself."""
    return monitor.reduce == "token" and monitor.patience == 1


def limits_of(bounds: Sequence[BoundMonitor]) -> np.ndarray:
    """[slots] float32. A position without a dot product above its limit decides nothing: its scores may wait."""
    found = np.full(sum(bound.num_dots for bound in bounds), np.inf, np.float32)
    for bound in bounds:
        if bound.spec.then != "record":
            found[bound.slot : bound.slot + bound.num_dots] = _limit(bound.spec)
    return found


def _limit(monitor: Monitor) -> float:
    """A number below which no dot product reaches the threshold, with a margin for roundings."""
    probe, threshold = monitor.probe, monitor.threshold
    if not is_linear(probe) or monitor.reduce != "token":
        return -math.inf
    if probe.output == "sigmoid":
        threshold = min(threshold, 1.0) - SIGMOID_ERROR
        if threshold <= 0:
            return -math.inf
        threshold = math.log(threshold / (1 - threshold))
    bias = probe.bias[0]
    return threshold - bias - LIMIT_MARGIN * (abs(threshold) + abs(bias) + 1)


@dataclass
class RequestMonitors:
    """The monitors of one request, on the engine's thread.

    Attributes:
        acted: slot of a flag -> first position at which its ops act; flags that were set since the last `take_acted`.
        calls: callers' functions that are due: function, monitor, positions and scores of its calls.
        stopped_by: name of the monitor that ends the request, or None.
        stop_at: position at which it fired.
        num_due, num_called: calls that were due, and those that have returned.
    """

    bound: Sequence[BoundMonitor]
    request_id: str
    prompt_len: int
    acted: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[Callable[[MonitorFire], Any], str, np.ndarray, np.ndarray]] = field(default_factory=list)
    stopped_by: str | None = None
    stop_at: int | None = None
    num_due: int = 0
    num_called: int = 0

    def __post_init__(self) -> None:
        plain: dict[tuple[Window, ...], list[BoundMonitor]] = {}
        for bound in self.bound:
            if is_plain(bound.spec):
                plain.setdefault(bound.windows, []).append(bound)
        self._groups = [_Group(bounds) for bounds in plain.values()]
        self._groups += [_Group([bound]) for bound in self.bound if not is_plain(bound.spec)]
        self._next, self._pending = 0, {bound.flag for bound in self.bound if bound.flag is not None}
        self._waiting: list[np.ndarray] = []
        self._num_dots = sum(bound.num_dots for bound in self.bound)

    @property
    def may_act(self) -> bool:
        """Whether ops wait for a monitor to fire: the next step then depends on the scores of this one."""
        return bool(self._pending)

    @property
    def stops(self) -> bool:
        """Whether a monitor may end the request."""
        return any(bound.spec.then == "stop" for bound in self.bound)

    @property
    def num_taken(self) -> int:
        """Positions up to which dot products were taken."""
        return self._next

    def take(self, first: int, dots: np.ndarray, decides: bool = True) -> None:
        """Take the dot products [slots, positions] of a step, of the positions from `first` on. Known ones are left out.

        Args:
            decides: a dot product is above its limit (`limits_of`). Else a single position waits until its scores are read.
        """
        if first != self._next:
            skipped = self._next - first
            if skipped >= dots.shape[1]:
                return
            if skipped > 0:
                first, dots = self._next, dots[:, skipped:]
            self._settle()
        self._waiting.append(dots)
        self._next = first + dots.shape[1]
        if decides or dots.shape[1] > 1 or len(self._waiting) == MAX_WAITING:
            self._settle()

    def _settle(self) -> None:
        """Score the positions that wait. Most steps have hundreds of requests with one position each."""
        if not self._waiting:
            return
        own = [dots[: self._num_dots] for dots in self._waiting]  # others in the step may have more
        dots, self._waiting = own[0] if len(own) == 1 else np.hstack(own), []
        for group in self._groups:
            for index, positions, scores in group.take(self._next - dots.shape[1], dots):
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
            self.calls.append((then, bound.name, positions, scores))

    def take_acted(self) -> dict[int, int]:
        """`acted`, once."""
        acted, self.acted = self.acted, {}
        return acted

    def unsent(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name -> (positions, scores) since the last call. A long prompt has millions: they become numbers on other threads."""
        self._settle()
        return {name: found for group in self._groups for name, found in group.unsent()}

    def results(self) -> Mapping[str, MonitorScores]:
        """Name -> scores of all positions."""
        self._settle()
        found = {name: scores for group in self._groups for name, scores in group.results(self.stopped_by)}
        return {bound.name: found[bound.name] for bound in self.bound}
