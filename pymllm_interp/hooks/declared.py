"""`Declared`: state of the interventions and captures of one request."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..attention.cut_edges import RequestCuts
from ..core.forward_batch import LayerStatePool, PagedKV
from ..core.model_spec import KV, PATTERN, STATE
from ..core.receipt import Captured
from ..core.step import DeclaredResult, RequestEnd
from .bound_hooks import BoundHooks
from .captures.activations import Activations, CaptureError, lost
from .captures.kv_captures import KVCaptures
from .captures.layer_rows import LayerCaptures
from .captures.layout import CaptureProgress
from .captures.reductions.patterns import PatternCaptures
from .captures.rows import CapturedRows
from .captures.state_captures import StateCaptures
from .captures.streamed import StreamedRows
from .demands import Demands
from .interventions.gates import Fires
from .interventions.knockout import request_cuts
from .site import in_part


class PartDeclared:
    """The interventions and captures of a request at the sites of a part of the model. The part runs once.

    Args:
        part: key in `ModelSpec.parts`.
        declared: state of them, bound to the part.
        token_ids, images: see `PartInput`.
    """

    def __init__(self, part: str, declared: Declared, token_ids: list[int], images: list[range]) -> None:
        self.part, self.declared, self.token_ids, self._images, self._ran = part, declared, token_ids, images, False
        self._now = declared

    def next_pass(self, images: range | None) -> tuple[Declared, range]:
        """State and rows of the part's next pass. After a preemption it runs again, and nothing is captured or counted.

        Args:
            images: images of the pass, in order from pass to pass; None: all of the part's input.
        """
        if images is None or not images.start:
            if self._ran:
                self._now = Declared(self.declared.hooks)
                self._now.captures = None
            self._ran = True
        own = [] if images is None else self._images[images.start : images.stop]
        return self._now, range(own[0].start, own[-1].stop) if own else range(len(self.token_ids))

    def add_to(self, result: DeclaredResult) -> None:
        """Add its counts and states to a request's."""
        own, counted, part = self.declared, len(self.token_ids) if self._ran else 0, self.part
        result.applied += [
            replace(each, site=in_part(each.site, part)) for each in own.hooks.applied(counted, own.fires, {})
        ]
        states = own.activations(self.token_ids[:counted], counted)
        if states is None or (result.activations is not None and result.activations.error is not None):
            return
        if states.error is not None:
            result.activations = states
            return
        if result.activations is None:
            result.activations = Activations(own.captures.layout.num_layers if own.captures is not None else 0)
        for site in states:
            result.activations.add(
                in_part(site, part), states[site], states.positions[site], states.token_ids[site], states.others(site)
            )
        result.captured += [replace(each, site=in_part(each.site, part)) for each in own.captured(counted)]


