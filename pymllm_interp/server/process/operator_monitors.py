"""`OperatorMonitors`: monitors that a server's operator sets for all requests, and counts of all monitors for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from ...client.completion import Scored
from ...client.request_factory import RequestFactory
from ...core.events import FinishedEvent
from ...core.request import Request
from ...core.sampling_params import SamplingParams
from ...hooks.monitors.monitor import Monitor
from ...hooks.monitors.scores import MonitorScores
from ...utils.arguments import PromptError
from ...wire.specs import monitor_of
from ..http.families import SCORES

PREFIX = "server:"
"""Names of the operator's monitors in results begin with it. No client's does."""
CLIENTS = "clients"
"""Name of the counts of all clients' monitors: clients add no series."""


@dataclass
class MonitorCounts:
    """Counts of a monitor over all requests that have ended.

    Attributes:
        fires: positions at which it fired.
        stops: requests that it ended.
        counts: scores by bucket (`SCORES`), without those that are not finite.
        sum: sum of these scores.
    """

    fires: int
    stops: int
    counts: list[int]
    sum: float

    def add(self, found: MonitorScores) -> None:
        """Count the scores of a request."""
        scores = found.scores.numpy()
        scores = scores[np.isfinite(scores)]
        buckets = np.bincount(np.searchsorted(SCORES, scores), minlength=len(self.counts))
        self.counts = [before + more for before, more in zip(self.counts, buckets.tolist(), strict=True)]
        self.sum += float(scores.sum(dtype=np.float64))
        self.fires += len(found.fired_at)
        self.stops += found.stopped


class OperatorMonitors:
    """The operator's monitors. Unless they are visible, clients do not see them, nor their scores, fires and ops.

    Args:
        given: monitors as JSON, each with a name.
        visible: whether clients see them.
        factory: makes the requests of all clients.

    Raises:
        PromptError: a monitor that the model or the engine refuses.
    """

    def __init__(self, given: Sequence[Mapping[str, Any]], visible: bool, factory: RequestFactory) -> None:
        self._hides = bool(given) and not visible
        self._counts = {name: MonitorCounts(0, 0, [0] * (len(SCORES) + 1), 0.0) for name in (CLIENTS, *names_of(given))}
        if given:
            factory.watching = _bound([_read(one, f"--monitor: {one['name']!r}") for one in given], factory)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counts by name."""
        return {name: asdict(counts) for name, counts in self._counts.items()}

    def shown(self, scores: dict[str, Scored] | None) -> dict[str, Scored] | None:
        """The scores that clients see, or None."""
        if scores and self._hides:
            scores = {name: found for name, found in scores.items() if not name.startswith(PREFIX)}
        return scores or None

    def ended(self, event: FinishedEvent, asked: bool) -> FinishedEvent:
        """Count the scores of a request that ended. Returns the event for its client.

        Args:
            asked: whether the client asked for something that has a receipt.
        """
        found: dict[str, MonitorScores] = event.monitors or {}
        for name, scores in found.items():
            self._counts[name.removeprefix(PREFIX) if name.startswith(PREFIX) else CLIENTS].add(scores)
        if not self._hides:
            return event
        if event.receipt is not None:
            event.receipt.interventions = [
                applied for applied in event.receipt.interventions if not applied.monitor.startswith(PREFIX)
            ]
        if not asked:
            warned = [] if event.receipt is None else event.receipt.warnings
            warnings = [warning for warning in event.warnings if warning not in warned]
            event = replace(event, receipt=None, warnings=warnings)
        if event.finish_reason == "monitor" and str(event.stop_reason).startswith(PREFIX):
            event = replace(event, finish_reason="content_filter", stop_reason=None)
        return replace(event, monitors=self.shown(cast(Any, found)))


def names_of(given: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of monitors as JSON."""
    return [one["name"] for one in given]


def asks(request: Request) -> bool:
    """Whether a request has hooks that its client asked for."""
    return request.trace is not None or (request.receipt is not None and bool(request.receipt.spec))


def check_names(specs: Iterable[Any]) -> None:
    """Refuse names of the operator's monitors among a client's specs. Raises PromptError: a name that begins with `PREFIX`."""
    for spec in specs:
        if isinstance(spec, Monitor) and str(spec.name).startswith(PREFIX):
            raise PromptError(f"a monitor is named {spec.name!r}: names that begin with {PREFIX!r} are the server's")


def _read(given: Mapping[str, Any], what: str) -> Monitor:
    """A monitor that leaves out positions which a prompt does not have."""
    spec = monitor_of(given, what)
    return replace(spec, name=f"{PREFIX}{spec.name}", missing="skip")


def _bound(specs: list[Monitor], factory: RequestFactory) -> tuple[Monitor, ...]:
    """The monitors with vectors and SAEs in place of names, checked with prompts of two lengths."""
    (named,) = factory.named([specs], ["--monitor"])
    for length in (1, 7):
        (request,) = factory.requests([0] * length, SamplingParams(max_tokens=2))
        factory.declare(request, named, what="--monitor")
        factory.hold([request])
        factory.release([request])
    return tuple(named)
