"""Assignment of a step's rows to the traces of its requests.

A step's batch is flat. `process_new_reqs` gives each traced request a batch group, its ``[start, size]`` token rows, in the
order of the batch. After the forward pass `unflatten` gives it its sampled row. `process_finished_reqs` winds it up.
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
        req_id_to_batch_group_idx: request -> index of its batch group. Holds the traced requests that take part in this step, in
            batch order; a request that ends leaves it.
        batch_groups: rows of each batch group in the pass.
        num_prompts_in_mediator: trace -> its requests that are still in flight. At 0 the blocks that see all of them end.
        attached: request -> how it entered, and its trace. Holds traced requests that have entered and not finished.
    """

    def __init__(self, interleaver: EngineInterleaver) -> None:
        self.interleaver = interleaver
        self.req_id_to_batch_group_idx: dict[str, int] = {}
        self.batch_groups: list[RowSpan] = []
        self.num_prompts_in_mediator: dict[int, int] = {}
        self.attached: dict[str, tuple[NewRequest, RequestTrace]] = {}
        self._registered: dict[int, RequestTrace] = {}
        self._batches: list[RequestTrace] = []  # traces of this step that see several requests

    # -- names of nnsight's helper -----------------------------------------------------------

    @property
    def ids_to_batch_group(self) -> Mapping[str, int]:
        """Request -> index of its batch group in this step."""
        return MappingProxyType(self.req_id_to_batch_group_idx)

    @property
    def interleaver_to_ids(self) -> Mapping[int, set[str]]:
        """Trace -> its requests in flight."""
        ids: dict[int, set[str]] = {}
        for rid, (_, trace) in self.attached.items():
            ids.setdefault(trace.trace_id, set()).add(rid)
        return MappingProxyType(ids)

    @property
    def flat_batch_groups(self) -> Mapping[int, list[tuple[int, int]]]:
        """Trace -> token rows of its requests in this step, in batch order."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for rid, i in self.req_id_to_batch_group_idx.items():
            rows = self.batch_groups[i]
            groups.setdefault(self.attached[rid][1].trace_id, []).append((rows.start, rows.size))
        return MappingProxyType(groups)

    # -- requests in and out -----------------------------------------------------------------

    def register(self, trace: RequestTrace) -> None:
        """Make a trace known, before the first step that names it by its key."""
        self._registered[trace.key] = trace

    def enter(self, new: Iterable[NewRequest]) -> None:
        """Serve the traces of requests that enter the request table, in the steps that they take part in.
        Raises RuntimeError: a trace of another process."""
        for request in new:
            key = None if request.hooks is None else request.hooks.trace_key
            if key is not None:
                if key not in self._registered:
                    raise RuntimeError(
                        f"request {request.request_id} has a trace that this process does not know: blocks of traces run in the "
                        "process of their engine. Interventions and captures run anywhere"
                    )
                self.attached[request.request_id] = request, self._registered[key]

    def traces_of(self, ends: Iterable[RequestEnd]) -> dict[str, RequestTrace]:
        """Request id -> its trace, of those that have a registered one."""
        keys = {end.request_id: end.hooks.trace_key for end in ends}
        return {rid: self._registered[key] for rid, key in keys.items() if key in self._registered}

    @property
    def expects_traces(self) -> bool:
        """Whether a trace is registered whose requests have not all ended."""
        return bool(self._registered)

    def traced(self, entries: Iterable[ScheduledRequest]) -> bool:
        """Whether one of a step's requests has a trace."""
        attached = self.attached
        return bool(attached) and any(entry.request_id in attached for entry in entries)

    def _own_traces(self) -> list[RequestTrace]:
        """The trace of each traced request of this step, in batch order."""
        return [self.attached[rid][1] for rid in self.req_id_to_batch_group_idx]

    @property
    def traces(self) -> list[RequestTrace]:
        """Traces in this step, in batch order; within a ``with`` block in the order of its invokes."""
        own = self._own_traces()
        if not self._batches:
            return own
        places: dict[int, int] = {}
        for trace in own:
            places.setdefault(trace.trace_id, len(places))
        return sorted(dict.fromkeys(own + self._batches), key=lambda trace: (places[trace.trace_id], trace.order))

    def count_requests(self, traces: set[RequestTrace]) -> int:
        """Number of this step's requests that the traces see."""
        return sum(trace in traces for trace in self._own_traces()) if traces else 0

    def process_new_reqs(self, new_reqs: Sequence[ScheduledRequest]) -> None:
        """Start the traces of requests that are scheduled for the first time, and give every traced one its rows.

        Args:
            new_reqs: the step's requests, in batch order.
        """
        self.leave_step()
        for entry, rows in zip(new_reqs, rows_of_step(new_reqs), strict=True):
            found = self.attached.get(entry.request_id)
            if found is None:
                continue
            request, trace = found
            self.req_id_to_batch_group_idx[entry.request_id] = len(self.batch_groups)
            self.batch_groups.append(rows)
            if not trace.started:
                self.num_prompts_in_mediator.setdefault(trace.trace_id, trace.num_prompts)
                for own in (trace, *trace.whole_batch):
                    if not own.started:
                        self._start(own, request)
        self._batches = [trace for trace in _with_batches(self._own_traces()) if trace.watches_several]
        self._give_rows()

    def leave_step(self) -> None:
        """Clear the groups after a step without traced requests."""
        self.req_id_to_batch_group_idx.clear()
        self.batch_groups, self._batches = [], []

    def _start(self, trace: RequestTrace, request: NewRequest) -> None:
        watched = [self.attached[rid][0] for rid in trace.request_ids] if trace.watches_several else [request]
        lifecycle.start(self.interleaver, trace, watched)

    def _give_rows(self, sampled: bool = False) -> None:
        """Give each trace the rows of its batch groups; none for a request that has left the pass.

        Args:
            sampled: the groups are rows of sampled requests, without padding, in place of token rows.
        """
        index, groups = self.req_id_to_batch_group_idx, self.batch_groups
        for rid, group in index.items():
            trace = self.attached[rid][1]
            if not self._batches:
                trace.rows = groups[group]
            elif not trace.watches_several:
                trace.rows = groups[group].shared() if trace.whole_batch else groups[group]
        for trace in self._batches:
            own = [groups[index[rid]] if rid in index else None for rid in trace.request_ids]
            padding = trace.padding if trace.visits.passes == 0 and not sampled else None
            trace.rows = BatchRows(own, padding) if any(own) else None

    def drop_finished(self, finished_req_ids: Collection[str]) -> list[RequestTrace]:
        """Take the traces of finished requests out of the step; returns them."""
        dropped = [rid for rid in self.req_id_to_batch_group_idx if rid in finished_req_ids]
        if not dropped:
            return []
        gone = _with_batches(self.attached[rid][1] for rid in dropped)
        for rid in dropped:
            del self.req_id_to_batch_group_idx[rid]
        staying = _with_batches(self._own_traces())
        if self._batches:
            self._batches = [trace for trace in self._batches if trace in staying]
            self._give_rows()
        return [trace for trace in gone if trace not in staying]

    def process_finished_reqs(self, ends: Sequence[RequestEnd]) -> None:
        """Serve the results that only a finished request has, end the blocks that still wait, and forget the requests.

        The requests of a gang come together: their blocks may still wait for each other.
        """
        ending: dict[RequestTrace, list[RequestEnd]] = {}  # each with its requests, in the order of the prompts
        traces = self.traces_of(ends)
        for end in ends:
            trace = traces[end.request_id]
            ending.setdefault(trace, []).append(end)
            self.attached.pop(end.request_id, None)
            self.req_id_to_batch_group_idx.pop(end.request_id, None)
            left = self.num_prompts_in_mediator.get(trace.trace_id, trace.num_prompts) - 1
            self.num_prompts_in_mediator[trace.trace_id] = left
            if left <= 0:
                del self.num_prompts_in_mediator[trace.trace_id]
                for whole in trace.whole_batch:
                    ending[whole] = [other for other in ends if other.request_id in whole.request_ids]
        for trace in ending:
            trace.over, trace.rows = True, None
        lifecycle.wind_up(self.interleaver, list(ending.items()))
        for trace, own in ending.items():
            lifecycle.close(self.interleaver, trace, own)
            self._registered.pop(trace.key, None)
        self._batches = [trace for trace in self._batches if not trace.over]  # which hold their blocks' objects
        if not self.attached:
            self.leave_step()
            self.interleaver.sourced.clear()  # its functions hold the tree, which holds the interleaver

    # -- rows of a pass ----------------------------------------------------------------------

    def pad_to(self, rows: int) -> None:
        """Give the traces of a decode step their rows in a pass with further padding rows."""
        if self.batch_groups and rows != self.batch_groups[0].total:
            padded = one_each(rows)
            self.batch_groups = [padded[group.start] for group in self.batch_groups]
            self._give_rows()

    def pad_prompts_to(self, rows: int) -> None:
        """Give the traces of a prefill or mixed step their rows in a pass with further padding rows."""
        self.batch_groups = [group.padded(rows) for group in self.batch_groups]
        self._give_rows()

    def narrow_to_last(self, requests: int) -> None:
        """Give the traces of the decode step's last `requests` their rows in a pass over only those requests."""
        self.batch_groups[-requests:] = one_each(requests)
        self._give_rows()

    def unflatten(self, sampling: Sequence[ScheduledRequest]) -> None:
        """Give each trace its row among `sampling`, the requests that sample in this step, in place of its token rows."""
        places = one_each(len(sampling))
        last = self.batch_groups[-1] if self.batch_groups else None  # a split step moved only the last groups
        if not self._batches and last is not None and last.total == len(sampling) and last is places[last.start]:
            return  # a decode step, which was neither padded nor split: all have them
        for place, entry in zip(places, sampling, strict=True):
            group = self.req_id_to_batch_group_idx.get(entry.request_id)
            if group is not None:  # else it has no trace, or has left the pass
                self.batch_groups[group] = place
        self._give_rows(sampled=True)

    # -- a step --------------------------------------------------------------------------------

    def report(self, output: ModelRunnerOutput) -> None:
        """Count the step in the traces' receipts, and note which of them failed or stopped in it."""
        for trace in self.traces:
            trace.receipt.steps[output.execution] += 1
        for rid in self.req_id_to_batch_group_idx:
            for trace in _with_batches([self.attached[rid][1]]):
                if trace.ended and trace.error is not None:
                    output.errors.setdefault(rid, trace.error)
                elif trace.ended and trace.stopped:
                    output.stopped.add(rid)


def _with_batches(traces: Iterable[RequestTrace]) -> dict[RequestTrace, None]:
    """The traces, and those that see their requests together with others."""
    return dict.fromkeys(own for trace in traces for own in (trace, *trace.whole_batch))
