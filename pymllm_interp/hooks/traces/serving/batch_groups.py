"""The traced stage of a runner: which rows of a step belong to which request's trace, and what is offered to them.

A step's batch is flat. `process_new_reqs` gives each traced request its ``[start, size]`` token rows, in the order of the
batch; after the forward pass `unflatten` gives it its row among the sampled ones; `process_finished_reqs` winds it up.
Requests without a trace are skipped, but their rows are counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ....core.step import ModelRunnerOutput, NewRequest, RequestEnd, ScheduledRequest
from ..blocks.trace import RequestTrace
from . import lifecycle
from .interleaver import EngineInterleaver
from .rows import BatchRows, RowSpan, one_each, rows_of_step


class NNsightRequestHelper:
    """Traces of the requests in flight, and their rows in the current step.

    Args:
        interleaver: serves their blocks.

    Attributes:
        req_id_to_batch_group_idx: request -> index of its batch group, among the traced requests of this step.
        num_prompts_in_mediator: trace -> its requests that are still in flight. At 0 the trace is wound up.
    """

    def __init__(self, interleaver: EngineInterleaver) -> None:
        self.interleaver = interleaver
        self.req_id_to_batch_group_idx: dict[str, int] = {}
        self.num_prompts_in_mediator: dict[int, int] = {}
        self._registered: dict[int, RequestTrace] = {}
        self._attached: dict[str, tuple[NewRequest, RequestTrace]] = {}
        self._started: dict[str, RequestTrace] = {}
        self._groups: list[tuple[str, RequestTrace, tuple[int, int]]] = []
        self._spans: list[RowSpan] = []  # rows of each of the groups
        self._batches: list[RequestTrace] = []  # traces of this step that see several requests
        self._finished: dict[
            RequestTrace, dict[str, RequestEnd]
        ] = {}  # of traces that see several, until all have finished

    # -- seed names ------------------------------------------------------------------------

    @property
    def ids_to_batch_group(self) -> Mapping[str, tuple[int, int]]:
        """Request -> its ``(start, size)`` token rows in this step."""
        return MappingProxyType({rid: self._groups[i][2] for rid, i in self.req_id_to_batch_group_idx.items()})

    @property
    def interleaver_to_ids(self) -> Mapping[int, set[str]]:
        """Trace -> its requests in flight."""
        ids: dict[int, set[str]] = {}
        for rid, trace in self._started.items():
            ids.setdefault(trace.trace_id, set()).add(rid)
        return MappingProxyType(ids)

    @property
    def flat_batch_groups(self) -> Mapping[int, list[tuple[int, int]]]:
        """Trace -> token rows of its requests in this step, in batch order."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for _, trace, rows in self._groups:
            groups.setdefault(trace.trace_id, []).append(rows)
        return MappingProxyType(groups)

    # -- requests in and out -----------------------------------------------------------------

    def register(self, trace: RequestTrace) -> None:
        """Make a trace known, before the first step that names it by its key."""
        self._registered[trace.key] = trace

    def enter(self, new: Iterable[NewRequest]) -> None:
        """Serve the traces of requests that enter the request table, in the steps that they take part in.

        Raises:
            RuntimeError: a trace of another process.
        """
        for request in new:
            key = None if request.hooks is None else request.hooks.trace_key
            if key is not None:
                if key not in self._registered:
                    raise RuntimeError(
                        f"request {request.request_id} has a trace that this process does not know: blocks of traces run in the "
                        "process of their engine. Interventions and captures run anywhere"
                    )
                self._attached[request.request_id] = request, self._registered[key]

    def traces_of(self, ends: Iterable[RequestEnd]) -> dict[str, RequestTrace]:
        """Request id -> its trace, of those that have a registered one."""
        keys = {end.request_id: end.hooks.trace_key for end in ends}
        return {rid: self._registered[key] for rid, key in keys.items() if key in self._registered}

    @property
    def expects_traces(self) -> bool:
        """Whether a trace is registered whose requests have not all ended."""
        return bool(self._registered)

    @property
    def attached(self) -> Mapping[str, tuple[NewRequest, RequestTrace]]:
        """Traced requests that have entered and not finished, by id."""
        return MappingProxyType(self._attached)

    def traced(self, entries: Iterable[ScheduledRequest]) -> bool:
        """Whether one of a step's requests has a trace."""
        attached = self._attached
        return bool(attached) and any(entry.request_id in attached for entry in entries)

    @property
    def traces(self) -> list[RequestTrace]:
        """Traces that take part in this step, in batch order; those of one ``with`` block in the order of its invokes."""
        if not self._batches:
            return [trace for _, trace, _ in self._groups]
        places: dict[int, int] = {}
        for _, trace, _ in self._groups:
            places.setdefault(trace.trace_id, len(places))
        found = dict.fromkeys([trace for _, trace, _ in self._groups] + self._batches)
        return sorted(found, key=lambda trace: (places[trace.trace_id], trace.order))

    def count_requests(self, traces: set[RequestTrace]) -> int:
        """How many requests of this step the traces see."""
        return sum(trace in traces for _, trace, _ in self._groups) if traces else 0

    def process_new_reqs(self, new_reqs: Sequence[ScheduledRequest]) -> None:
        """Start the traces of requests that are scheduled for the first time, and give every traced one its rows.

        Args:
            new_reqs: the step's requests, in batch order.
        """
        self._groups, self.req_id_to_batch_group_idx = [], {}
        spans: list[RowSpan] = []
        for entry, rows in zip(new_reqs, rows_of_step(new_reqs), strict=True):
            found = self._attached.get(entry.request_id)
            if found is None:
                continue
            request, trace = found
            self.req_id_to_batch_group_idx[entry.request_id] = len(self._groups)
            self._groups.append((entry.request_id, trace, (rows.start, rows.size)))
            spans.append(rows)
            if entry.request_id not in self._started:
                self._started[entry.request_id] = trace
                self.num_prompts_in_mediator.setdefault(trace.trace_id, trace.num_prompts)
                for own in (trace, *trace.whole_batch):
                    if not own.started:
                        self._start(own, request)
        seen = dict.fromkeys(t for _, trace, _ in self._groups for t in (trace, *trace.whole_batch))
        self._batches = [trace for trace in seen if trace.watches_several]
        self._spans = spans
        self._give_rows(spans)

    def _start(self, trace: RequestTrace, request: NewRequest) -> None:
        watched = [self._attached[rid][0] for rid in trace.request_ids] if trace.watches_several else [request]
        lifecycle.start(self.interleaver, trace, watched)

    def _give_rows(self, spans: Iterable[RowSpan | None], sampled: bool = False) -> None:
        """Give the traces of each of `_groups` its rows; None for a request that has left the pass.

        Args:
            sampled: one row for each request, and no padding, in place of token rows.
        """
        if not self._batches:
            for (_, trace, _), span in zip(self._groups, spans, strict=True):
                trace.rows = span
            return
        by_request = {rid: span for (rid, _, _), span in zip(self._groups, spans, strict=True)}
        for rid, trace, _ in self._groups:
            if not trace.watches_several:
                span = by_request[rid]
                trace.rows = span.shared() if span is not None and trace.whole_batch else span
        for trace in self._batches:
            own = [by_request.get(rid) for rid in trace.request_ids]
            padding = trace.padding if trace.visits.passes == 0 and not sampled else None
            trace.rows = BatchRows(own, padding) if any(own) else None

    def drop_finished(self, finished_req_ids: Collection[str]) -> list[RequestTrace]:
        """Take the traces of finished requests out of the step; returns them."""
        dropped = {rid for rid, _, _ in self._groups if rid not in self._attached or rid in finished_req_ids}
        if not dropped:
            return []
        gone = _with_batches(trace for rid, trace, _ in self._groups if rid in dropped)
        left = [(group, span) for group, span in zip(self._groups, self._spans, strict=True) if group[0] not in dropped]
        self._groups, self._spans = [group for group, _ in left], [span for _, span in left]
        self.req_id_to_batch_group_idx = {rid: i for i, (rid, _, _) in enumerate(self._groups)}
        staying = _with_batches(trace for _, trace, _ in self._groups)
        if self._batches:
            self._batches = [trace for trace in self._batches if trace in staying]
            self._give_rows(self._spans)
        return [trace for trace in gone if trace not in staying]

    def process_finished_reqs(self, ends: Sequence[RequestEnd]) -> None:
        """Serve the results that only a finished request has, end the blocks that still wait, and forget the requests.

        The requests of a gang come together: their blocks may still wait for each other.
        """
        ending: list[tuple[RequestTrace, list[RequestEnd]]] = []
        traces = self.traces_of(ends)
        for end in ends:
            self._started.pop(end.request_id, None)
            self._attached.pop(end.request_id, None)
            self.req_id_to_batch_group_idx.pop(end.request_id, None)
            trace = traces[end.request_id]
            left = self.num_prompts_in_mediator.get(trace.trace_id, trace.num_prompts) - 1
            self.num_prompts_in_mediator[trace.trace_id] = left
            ending += self._ended_with(trace, end)
        for trace, _ in ending:
            trace.over, trace.rows = True, None
        lifecycle.wind_up(self.interleaver, ending)
        for trace, own in ending:
            lifecycle.close(self.interleaver, trace, own)
            self._registered.pop(trace.key, None)
            if self.num_prompts_in_mediator.get(trace.trace_id, 0) <= 0:
                self.num_prompts_in_mediator.pop(trace.trace_id, None)  # the last request of the trace has ended
        if not self._started:  # the last step's groups hold what their blocks hold
            self._groups, self._spans, self._batches = [], [], []
            self.interleaver.sourced.clear()  # its functions hold the tree, which holds the interleaver

    def _ended_with(self, trace: RequestTrace, end: RequestEnd) -> list[tuple[RequestTrace, list[RequestEnd]]]:
        """The traces that have no request left after this one, each with its requests in the order of the prompts."""
        ended = []
        for own in (trace, *trace.whole_batch):
            if not own.watches_several:
                ended.append((own, [end]))
                continue
            finished = self._finished.setdefault(own, {})
            finished[end.request_id] = end
            if len(finished) == len(own.request_ids):
                del self._finished[own]
                ended.append((own, [finished[rid] for rid in own.request_ids]))
        return ended

    # -- rows of a pass ----------------------------------------------------------------------

    def pad_to(self, rows: int) -> None:
        """Give the traces of a decode step their rows in a pass with further padding rows."""
        if self._groups and rows != self._spans[0].total:
            padded = one_each(rows)
            self._spans = [padded[span.start] for span in self._spans]
            self._give_rows(self._spans)

    def pad_prompts_to(self, rows: int) -> None:
        """Give the traces of a prefill or mixed step their rows in a pass with further padding rows."""
        self._spans = [span.padded(rows) for span in self._spans]
        self._give_rows(self._spans)

    def narrow_to_last(self, requests: int) -> None:
        """Give the traces of the decode step's last `requests` their rows in a pass over those requests alone."""
        first = len(self._spans) - requests
        self._spans[first:] = one_each(requests)
        if not self._batches:
            for rows, (_, trace, _) in zip(one_each(requests), self._groups[first:], strict=True):
                trace.rows = rows
        else:
            self._give_rows(self._spans)

    def unflatten(self, sampling: Sequence[ScheduledRequest]) -> None:
        """Give each trace its row among `sampling`, the requests that sample in this step, in place of its token rows."""
        places = one_each(len(sampling))
        if self._batches:
            own = {entry.request_id: place for entry, place in zip(sampling, places, strict=True)}
            self._give_rows([own.get(rid) for rid, _, _ in self._groups], sampled=True)
            return
        last = self._groups[-1][1].rows if self._groups else None  # where some only were moved, it was
        if last is not None and last.total == len(sampling) and last is places[last.start]:
            return  # a decode step, which was neither padded nor split: all have them
        for own, entry in zip(places, sampling, strict=True):
            found = self._attached.get(entry.request_id)
            if found is not None and found[1].rows is not None:  # else it has left the pass
                found[1].rows = own

    # -- a step --------------------------------------------------------------------------------

    def report(self, output: ModelRunnerOutput) -> None:
        """Count the step in the traces' receipts, and note which of them failed or stopped in it."""
        for trace in self.traces:
            trace.receipt.steps[output.execution] += 1
        for rid, own, _ in self._groups:
            for trace in (own, *own.whole_batch):
                if trace.ended and trace.error is not None:
                    output.errors.setdefault(rid, trace.error)
                elif trace.ended and trace.stopped:
                    output.stopped.add(rid)


def _with_batches(traces: Iterable[RequestTrace]) -> dict[RequestTrace, None]:
    """The traces, and those that see their requests together with others."""
    return dict.fromkeys(own for trace in traces for own in (trace, *trace.whole_batch))
