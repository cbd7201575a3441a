"""`Declared`: the interventions and captures of one request, bound and checked before the request is scheduled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..attention.cut_edges import RequestCuts
from ..core.forward_batch import LayerStatePool
from ..core.model_spec import LOGITS, STATE, ModelSpec, site_index
from ..core.receipt import Applied, Captured
from ..core.step import DeclaredResult, RequestEnd, RequestHooks
from ..utils.copies import shallow
from .bind import DeclaredLimits, bind
from .captures.activations import Activations, CaptureError, lost
from .captures.layer_rows import LayerCaptures
from .captures.layout import CaptureLayout, CaptureProgress, layout_of
from .captures.reductions.patterns import PatternCaptures, is_pattern
from .captures.reductions.reduction import Readout
from .captures.rows import CapturedRows
from .captures.spec import Capture
from .captures.state_captures import StateCaptures, is_state
from .interventions.fires import Fires
from .interventions.gates import Flag, GateRead, RequestGates
from .interventions.knockout import BoundKnockout, Intervention, Knockout, bind_knockouts, request_cuts
from .interventions.op import Op
from .interventions.state_patch import StatePatch, bind_state_patches, is_state_patch
from .kv_edits import KVEdits
from .positions import Window
from .site import Site
from .spec import Spec


def _check_size(
    sources: Sequence[CaptureLayout | LayerCaptures[Any] | None], longest: int, limits: DeclaredLimits
) -> None:
    num_bytes = sum(captured.num_bytes for captured in sources if captured is not None)
    if num_bytes > limits.max_capture_bytes:
        raise ValueError(
            f"the captures of a request of {longest} positions may take {num_bytes / 2**20:.0f} MiB; a request's results hold "
            f"{limits.max_capture_bytes / 2**20:.0f} (max_capture_bytes): raise it, or capture fewer sites or positions"
        )


LARGE = 1 << 15
"""Size of a vector that takes long to hash: above 70 us."""


class PlacedOp(NamedTuple):
    """An op at one site, at the positions of its windows."""

    spec: Op
    site: Site
    windows: tuple[Window, ...]
    missing: int = 0
    """Positions that the prompt does not have."""
    flag: Flag | None = None
    """Flag of a gate at an earlier site: read by the op, or set by a `GateRead`."""


class Demands:
    """The scheduler's view of a `Declared`, which the worker owns. They share nothing that changes.

    Args:
        kv_edits: edits of the KV.
        captures: sizes in the ring, and the scheduler's own progress; None without captures.
        patterns: [longest] bool, positions with captured attention patterns; None: no position.
        gated: positions at which a gate is counted, or decides.
        vectors: id of a tensor -> its first row in `VectorPool`.
        held: keys of these rows.
        why_undrafted: see `Declared.why_undrafted`.
        states: [longest] bool, positions behind which a recurrent state is read or written; None: no position.
    """

    def __init__(
        self,
        kv_edits: KVEdits,
        captures: CaptureProgress | None,
        patterns: np.ndarray | None,
        gated: Sequence[Window],
        vectors: dict[int, int],
        held: list[tuple[bytes, int]],
        why_undrafted: str = "",
        states: np.ndarray | None = None,
    ) -> None:
        self.kv_edits, self.captures = kv_edits, captures
        self.vectors, self.held, self.why_undrafted = vectors, held, why_undrafted
        self._patterns, self._states, self._gated = patterns, states, gated

    def state_stop(self, start: int) -> int | None:
        """Latest end of a chunk from position `start` on, so that a recurrent state is reached; None: any."""
        own = None if self._states is None else self._states[start:]
        return start + int(own.argmax()) + 1 if own is not None and own.any() else None

    def first_observed(self, start: int) -> tuple[int | None, str]:
        """The first position from `start` on that must be computed to be captured or counted, and why; (None, "") for none.

        The receipt counts the rows on which a gate fired, and a gate with scope="prompt" reads all of the prompt.
        """
        firsts = [] if self.captures is None else [self.captures.first_position(start)]
        for wanted in (self._patterns, self._states):
            if wanted is not None and (own := wanted[start:]).any():
                firsts.append(start + int(own.argmax()))
        captured = min([first for first in firsts if first is not None], default=None)
        gated = [w.start + w.among(0, start) * w.step for w in self._gated if w.stop is None or w.stop > start]
        if gated and (captured is None or min(gated) < captured):
            return min(gated), "a gate is counted"
        return captured, "" if captured is None else "captured"


@dataclass
class Declared:
    """The interventions and captures of one request.

    Attributes:
        ops: site -> ops in the order in which they act. Sites are numbers of `site_index`.
        captures: None without captures.
        prompt_len: length of the prompt in tokens.
        logits_from: the first position with logits.
        vectors: id of a tensor -> its first row in `VectorPool`.
        held: keys of these rows, until the pool's `release`.
        fires: fires of gates.
        first_fired: see `PassFlags`; on CUDA, while the request is not in the device tables.
        knockouts: edges of attention that are cut.
        kv_edits: edits of the KV among them.
        given: interventions and captures, as they were given.
        draft_stop: positions after the last pass with drafts, until they are settled; None without.
        patterns: captures of attention patterns; None without.
        states: captures of recurrent states; None without.
        state_patches: recurrent states that are replaced behind the prompt.
        shared: cached results for the hooks, shared by all `fresh` copies.
    """

    ops: dict[int, list[PlacedOp]]
    captures: CapturedRows | None
    prompt_len: int
    logits_from: int = 0
    vectors: dict[int, int] = field(default_factory=dict)
    held: list[tuple[bytes, int]] = field(default_factory=list)
    fires: Fires = field(default_factory=Fires)
    first_fired: dict[int, torch.Tensor] = field(default_factory=dict)
    knockouts: Sequence[BoundKnockout] = ()
    kv_edits: KVEdits = field(default_factory=lambda: KVEdits({}, (), 1))
    patterns: PatternCaptures | None = None
    states: StateCaptures | None = None
    state_patches: Sequence[StatePatch] = ()
    given: tuple[Sequence[Intervention], Sequence[Capture]] = ((), ())
    draft_stop: int | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def bound(
        cls, hooks: RequestHooks, prompt_len: int, model: ModelSpec, limits: DeclaredLimits, readout: Readout | None
    ) -> Declared:
        """`of` the hooks of a request."""
        longest = prompt_len + hooks.max_tokens - 1
        found = cls.of(
            hooks.interventions, model, prompt_len, limits, hooks.captures, longest, hooks.logits_from, readout
        )
        if found.acts_on_states and hooks.differentiable:
            raise ValueError("a pass with gradients keeps no recurrent state: leave out captures and patches at state")
        if hooks.trace_key is not None and found.states is not None and found.states.wanted[: prompt_len - 1].any():
            raise ValueError(
                "the prompt of a trace runs in one pass: there, recurrent states are captured behind the prompt (positions=-1) "
                "and later; a generation without a trace captures them anywhere"
            )
        return found

    @classmethod
    def of(
        cls,
        specs: Sequence[Intervention],
        model: ModelSpec,
        prompt_len: int,
        limits: DeclaredLimits,
        captures: Sequence[Capture] = (),
        longest: int = 0,
        logits_from: int = 0,
        readout: Readout | None = None,
    ) -> Declared:
        """The specs of one request, bound and checked.

        Args:
            specs: the interventions, in the order given.
            model: spec with sites and dtype.
            prompt_len: length of the prompt in tokens.
            limits: limits of the engine.
            captures: captures in any order.
            longest: most positions that the request may reach.
            logits_from: the first position with logits.
            readout: readout of the model, for reductions and normed sites.

        Raises:
            ValueError: an error of `bind`, a site or an op without kernels, or too many ops at a site. Also a site captured
                twice, or a capture that may exceed the memory of a request's results.
        """
        placed: list[tuple[int, bool, PlacedOp]] = []
        counts: Counter[int] = Counter()
        gates = RequestGates(model, prompt_len, limits.device_tables)
        knockouts = bind_knockouts([s for s in specs if isinstance(s, Knockout)], model, prompt_len, longest)
        patches = bind_state_patches(filter(is_state_patch, specs), model, prompt_len)  # pyright: ignore[reportArgumentType]
        for spec in (spec for spec in specs if isinstance(spec, Op) and not is_state_patch(spec)):
            for bound in bind(spec, model, prompt_len):
                # resid_pre.i is the state that resid_post.i-1 left, so its ops follow; likewise resid_pre.0 after embed.
                later = bound.site.kind == "resid_pre"
                limits.check_op(bound.spec, bound.site)
                site = site_index(bound.site, model.num_hidden_layers)
                if not bound.spec.identity:
                    counts[site] += len(bound.windows)
                    limits.check_count(bound.site, counts[site])
                flag = gates.flag_of(bound.spec, bound.site)
                placed.append((site, later, PlacedOp(bound.spec, bound.site, bound.windows, bound.missing, flag)))
        ops: dict[int, list[PlacedOp]] = {}
        for site, _, op in sorted(placed, key=lambda entry: entry[:2]):  # a stable sort keeps the order given
            if not op.spec.identity:
                ops.setdefault(site, []).append(op)
        for site, found in ops.items():
            limits.check_encoders(found, site)
        replaced = [(patch.layer, patch.spec) for patch in patches]
        edits = KVEdits(ops, knockouts, model.num_hidden_layers, replaced, prompt_len)
        for read, flag in gates.reads():  # after the ops that change the state
            (bound,) = bind(read, model, prompt_len)
            limits.check_op(read, bound.site)
            site = site_index(bound.site, model.num_hidden_layers)
            ops.setdefault(site, []).append(PlacedOp(read, bound.site, bound.windows, flag=flag))
        for found in ops.values():
            limits.check_count(found[0].site, sum(len(op.windows) for op in found))
        of_patterns = [spec for spec in captures if is_pattern(spec)]
        of_states = [spec for spec in captures if is_state(spec.site)]
        others = [spec for spec in captures if not (is_pattern(spec) or is_state(spec.site))]
        patterns = PatternCaptures(of_patterns, model, prompt_len, longest) if of_patterns else None
        states = StateCaptures(of_states, model, prompt_len, longest) if of_states else None
        for spec in others:
            limits.check(spec.sites_in(model)[0])
        layout = layout_of(others, model, prompt_len, longest, logits_from, readout) if others else None
        _check_size((layout, patterns, states), longest, limits)
        captured = None if layout is None else CapturedRows(layout)
        return cls(
            ops, captured, prompt_len, logits_from, knockouts=knockouts, kv_edits=edits, patterns=patterns, states=states,
            state_patches=patches, given=(specs, captures),
        )  # fmt: skip

    def fresh(self) -> Declared:
        """The same hooks for another request with a prompt of this length: nothing is counted or captured yet."""
        assert not self.bound_for_each, "patterns, and what acts on states, are bound for each request"
        found = shallow(self)
        found.captures = None if self.captures is None else CapturedRows(self.captures.layout)
        found.vectors, found.held, found.fires, found.first_fired = {}, [], Fires(), {}
        return found

    @property
    def bound_for_each(self) -> bool:
        """Whether equal requests cannot share it: it stores captures without the ring, or depends on their passes."""
        return self.patterns is not None or self.acts_on_states

    @property
    def only_captures(self) -> bool:
        """Whether it captures states, and nothing else: no vector, and no weight, is held."""
        captures = self.captures is None or not any(group.reads_weights for group in self.captures.layout.groups)
        return captures and not (self.bound_for_each or self.ops or self.knockouts or self.state_patches)

    @cached_property
    def edits_logits(self) -> bool:
        """Whether an op acts at the logits."""
        return any(found[0].site.kind == LOGITS for found in self.ops.values())

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
        self.fires.settle(max(self.draft_stop - num_positions, 0))
        if self.captures is not None:
            self.captures.settle(num_positions)
        self.draft_stop = None

    def why_undrafted(self, in_tables: bool) -> str:
        """Counts or captures that `settle` cannot take back after a pass with drafts, or "".

        Args:
            in_tables: ops run as kernels, from device tables, and captures use the ring.
        """
        if self.patterns is not None:
            return "attention patterns"
        if in_tables and self.captures is not None and self.captures.layout.in_order:
            return "pooled captures on CUDA"
        return "gates on CUDA" if in_tables and any(op.spec.when is not None for op in self) else ""

    def demands(self, in_tables: bool = False) -> Demands:
        """The scheduler's view of it.

        Args:
            in_tables: see `why_undrafted`.
        """
        sizes = None if self.captures is None else CaptureProgress(self.captures.layout)
        patterns = None if self.patterns is None else self.patterns.wanted
        states = None if self.states is None else self.states.wanted
        if self.state_patches:
            states = np.zeros(self.prompt_len, dtype=bool) if states is None else states
            states[self.prompt_len - 1] = True
        key = "demands", in_tables
        if key not in self.shared:
            # If each position decides for itself, a gate's site matters only at the positions of its ops.
            gated = [
                window
                for op in self
                if op.spec.when is not None or (isinstance(op.spec, GateRead) and op.flag and op.flag.prompt_len)
                for window in op.windows
            ]
            self.shared[key] = gated, self.why_undrafted(in_tables)
        gated, why_undrafted = self.shared[key]
        return Demands(self.kv_edits, sizes, patterns, gated, self.vectors, self.held, why_undrafted, states)

    def activations(self, token_ids: list[int], expected: int | None = None) -> Activations | None:
        """The captured states and patterns of the positions of `token_ids`; None without captures.

        Args:
            expected: positions that must have been computed. If a site lacks some of their rows, the result is an error.
        """
        if expected is not None and (error := self._shortfall(expected)) is not None:
            return lost(error)
        found = None if self.captures is None else self.captures.result(token_ids)
        for own in (self.patterns, self.states):
            if own is not None:
                found = Activations(own.num_layers) if found is None else found
                if found.error is None:
                    own.add_to(found, token_ids)
        return found

    def answer(self, end: RequestEnd) -> Callable[[Future[DeclaredResult]], None]:
        """Settle it. Returns the function that sets its results, or their error, once all captured states have arrived."""
        counted = end.num_computed
        self.settle(counted)
        result = DeclaredResult(self.applied(counted))

        def complete(arrived: Future[DeclaredResult]) -> None:
            try:
                result.activations = self.activations(end.all_token_ids[:counted], end.expected_len)
                if result.activations is None or result.activations.error is None:
                    result.captured = self.captured(counted)  # which counts omitted values of results
                arrived.set_result(result)
            except Exception as error:
                arrived.set_exception(error)

        return complete

    @property
    def acts_on_states(self) -> bool:
        """Whether it captures or replaces recurrent states."""
        return self.states is not None or bool(self.state_patches)

    def after_states(self, position: int, slot: int, pool: LayerStatePool) -> None:
        """Replace and capture the states that are due behind a position, which the last pass ended with.

        Args:
            slot: slot of the request in `pool`.
        """
        if position == self.prompt_len - 1:
            for patch in self.state_patches:
                patch.write(slot, pool)
        if self.states is not None:
            for layer, place in self.states.due(position):
                self.states.keep(layer, position, pool.memory(place.number)[slot])

    @property
    def _sources(self) -> list[CapturedRows | LayerCaptures[Any]]:
        return [source for source in (self.captures, self.patterns, self.states) if source is not None]

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
        return request_cuts(index, first_row, start, num_rows, self.knockouts, reads)

    def captured(self, num_positions: int) -> list[Captured]:
        """Number of captured rows by site, among the first `num_positions` positions."""
        sources = self._sources
        if len(sources) == 1 and self.captures is not None and self.captures.layout.counts_alike:
            known, found = self.shared.get("captured", (None, []))
            if known != num_positions:
                found = [Captured(*counted) for counted in self.captures.counts(num_positions)]
                self.shared["captured"] = num_positions, found
            return list(found)
        return [Captured(*counted) for captured in sources for counted in captured.counts(num_positions)]

    def applied(self, num_positions: int) -> list[Applied]:
        """Number of rows that each op acted on, among the first `num_positions` positions."""
        if any(op.spec.when is not None for op in self) or not (
            self.ops or self.knockouts or self.state_patches
        ):  # nothing is shared without ops
            return self._applied(num_positions)
        key = "applied", num_positions
        if key not in self.shared:
            self.shared[key] = self._applied(num_positions)
        return list(self.shared[key])

    def _applied(self, num_positions: int) -> list[Applied]:
        def rows(op: PlacedOp, first: int, stop: int) -> int:
            return sum([window.among(first, min(stop, num_positions)) for window in op.windows])

        return (
            [
                Applied(
                    intervention=type(op.spec).__name__,
                    site=str(op.site),
                    prompt_rows=rows(op, self.logits_from if op.site.kind == LOGITS else 0, self.prompt_len),
                    generated_rows=rows(op, self.prompt_len, num_positions),
                    gate_fires=None if op.spec.when is None else int(self.fires.get((site, i), 0)),
                    missing=op.missing,
                )
                for site, found in sorted(self.ops.items())
                for i, op in enumerate(found)
                if not isinstance(op.spec, GateRead)
            ]
            + [
                Applied(
                    type(knockout.spec).__name__,
                    f"pattern.{layer}",
                    *knockout.rows(layer, self.prompt_len, num_positions),
                )
                for knockout in self.knockouts
                for layer in knockout.layers
            ]
            + [
                Applied("Patch", f"{STATE}.{patch.layer}", int(num_positions >= self.prompt_len))
                for patch in self.state_patches
            ]
        )

    def hash_large(self) -> None:
        """Hash large vectors on the caller's thread. The engine's thread hashes the rest, on demand."""
        if "hashed" in self.shared:
            return
        for spec in (*self.given[0], *self.given[1], *(op.spec for op in self)):
            if isinstance(spec, Spec) and any(tensor.numel() > LARGE for _, tensor in spec._content().tensors):
                hash((spec.fingerprint, spec.effect))
        self.shared["hashed"] = True

    def tensors(self) -> list[torch.Tensor]:
        """The distinct vectors that the pool holds for the request."""
        found = [vector for op in self for vector in op.spec.vectors]
        for group in () if self.captures is None else self.captures.layout.groups:
            if group.probes is not None:
                found.append(group.probes)
        return list({id(tensor): tensor for tensor in found}.values())

    def __iter__(self) -> Iterator[PlacedOp]:
        return (op for found in self.ops.values() for op in found)
