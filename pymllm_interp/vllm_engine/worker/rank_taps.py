"""`RankTaps`: callbacks of a rank's ops, which read device tables or call functions. `TappedStage`: its declared stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.model_spec import delta_site, residual_site
from ...hooks.captures.egress.result_memory import Memory
from ...hooks.interventions.host_ops import logit_ops
from ...layers.edits.base import apply_and_capture
from ...layers.edits.host import HostOps
from ...layers.edits.table import TableOps
from ...runner.stages.declared_stage import DeclaredStage
from ..settings import uses_tables
from .batch import VllmStep
from .egress.result_arena import ResultArena
from .op import directly
from .split_rows import SplitRows


class RankTaps:
    """Callbacks of the ops (op.py), which change their tensors in place.

    Args:
        static: ops and captures of all token rows, in device tables; None: each step has `ops`.
        seen: [table rows] int32, counts the rows of each owner.
        split: the tensor-parallel ranks.

    Attributes:
        ops: ops and captures of the step as functions; with tables only those at the logits. None without.
        asked: sites of the step's requests, equal on all ranks.
        calls: number of calls without tables.
        is_silent: modules of vLLM are called as parts of other modules, which have the inner sites.
    """

    def __init__(self, static: TableOps | None, seen: torch.Tensor, split: SplitRows) -> None:
        self.static, self.seen, self.split = static, seen, split
        self.ops: Any = None
        self.asked: frozenset[int] = frozenset()
        self.calls, self.is_silent = 0, False
        self._is_served, self._is_idle, self._uncounted = False, False, torch.zeros_like(seen)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Leave inner sites to the caller."""
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False

    @contextmanager
    def within_layers(self, is_idle: bool) -> Iterator[None]:
        """vLLM's own layers run in a pass by modules. It has served the sites of their input, and counts the rows itself.

        Args:
            is_idle: no request of the step has ops or captures.
        """
        before = self.is_silent, self.seen
        self.is_silent, self.seen, self._is_served, self._is_idle = False, self._uncounted, True, is_idle
        try:
            with directly():
                yield
        finally:
            (self.is_silent, self.seen), self._is_served, self._is_idle = before, False, False

    def counts(self) -> Callable[[], None]:
        """Keep the counts of calls and of gates. Returns a function that sets them back after a failed pass."""
        calls, tables = self.calls, None if self.static is None else self.static.tables
        kept = [] if tables is None else [(own, own.clone()) for own in (tables.fires, tables.first_fired)]

        def set_back() -> None:
            self.calls = calls
            for own, before in kept:
                own.copy_(before)

        return set_back

    def _rests(self) -> bool:
        """Whether a call has nothing to do. The pass by modules has served the sites of the call that layers begin with."""
        served, self._is_served = self._is_served, False
        return served or self._is_idle

    def pair(self, delta: torch.Tensor, stream: torch.Tensor, residual_add: int) -> None:
        """Apply ops and captures of the delta and the sum at a residual add; both [rows, hidden]."""
        if self._rests():
            return
        if self.static is not None:
            from ...kernels.edit_pair import edit_pair

            edit_pair(delta, stream, residual_add, self.static.tables, self.static.token_rows, self.seen)
            return
        self.calls += 1
        if self.ops is not None:
            pair_on_host(delta, stream, residual_add, self.ops)

    def norm(
        self, delta: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, eps: float, kind: int, residual_add: int
    ) -> None:
        """`pair`, then the norm: `stream` becomes the sum, and `delta` its norm, with the final norm's ops and captures."""
        from ...kernels.edit_ops import edit_norm_

        assert self.static is not None, "norms of vLLM stay where ops are functions"
        rows = self.static.token_rows
        if self._rests():
            rows = rows._replace(owners=torch.full_like(rows.owners, -1))
        edit_norm_(delta, stream, weight, eps, kind, residual_add, self.static.tables, rows, self.seen)

    def state(self, rows: torch.Tensor, site: int) -> None:
        """Apply ops and captures of a site's rows [rows, hidden]."""
        if self._rests():
            return
        if self.static is not None:
            from ...kernels.edit_pair import edit_state

            edit_state(rows, site, self.static.tables, self.static.token_rows, self.seen)
            return
        self.calls += 1
        if self.ops is not None:
            at_site(rows, site, self.ops)

    def inner(self, rows: torch.Tensor, sites: Sequence[int], widths: Sequence[int]) -> None:
        """Apply ops and captures of inner sites, of which `rows` [rows, sum(widths)] has the columns. A site of -1 has no tap."""
        if self.is_silent:
            return
        for site, part in zip(sites, rows.split(list(widths), -1), strict=True):
            if site < 0:
                continue
            if self.static is not None or site in self.asked:
                self.split.whole(part, site, partial(self.state, site=site))
            else:
                self.calls += 1


