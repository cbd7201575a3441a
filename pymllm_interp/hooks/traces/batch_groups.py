"""Batch groups: which rows of a step belong to which request's trace.

A step's batch is flat. `process_new_reqs` gives each traced request its ``[start, size]`` token rows, in the order of the
batch's rows; after the forward pass `unflatten` re-points it to its row among the sampled ones; `process_finished_reqs`
winds it up. Requests without a trace are skipped, but their rows are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...core.output import ScheduledRequest
from . import lifecycle
from .rows import RowSpan

if TYPE_CHECKING:
    from ...core.request import Request
    from .envoy import TracedModel
    from .trace import RequestTrace


@lru_cache(maxsize=16)
def one_each(total: int) -> list[RowSpan]:
    """The rows of `total` requests that have one each, in the order of the batch. Shared by all steps: nobody changes them."""
    return [RowSpan(row, 1, total, row, 1, total) for row in range(total)]


class NNsightRequestHelper:
    """The traces of the requests in flight, and their rows in the current step.

    Attributes:
        req_id_to_batch_group_idx: request -> its place in this step's batch.
        num_prompts_in_mediator: trace -> requests of it that are still in flight.
    """

    def __init__(self) -> None:
        self.req_id_to_batch_group_idx: dict[str, int] = {}
        self.num_prompts_in_mediator: dict[int, int] = {}
        self._traces: dict[str, RequestTrace] = {}
        self._groups: list[tuple[int, int]] = []
        self._step: list[tuple[ScheduledRequest, RequestTrace]] = []

    @property
    def ids_to_batch_group(self) -> Mapping[str, tuple[int, int]]:
        """Request -> its ``(start, size)`` token rows in this step."""
        return MappingProxyType({rid: self._groups[i] for rid, i in self.req_id_to_batch_group_idx.items()})

    @property
    def interleaver_to_ids(self) -> Mapping[int, set[str]]:
        """Trace -> its requests in flight."""
        ids: dict[int, set[str]] = {}
        for rid, trace in self._traces.items():
            ids.setdefault(trace.trace_id, set()).add(rid)
        return MappingProxyType(ids)

    @property
    def flat_batch_groups(self) -> Mapping[int, list[tuple[int, int]]]:
        """Trace -> the token rows of its requests in this step, in batch order."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for entry, trace in self._step:
            group = self._groups[self.req_id_to_batch_group_idx[entry.request.request_id]]
            groups.setdefault(trace.trace_id, []).append(group)
        return MappingProxyType(groups)

    @property
    def traces(self) -> list[RequestTrace]:
        """The traces that take part in this step, in batch order."""
        return [trace for _, trace in self._step]

    @property
    def forward_traces(self) -> list[RequestTrace]:
        """Those of them whose request is a single forward pass, whose result is the model's output."""
        return [trace for entry, trace in self._step if entry.request.forward_only]

    def process_new_reqs(self, new_reqs: list[ScheduledRequest], model: TracedModel) -> None:
        """Start the traces of requests that are here for the first time, and give every traced one its rows of this step.

        Args:
            new_reqs: the step's requests, in the order of the batch's rows.
            model: that the traces were written against.
        """
        self._groups, self._step, self.req_id_to_batch_group_idx = [], [], {}
        for entry, rows in zip(new_reqs, _rows_of(new_reqs), strict=True):
            request = entry.request
            trace: RequestTrace | None = request.trace
            if trace is not None:
                request_id = request.request_id
                self.req_id_to_batch_group_idx[request_id] = len(self._groups)
                self._groups.append((rows.start, rows.size))
                self._step.append((entry, trace))
                if request_id not in self._traces:
                    self._admit(request, trace, model)
                trace.rows = rows

    def drop_finished(self) -> list[RequestTrace]:
        """Take the traces of finished requests out of the step; returns them."""
        dropped = [trace for entry, trace in self._step if entry.request.finished]
        if dropped:
            self._step = [(entry, trace) for entry, trace in self._step if not entry.request.finished]
        return dropped

    def pad_to(self, rows: int) -> None:
        """Re-point the traces of a decode step to their rows in a pass that has further rows, of nobody, behind the step's."""
        if self._step and rows != self._step[0][1].rows.total:  # pyright: ignore[reportOptionalMemberAccess]
            padded = one_each(rows)
            for _, trace in self._step:
                assert trace.rows is not None
                trace.rows = padded[trace.rows.start]

    def narrow_to_last(self, requests: int) -> None:
        """Re-point the traces of the decode step's last `requests` to their rows in a pass over those alone."""
        for rows, (_, trace) in zip(one_each(requests), self._step[-requests:], strict=True):
            trace.rows = rows

    def unflatten(self, model: TracedModel, rows: list[ScheduledRequest]) -> None:
        """Re-point each trace from its tokens to its row among `rows`, the requests that sample in this step."""
        places = one_each(len(rows))
        last = self._step[-1][1].rows if self._step else None  # where some only were moved, it was
        if last is not None and last.total == len(rows) and last is places[last.start]:
            return  # a decode step, which was neither padded nor split: all have them
        for own, entry in zip(places, rows, strict=True):
            trace: RequestTrace | None = entry.request.trace
            if trace is not None and trace.rows is not None:  # else it has left the pass
                trace.rows = own

    def process_finished_reqs(
        self, finished_request_ids: set[str], requests: Mapping[str, Request], model: TracedModel
    ) -> None:
        """Serve the results that only a finished request has, end the blocks that still wait, and forget the requests.

        The requests of a gang come together: their blocks may still wait for each other.
        """
        ending: list[tuple[RequestTrace, Request]] = []
        for rid in finished_request_ids:
            trace = self._traces.pop(rid, None)
            self.req_id_to_batch_group_idx.pop(rid, None)
            request = requests.get(rid)
            if trace is None and request is not None:
                trace = request.trace  # ended before its first step
            if trace is None:
                continue
            left = self.num_prompts_in_mediator.get(trace.trace_id, 1) - 1
            if left > 0:
                self.num_prompts_in_mediator[trace.trace_id] = left
            else:
                self.num_prompts_in_mediator.pop(trace.trace_id, None)
            if request is not None:
                trace.over, trace.rows = True, None
                ending.append((trace, request))
        self._wind_up(ending, model)
        for trace, request in ending:
            lifecycle.close(model.interleaver, trace, request)
        if not self._traces:  # the last step's hold what their blocks hold
            self._step = []

    @staticmethod
    def _wind_up(ending: list[tuple[RequestTrace, Request]], model: TracedModel) -> None:
        """Results first, then loops that end, then blocks that wait for what never comes; barriers are given up last."""
        while (
            any(lifecycle.serve_results(model.interleaver, trace, request) for trace, request in ending)
            or any(lifecycle.end_waiting(model.interleaver, trace, barriers=False) for trace, _ in ending)
            or any(lifecycle.end_waiting(model.interleaver, trace, barriers=True) for trace, _ in ending)
        ):
            pass

    def _admit(self, request: Request, trace: RequestTrace, model: TracedModel) -> None:
        self._traces[request.request_id] = trace
        self.num_prompts_in_mediator.setdefault(trace.trace_id, trace.num_prompts)
        lifecycle.start(model.interleaver, trace, request)


def _rows_of(entries: list[ScheduledRequest]) -> list[RowSpan]:
    """The rows of each request of a step."""
    if all(entry.decodes for entry in entries):
        return one_each(len(entries))
    total, logit_total = sum(entry.num_tokens for entry in entries), sum(entry.logit_rows for entry in entries)
    rows, start, logit_start = [], 0, 0
    for entry in entries:
        size, logit_size = entry.num_tokens, entry.logit_rows
        rows.append(RowSpan(start, size, total, logit_start, logit_size, logit_total))
        start += size
        logit_start += logit_size
    return rows
