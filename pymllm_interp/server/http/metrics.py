"""Metrics of the HTTP process and the engine, in Prometheus' text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ...wire.messages import Finished
from .families import FAMILIES, REASONS, SCORES

if TYPE_CHECKING:
    from .spans import CallSpans

PREFIX = "pymllm_interp_"
TOTALS = (
    "prompt_tokens", "generation_tokens", "captured_bytes", "hooked_requests", "traces", "disconnects",
)  # fmt: skip
HISTOGRAMS = tuple(name for name, family in FAMILIES.items() if family.kind == "histogram" and name != "monitor_score")
"""Those that the HTTP process counts."""
SPECULATION = {"steps": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens", "pauses": "pauses"}
"""Counter of the engine's drafts -> its part of the metric's name."""
Sample = tuple[str, Mapping[str, object], float]
"""Name, labels, value."""


class Histogram:
    """Counts of values by bucket.

    Args:
        bounds: upper bounds of the buckets, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def samples(self, name: str) -> Iterator[Sample]:
        """The samples of the histogram; buckets are cumulative."""
        *totals, total = accumulate(self.counts)
        for bound, count in zip(self.bounds, totals, strict=True):
            yield f"{name}_bucket", {"le": f"{bound:g}"}, count
        yield f"{name}_bucket", {"le": "+Inf"}, total
        yield f"{name}_sum", {}, round(self.sum, 6)
        yield f"{name}_count", {}, total


class Metrics:
    """Counters and histograms of the HTTP process.

    Args:
        model: name of the model for clients: the label model_name of all series.

    Attributes:
        answers: (template of the route, status) -> requests. Paths of clients are not counted: they may be as many as they like.
        totals: other counts, by name.
        ends: requests that ended, by their finish reason.
        histograms: times and lengths, by name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.answers: Counter[tuple[str, int]] = Counter()
        self.totals: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))
        self.ends: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.histograms = {name: Histogram(FAMILIES[name].buckets) for name in HISTOGRAMS}

    def add(self, name: str, value: float, count: int = 1) -> None:
        """Count a value in a histogram."""
        self.histograms[name].add(value, count)

    def text(
        self, engines: Mapping[str, Mapping[str, Any]], gauges: Mapping[str, float], states: Mapping[str, Mapping[str, Any]]
    ) -> str:  # fmt: skip
        """All metrics.

        Args:
            engines: counters (`Engine.stats`) by replica, which are labelled with its name; "" is a single engine.
            gauges: further values, by name.
            states: states of replicas (`Door.states`).
        """
        lines: dict[str, list[str]] = {}
        for name, labels, value in self._own(gauges):
            lines.setdefault(_family(name), []).append(self._line(name, labels, value))
        for replica, state in states.items():
            for name in ("up", "draining", "requests"):
                sample = self._line(f"replica_{name}", {"replica": replica}, int(state[name]))
                lines.setdefault(f"replica_{name}", []).append(sample)
        for replica, stats in engines.items():
            for name, labels, value in _of_engine(stats):
                labels = {**labels, "replica": replica} if replica else labels
                lines.setdefault(_family(name), []).append(self._line(name, labels, value))
        return "".join(f"{_head(name)}\n" + "\n".join(lines[name]) + "\n" for name in FAMILIES if name in lines)

    def _own(self, gauges: Mapping[str, float]) -> Iterator[Sample]:
        for (path, status), count in sorted(self.answers.items()):
            yield "http_requests_total", {"path": path, "status": status}, count
        for reason, count in self.ends.items():
            yield "request_success_total", {"finished_reason": reason}, count
        for name, count in self.totals.items():
            yield f"{name}_total", {}, count
        for name, value in gauges.items():
            yield name, {}, value
        for name, histogram in self.histograms.items():
            yield from histogram.samples(name)

    def _line(self, name: str, labels: Mapping[str, object], value: float) -> str:
        """A sample, its labels escaped as Prometheus' text format says."""
        shown = ",".join(
            f'{label}="{_escaped(str(text))}"' for label, text in {**labels, "model_name": self._model}.items()
        )
        return f"{PREFIX}{name}{{{shown}}} {value}"