class Decisions(NamedTuple):
    """Decisions of a pass that later steps read."""

    fired: dict[str, dict[int, int]]
    """Request id -> slot of a gate or monitor -> position from which the ops behind it act."""
    scores: torch.Tensor | None
    """[slots, tokens] dot products of monitors; None without."""


class TappedStage(DeclaredStage):
    """The declared stage of a rank.

    Attributes:
        results: memory of captured states.
    """

    results: ResultArena

    def result_memory(self) -> Memory:
        return self.results

    @property
    def has_tables(self) -> bool:
        """Whether passes read declared ops from device tables."""
        return uses_tables(torch.device(self.device).type)

    def drop(self, request_id: str) -> None:
        """Let go of a request, without its counts of the tables: to read them waits for the device."""
        self._in_tables.pop(request_id, None)
        self.forget(request_id)

    def decisions(self, rows: VllmStep) -> Decisions:
        """Return the decisions of a step's pass."""
        fired: dict[str, dict[int, int]] = {}
        for entry in rows.entries:
            if (declared := self._live.get(entry.request_id)) is not None:
                found: Any = declared.first_fired
                if self.device_tables is not None and entry.request_id in self._in_tables:
                    row = self._in_tables[entry.request_id][0]
                    found = dict(enumerate(self.device_tables.tables.first_fired[row].tolist()))
                fired[entry.request_id] = {slot: int(position) for slot, position in found.items()}
        slots = self._num_slots(rows)
        return Decisions(fired, self._score_memory[:slots, : rows.num_tokens].cpu() if slots else None)

    @property
    def _score_memory(self) -> torch.Tensor:
        """[slots, rows] dot products of the pass under way, if it has monitors."""
        if self._host_scores is not None:
            return self._host_scores
        return self._tables.token_rows.scores

    def decide(self, found: Decisions) -> None:
        """Take the decisions of rank 0, where the pass of a step did not run."""
        for request_id, fired in found.fired.items():
            self.note_fired(request_id, fired)
        if found.scores is not None and (self._host_scores is not None or self.table_ops is not None):
            slots, tokens = found.scores.shape
            self._score_memory[:slots, :tokens] = found.scores.to(self.device)

    def clear_scores(self, slots: int, tokens: int) -> None:
        """Zero the scores of a pass that were taken: the next one writes only the scores of this rank's sites."""
        if self.table_ops is not None:
            self.table_ops.token_rows.scores[:slots, :tokens] = 0

    def logit_table_ops(self, rows: VllmStep, num_rows: int) -> TableOps | None:
        """The ops at the logits of a step."""
        assert self.device_tables is not None and self.table_ops is not None, "on a CPU `site_ops` has them"
        if not any(
            found is not None and found.declared and found.declared.hooks.edits_logits for found in rows.batch.found
        ):
            return None
        logits = logit_ops(self._request_rows(rows), self.model.num_hidden_layers, self.device_tables)
        return self.table_ops.first_rows(num_rows, logits)


def at_site(rows: torch.Tensor, site: int, ops: HostOps) -> None:
    """Ops and captures of rows [rows, width] at a site, in place."""
    if site in ops.by_site or site in ops.captures:
        after = apply_and_capture(rows[None], ops, site)[0]
        if after is not rows and site in ops.by_site:
            rows.copy_(after)


def pair_on_host(delta: torch.Tensor, stream: torch.Tensor, residual_add: int, ops: HostOps) -> None:
    """Edited rows become (0, the edited sum), which the norm adds exactly. Other rows keep all bits."""
    at_site(delta, delta_site(residual_add), ops)
    site = residual_site(residual_add)
    if site not in ops.by_site and site not in ops.captures:
        return
    total = stream + delta
    after = apply_and_capture(total[None], ops, site)[0]
    if site in ops.by_site:
        changed = (after != total).any(-1, keepdim=True)
        stream.copy_(torch.where(changed, after, stream))
        delta.copy_(torch.where(changed, torch.zeros_like(delta), delta))
