"""Counters of the HTTP process and the engine's, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "pymllm_interp_"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms' buckets, in seconds."""


class Histogram:
    """Counts of times, by bucket."""

    def __init__(self) -> None:
        self.counts, self.total, self.sum = [0] * len(BUCKETS), 0, 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self.total, self.sum = self.total + 1, self.sum + seconds
        for i, bound in enumerate(BUCKETS):
            self.counts[i] += seconds <= bound

    def lines(self, name: str) -> Iterator[str]:
        """The histogram's lines."""
        for bound, count in zip(BUCKETS, self.counts, strict=True):
            yield f'{PREFIX}{name}_bucket{{le="{bound:g}"}} {count}'
        yield f'{PREFIX}{name}_bucket{{le="+Inf"}} {self.total}'
        yield f"{PREFIX}{name}_sum {self.sum:.6f}"
        yield f"{PREFIX}{name}_count {self.total}"


class Metrics:
    """What the HTTP process counts.

    Attributes:
        answers: (template of the route, status) -> requests. Paths of clients are not counted: they may be as many as they like.
        totals: other counts, by name.
        latency: of requests, in seconds.
        first_token: of streams, in seconds.
    """

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.totals: Counter[str] = Counter(
            dict.fromkeys(
                ("prompt_tokens", "generated_tokens", "captured_bytes", "hooked_requests", "traces", "disconnects"), 0
            )
        )
        self.latency, self.first_token = Histogram(), Histogram()

    def text(
        self, engines: Mapping[str, Mapping[str, Any]], gauges: Mapping[str, float], states: Mapping[str, Mapping[str, Any]]
    ) -> str:  # fmt: skip
        """All of it.

        Args:
            engines: counters (`Engine.stats`) by replica, which are labelled with its name; "" is a single engine.
            gauges: further values, by name.
            states: of replicas (`EngineClient.states`).
        """
        lines = [*self._own(gauges), *_of_replicas(states), *_of_engines(engines)]
        return "\n".join(lines) + "\n"

    def _own(self, gauges: Mapping[str, float]) -> Iterator[str]:
        yield from _head("http_requests_total", "counter", "Requests by path and status.")
        for (path, status), count in sorted(self.answers.items()):
            yield _line("http_requests_total", count, path=path, status=status)
        for name, count in sorted(self.totals.items()):
            yield from _one(f"{name}_total", "counter", count)
        for name, value in gauges.items():
            yield from _one(name, "gauge", value)
        for name, found in (("request_seconds", self.latency), ("first_token_seconds", self.first_token)):
            yield from _head(name, "histogram", "Seconds.")
            yield from found.lines(name)


def _of_replicas(states: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in ("up", "draining", "requests") if states else ():
        yield f"# TYPE {PREFIX}replica_{name} gauge"
        for replica, state in states.items():
            yield _line(f"replica_{name}", int(state[name]), replica=replica)


Series = tuple[str, str, str, dict[str, object], float]
"""Name, kind, help, labels, value."""


def _of_engines(engines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The series of all engines, grouped by name, as the format wants them."""
    by_name: dict[tuple[str, str, str], list[str]] = {}
    for replica, stats in engines.items():
        for name, kind, text, labels, value in _series(stats):
            own = {**labels, "replica": replica} if replica else labels
            by_name.setdefault((name, kind, text), []).append(
                _line(name, value, **own) if own else f"{PREFIX}{name} {value}"
            )
    for (name, kind, text), lines in by_name.items():
        yield from _head(name, kind, text) if text else (f"# TYPE {PREFIX}{name} {kind}",)
        yield from lines


def _series(stats: Mapping[str, Any]) -> Iterator[Series]:
    for name in ("running", "waiting", "swapped", "traces"):
        yield f"requests_{name}", "gauge", "", {}, stats[name]
    yield "kv_tokens", "gauge", "", {}, stats["kv_tokens"]
    yield "kv_tokens_free", "gauge", "", {}, stats["free_kv_tokens"]
    for name in ("steps", "overlapped_steps", "preempted", "moved_to_host", "flat_logits"):
        yield f"{name}_total", "counter", "", {}, stats[name]
    yield "block_seconds_total", "counter", "", {}, stats["block_seconds"]
    for name, count in (stats.get("speculation") or {}).items():
        if name != "undrafted":
            yield f"speculation_{name}_total", "counter", "", {}, count
    for how, count in sorted(stats["execution"].items()):
        mode, _, why = how.partition(": ")
        text = "Steps by how they ran, and why."
        yield "steps_by_execution_total", "counter", text, {"execution": mode, "reason": why}, count
    cache = stats.get("prefix_cache") or {}
    for name in ("asked_tokens", "cached_tokens"):
        for kind, count in sorted((cache.get(name) or {}).items()):
            text = "Prompt tokens, by what the request edits."
            yield f"prefix_cache_{name}_total", "counter", text, {"kind": kind}, count


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"


def _line(name: str, value: float, **labels: object) -> str:
    """A value with labels, escaped as Prometheus' text format says."""
    shown = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
    return f"{PREFIX}{name}{{{shown}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _one(name: str, kind: str, value: float) -> Iterator[str]:
    yield f"# TYPE {PREFIX}{name} {kind}"
    yield f"{PREFIX}{name} {value}"