class CallMetrics:
    """Times and lengths of the requests of one call: of its prompts, and their `n`.

    Args:
        metrics: metrics that count them.
        started: `time.perf_counter()` at which the call's HTTP request arrived.
        prompt_tokens: length of each request's prompt.
        generated: called with the number of new tokens.
        spans: records each request's span; None without tracing.
    """

    def __init__(
        self,
        metrics: Metrics,
        started: float,
        prompt_tokens: Sequence[int],
        generated: Callable[[int], None],
        spans: CallSpans | None = None,
    ) -> None:
        self._metrics, self._started = metrics, started
        self._prompt_tokens, self._generated = prompt_tokens, generated
        self._spans, self._first = spans, dict[int, float]()  # request -> seconds until its first token
        self._last: dict[int, float] = {}  # request -> when its newest token came
        self._seen: Counter[int] = Counter()
        self._left = set(range(len(prompt_tokens)))

    def tokens(self, request: int, count: int) -> None:
        """Count new tokens of a running request."""
        now = time.perf_counter()
        self._generated(count)
        self._seen[request] += count
        if (last := self._last.get(request)) is None:
            self._first_token(request, now - self._started)
        else:
            self._metrics.add("inter_token_latency_seconds", (now - last) / count, count)
        self._last[request] = now

    def _first_token(self, request: int, seconds: float) -> None:
        self._first[request] = seconds
        self._metrics.add("time_to_first_token_seconds", seconds)

    def ended(self, request: int, end: Finished) -> None:
        """Count the end of a request, with the tokens that come with it."""
        now, add, times, total = time.perf_counter(), self._metrics.add, end.times, len(end.token_ids)
        count = total - self._seen[request]
        self._left.discard(request)
        self._metrics.ends[end.finish_reason if end.finish_reason in REASONS else "error"] += 1
        if request in self._last and count:
            self.tokens(request, count)
        else:
            self._generated(count)
            if times is not None and times.first_token is not None:
                self._first_token(request, now - self._started - (times.total - times.first_token))
        if self._spans is not None:
            self._spans.ended(request, self._prompt_tokens[request], end, total, self._first.get(request))
        add("e2e_request_latency_seconds", now - self._started)
        add("request_prompt_tokens", self._prompt_tokens[request])
        add("request_generation_tokens", total)
        if times is None or times.queued is None:
            return
        add("request_queue_time_seconds", times.queued)
        if times.first_token is None:
            return
        add("request_prefill_time_seconds", times.first_token - times.queued)
        decode = times.total - times.first_token
        add("request_decode_time_seconds", decode)
        if total > 1:
            add("request_time_per_output_token_seconds", decode / (total - 1))

    def close(self) -> None:
        """End the call. Requests that have not ended were aborted."""
        self._metrics.ends["abort"] += len(self._left)
        if self._spans is not None:
            for request in self._left:
                self._spans.ended(
                    request, self._prompt_tokens[request], None, self._seen[request], self._first.get(request)
                )
        self._left.clear()


def _of_engine(stats: Mapping[str, Any]) -> Iterator[Sample]:
    for name in ("running", "waiting", "swapped"):
        yield f"num_requests_{name}", {}, stats[name]
    room, free = stats["kv_tokens"], stats["free_kv_tokens"]
    yield from (("requests_traces", {}, stats["traces"]), ("kv_tokens", {}, room), ("kv_tokens_free", {}, free))
    yield "kv_cache_usage_perc", {}, round(1 - free / room, 6) if room else 0.0
    yield "num_preemptions_total", {}, stats["preempted"]
    for name in ("steps", "overlapped_steps", "moved_to_host", "flat_logits"):
        yield f"{name}_total", {}, stats[name]
    yield "block_seconds_total", {}, stats["block_seconds"]
    for name, count in (stats.get("speculation") or {}).items():
        if name in SPECULATION:
            yield f"spec_decode_num_{SPECULATION[name]}_total", {}, count
    for how, count in sorted(stats["execution"].items()):
        mode, _, why = how.partition(": ")
        yield "steps_by_execution_total", {"execution": mode, "reason": why}, count
    for name in ("captured", "missing") if stats.get("graphs") else ():
        yield "cuda_graphs", {"state": name}, stats["graphs"][name]
    cache = stats.get("prefix_cache") or {}
    for found, name in (("asked_tokens", "queries"), ("cached_tokens", "hits")):
        for kind, count in sorted((cache.get(found) or {}).items()):
            yield f"prefix_cache_{name}_total", {"kind": kind}, count
    for monitor, counts in (stats.get("monitors") or {}).items():
        labels = {"monitor": monitor}
        yield "monitor_fires_total", labels, counts["fires"]
        yield "monitor_stops_total", labels, counts["stops"]
        scores = Histogram(SCORES)
        scores.counts, scores.sum = counts["counts"], counts["sum"]
        for name, of_bucket, value in scores.samples("monitor_score"):
            yield name, {**labels, **of_bucket}, value


def _family(name: str) -> str:
    return name if name in FAMILIES else name.rpartition("_")[0]  # a histogram's


def _head(name: str) -> str:
    return f"# HELP {PREFIX}{name} {FAMILIES[name].help}\n# TYPE {PREFIX}{name} {FAMILIES[name].kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def merged_stats(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combined `Engine.stats` of all engines: numbers are added. Other values are the first engine's.

    Args:
        found: non-empty list of the engines' statistics.
    """
    return dict(found[0]) if len(found) == 1 else _added(found)


def _added(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one[name] for one in found if one.get(name) is not None]
        if not values:
            merged[name] = None
        elif isinstance(values[0], Mapping):
            merged[name] = _added(values)
        elif isinstance(values[0], int | float) and not isinstance(values[0], bool):
            merged[name] = sum(values)
        else:
            merged[name] = values[0]
    return merged