class Declared:
    """The state of one request's interventions and captures.

    Args:
        hooks: bound, and shared with equal requests.

    Attributes:
        captures: rows that it captured; None without captures.
        patterns, states, kv: attention patterns, recurrent states, and K and V that it captured; None without.
        vectors: id of a tensor -> its first row in `VectorPool`.
        held: keys of these rows, until the pool's `release`.
        fires: fires of gates.
        first_fired: see `PassFlags`; on CUDA, while the request is not in the device tables.
        parts: the state of those at the sites of a part of the model, by its key in `ModelSpec.parts`.
        draft_stop: positions after the last pass with drafts, until they are settled; None without.
    """

    def __init__(self, hooks: BoundHooks) -> None:
        self.hooks = hooks
        self.captures = None if hooks.layout is None else CapturedRows(hooks.layout)
        self._by_layer: dict[str, Any] = {kind: make() for kind, make in hooks.new_by_layer.items()}
        self.patterns: PatternCaptures | None = self._by_layer.get(PATTERN)
        self.states: StateCaptures | None = self._by_layer.get(STATE)
        self.kv: KVCaptures | None = self._by_layer.get(KV)
        self.vectors: dict[int, int] = {}
        self.held: list[tuple[bytes, int]] = []
        self.fires = Fires()
        self.first_fired: dict[int, torch.Tensor] = {}
        self.draft_stop: int | None = None
        self.parts: dict[str, PartDeclared] = {}

    def begin_draft(self, stop: int) -> None:
        """The next pass computes positions up to `stop`. Their rows and fires may be taken back, until `settle`."""
        self.draft_stop = stop
        self.fires.begin_draft()
        if self.captures is not None:
            self.captures.begin_draft()

    def settle(self, num_positions: int) -> None:
        """Commit captures and fires of the first `num_positions` positions, and roll back later ones.

        Does nothing without a draft.
        """
        if self.draft_stop is None:
            return
        self.fires.settle(num_positions)
        if self.captures is not None:
            self.captures.settle(num_positions)
        self.draft_stop = None

    def demands(self, in_tables: bool = False) -> Demands:
        """The scheduler's view of it.

        Args:
            in_tables: see `BoundHooks.why_undrafted`.
        """
        sizes = None if self.captures is None else CaptureProgress(self.captures.layout)
        patterns = None if self.patterns is None else self.patterns.wanted
        states = None if self.states is None else self.states.wanted
        if self.hooks.state_patches:
            states = np.zeros(self.hooks.prompt_len, dtype=bool) if states is None else states
            states[self.hooks.prompt_len - 1] = True
        why_undrafted = self.hooks.why_undrafted(in_tables)
        return Demands(
            self.hooks.kv_edits, sizes, patterns, self.hooks.gated, self.vectors, self.held, why_undrafted, states,
            self.hooks.depth, [patch.span for patch in self.hooks.kv_patches],
            None if self.captures is None else weakref.ref(self.captures),
        )  # fmt: skip

    def activations(self, token_ids: list[int], expected: int | None = None) -> Activations | None:
        """The captured states and patterns of the positions of `token_ids`; None without captures.

        Args:
            expected: positions that must have been computed. If a site lacks some of their rows, the result is an error.
        """
        if expected is not None and (error := self._shortfall(expected)) is not None:
            return lost(error)
        found = None if self.captures is None else self.captures.result(token_ids)
        for own in self._by_layer.values():
            found = Activations(own.num_layers) if found is None else found
            if found.error is None:
                own.add_to(found, token_ids)
        return found

    def rows_since(self, start: int, token_ids: Sequence[int]) -> StreamedRows:
        """Rows of positions from `start` on, of the captures that stream.

        Args:
            token_ids: tokens of these positions, which have been computed for good.
        """
        return StreamedRows(self._sources, start, token_ids)

    def answer(self, end: RequestEnd) -> Callable[[Future[DeclaredResult]], None]:
        """Settle it. Returns the function that sets its results, or their error, once all captured states have arrived."""
        counted = end.num_computed
        self.settle(counted)
        self.fires.take_back(counted)
        result = DeclaredResult(self.hooks.applied(counted, self.fires, self.first_fired))

        def complete(arrived: Future[DeclaredResult]) -> None:
            try:
                result.activations = self.activations(end.all_token_ids[:counted], end.expected_len)
                if result.activations is None or result.activations.error is None:
                    result.captured = self.captured(counted)  # which counts omitted values of results
                for part in self.parts.values():
                    part.add_to(result)
                if end.num_streamed is not None:
                    rows = self.rows_since(end.num_streamed, end.all_token_ids[end.num_streamed : counted])
                    result.rows = replace(rows, ended=result.activations)
                arrived.set_result(result)
            except BaseException as error:  # of a reduction, which may be code of callers; the copier continues
                arrived.set_exception(error)

        return complete

    def after_states(self, position: int, slot: int, pool: LayerStatePool) -> None:
        """Replace and capture the states that are due behind a position, which the last pass ended with.

        Args:
            slot: slot of the request in `pool`.
        """
        if position == self.hooks.prompt_len - 1:
            for patch in self.hooks.state_patches:
                patch.write(slot, pool)
        if self.states is not None:
            for layer, place in self.states.due(position):
                self.states.keep(layer, position, pool.memory(place.number)[slot])

    def after_kv(self, position: int, slots: torch.Tensor, pool: PagedKV) -> None:
        """Replace and capture the K and V that are due behind a position, which the last pass ended with.

        Args:
            slots: [positions] KV slots of the request.
        """
        for patch in self.hooks.kv_patches:
            if patch.span[1] == position + 1:
                patch.write(slots, pool)
        if self.kv is not None:
            self.kv.read(position, slots, pool)

    @property
    def _sources(self) -> list[CapturedRows | LayerCaptures[Any]]:
        return [*([] if self.captures is None else [self.captures]), *self._by_layer.values()]

    def _shortfall(self, expected: int) -> CaptureError | None:
        """The error of a site that lacks some of the first `expected` positions, if none is known to be lost."""
        if self.captures is not None and self.captures.error is not None:
            return None
        short = [f"{site}: {got} of {rows} rows" for c in self._sources for site, got, rows in c.shortfalls(expected)]
        if not short:
            return None
        return CaptureError(
            f"captured states did not arrive, of {'; '.join(short)}: an error of the engine, please report it"
        )

    def attention_cuts(self, index: int, first_row: int, start: int, num_rows: int) -> RequestCuts | None:
        """Cut edges and patterns of a pass (`request_cuts`)."""
        reads = {} if self.patterns is None else self.patterns.reads(start, num_rows)
        return request_cuts(index, first_row, start, num_rows, self.hooks.knockouts, reads)

    def captured(self, num_positions: int) -> list[Captured]:
        """Number of captured rows by site, among the first `num_positions` positions."""
        sources = self._sources
        if len(sources) == 1 and self.captures is not None and self.captures.layout.counts_alike:
            known, found = self.hooks.shared.get("captured", (None, []))
            if known != num_positions:
                found = [Captured(*counted) for counted in self.captures.counts(num_positions)]
                self.hooks.shared["captured"] = num_positions, found
            return list(found)
        return [Captured(*counted) for captured in sources for counted in captured.counts(num_positions)]
