"""`BoundHooks`: interventions and captures, bound to a model and to a prompt of one length, and checked. `Bindings` keeps them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.model_spec import KV, LOGITS, PATTERN, STATE, ModelSpec, layers_to, site_index
from ..core.receipt import Applied
from ..core.step import RequestHooks
from .bind import DeclaredLimits, after_prompt, bind
from .captures.kv_captures import KVCaptures
from .captures.layer_rows import LayerCaptures
from .captures.layout import CaptureLayout, layout_of
from .captures.reductions.patterns import PatternCaptures
from .captures.reductions.reduction import Readout
from .captures.spec import Capture, check_devices
from .captures.state_captures import StateCaptures
from .interventions.gates import Fires, Flag, GateRead, RequestGates
from .interventions.knockout import BoundKnockout, Intervention, Knockout, bind_knockouts
from .interventions.op import Op
from .interventions.patch_kv import KVPatch, PatchKV, bind_kv_patches
from .interventions.sae_op import RequestReads, SAERead
from .interventions.state_patch import StatePatch, bind_state_patches, is_state_patch
from .kv_edits import KVEdits
from .monitors.monitor import BoundMonitor, Monitor, ScoredSite, ScoreRead, bind_monitors
from .monitors.request_monitors import limits_of
from .positions import Window
from .saes.encoders import NO_ENCODERS
from .site import Site, kind_of
from .spec import Spec

KEPT = 64
"""Bound hooks that are kept."""
MAX_TABLE_BYTES = 1 << 20
"""Captures with larger tables of positions are not kept: a client could make them hold gigabytes after its requests."""
BY_LAYER: dict[str, Callable[[Sequence[Capture], ModelSpec, int, int], LayerCaptures[Any]]] = {
    PATTERN: PatternCaptures, STATE: StateCaptures, KV: KVCaptures,
}  # fmt: skip
"""Kind of a site -> captures that are not rows of a record."""
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
    read: SAERead | None = None
    """Read of another state for an op by an SAE; None for none."""


@dataclass(frozen=True, eq=False)
class BoundHooks:
    """The interventions and captures of equal requests. Nothing of it changes: `Declared` has the state of one request.

    Attributes:
        ops: site -> ops in the order in which they act. Sites are numbers of `site_index`.
        layout: layout of the captured rows; None without captures.
        logits_from: first position with logits.
        knockouts: edges of attention that are cut.
        kv_edits: edits of the KV among them.
        state_patches: recurrent states that are replaced behind the prompt.
        kv_patches: K and V that are replaced.
        monitors: monitors, with the places of their scores among a step's.
        new_by_layer: kind of a site in `BY_LAYER` -> makes its captures of a request.
        depth: number of layers up to the last site, at least 1. None: all layers.
        specs: interventions and captures, as they were given.
        reads: reads of states for ops by SAEs.
        shared: results that depend on nothing else, by name.
    """

    ops: Mapping[int, Sequence[PlacedOp]]
    layout: CaptureLayout | None
    prompt_len: int
    logits_from: int = 0
    knockouts: Sequence[BoundKnockout] = ()
    kv_edits: KVEdits = field(default_factory=lambda: KVEdits({}, (), 1))
    state_patches: Sequence[StatePatch] = ()
    kv_patches: Sequence[KVPatch] = ()
    monitors: tuple[BoundMonitor, ...] = ()
    new_by_layer: Mapping[str, Callable[[], LayerCaptures[Any]]] = field(default_factory=dict)
    depth: int | None = None
    specs: tuple[Intervention | Capture, ...] = ()
    reads: Sequence[SAERead] = ()
    shared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of_request(
        cls, hooks: RequestHooks, prompt_len: int, model: ModelSpec, limits: DeclaredLimits, readout: Readout | None
    ) -> BoundHooks:
        """`of` the hooks of a request. Raises ValueError, too, for recurrent states that its pass cannot serve."""
        longest = prompt_len + hooks.max_tokens - 1
        found = cls.of(
            hooks.interventions, model, prompt_len, limits, hooks.captures, longest, hooks.logits_from, readout
        )
        if found.acts_on_states and hooks.differentiable:
            raise ValueError("a pass with gradients keeps no recurrent state: leave out captures and patches at state")
        if found.acts_on_kv and hooks.differentiable:
            raise ValueError("a pass with gradients keeps no K and V: leave out PatchKV, and captures at kv")
        if hooks.trace_key is not None and any(patch.span[1] < prompt_len for patch in found.kv_patches):
            raise ValueError(
                "the prompt of a trace runs in one pass: there, the positions of a PatchKV contain the prompt's last token; a "
                "generation without a trace has it anywhere"
            )
        states = found.new_by_layer.get(STATE) if hooks.trace_key is not None else None
        if states is not None and states().wanted[: prompt_len - 1].any():
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
    ) -> BoundHooks:
        """The specs of one request, bound and checked.

        Args:
            model: its sites and dtype.
            captures: captures in any order.
            longest: most positions that the request may reach.
            logits_from: the first position with logits.
            readout: readout of the model, for reductions and normed sites.

        Raises:
            ValueError: an error of `bind`, a site or an op without kernels, or too many ops at a site. Also a site captured
                twice, or a capture that may exceed the memory of a request's results.
        """
        gates = RequestGates(model, prompt_len, limits.device_tables)
        knockouts = bind_knockouts([s for s in specs if isinstance(s, Knockout)], model, prompt_len, longest)
        patches = bind_state_patches(filter(is_state_patch, specs), model, prompt_len)  # pyright: ignore[reportArgumentType]
        kv_patches = bind_kv_patches([s for s in specs if isinstance(s, PatchKV)], model, prompt_len)
        monitors, acting, scored = _bound_monitors(specs, model, prompt_len, gates)
        reads = RequestReads(model, readout, (limits.encoders or NO_ENCODERS) if limits.device_tables else None)
        ops = _placed_ops(specs, acting, model, prompt_len, limits, gates, reads)
        replaced = [(patch.layer, patch.spec) for patch in patches]
        edits = KVEdits(ops, knockouts, model.num_hidden_layers, replaced, prompt_len, kv_patches)
        for read, flag in gates.reads():  # after the ops that change the state
            (bound,) = bind(read, model, prompt_len)
            limits.check_op(read, bound.site)
            site = site_index(bound.site, model.num_hidden_layers)
            ops.setdefault(site, []).append(PlacedOp(read, bound.site, bound.windows, flag=flag))
        for place in scored:
            limits.check_op(place.read, place.site)
            site = site_index(place.site, model.num_hidden_layers)
            ops.setdefault(site, []).append(PlacedOp(place.read, place.site, place.windows))
        for found in ops.values():
            limits.check_count(found[0].site, sum(len(op.windows) for op in found))
        by_layer = [spec for spec in captures if kind_of(str(spec.site)) in BY_LAYER]
        others = [spec for spec in captures if kind_of(str(spec.site)) not in BY_LAYER]
        new = {
            kind: partial(made_by, own, model, prompt_len, longest)
            for kind, made_by in BY_LAYER.items()
            if (own := [spec for spec in by_layer if kind_of(str(spec.site)) == kind])
        }
        made = [make() for make in new.values()]
        check_devices(captures, by_layer)
        for spec in others:
            limits.check(spec.sites_in(model)[0])
        layout = layout_of(others, model, prompt_len, longest, logits_from, readout) if others else None
        _check_size((layout, *made), longest, limits)
        return cls(
            ops,
            layout,
            prompt_len,
            logits_from,
            knockouts,
            edits,
            patches,
            kv_patches,
            monitors,
            new,
            _depth(ops, layout, knockouts, (*patches, *kv_patches), made, model.num_hidden_layers)
            if captures or monitors
            else None,  # without a read, the KV may be all that is wanted
            (*specs, *captures),
            reads.all,
        )

    def __iter__(self) -> Iterator[PlacedOp]:
        return (op for found in self.ops.values() for op in found)

    @cached_property
    def num_scores(self) -> int:
        """Dot products of the monitors at a position."""
        return sum(monitor.num_dots for monitor in self.monitors)

    @cached_property
    def score_limits(self) -> np.ndarray:
        """`limits_of` the monitors."""
        return limits_of(self.monitors)

    @property
    def acts_on_states(self) -> bool:
        """Whether it captures or replaces recurrent states."""
        return STATE in self.new_by_layer or bool(self.state_patches)

    @property
    def acts_on_kv(self) -> bool:
        """Whether it captures or replaces K and V."""
        return KV in self.new_by_layer or bool(self.kv_patches)

    @property
    def only_captures(self) -> bool:
        """Whether it captures states, and nothing else: no vector, and no weight, is held."""
        reads_weights = self.layout is not None and any(group.reads_weights for group in self.layout.groups)
        return not (reads_weights or self.ops or self.knockouts or self.state_patches or self.kv_patches)

    @cached_property
    def edits_logits(self) -> bool:
        """Whether an op acts at the logits."""
        return any(found[0].site.kind == LOGITS for found in self.ops.values())

    @cached_property
    def gated(self) -> list[Window]:
        """Positions where a gate is counted, or decides."""
        # Where each position decides for itself, a gate's site matters only at the positions of its ops.
        return [
            window
            for op in self
            if op.spec.when is not None
            or isinstance(op.spec, ScoreRead)
            or (isinstance(op.spec, GateRead) and op.flag and op.flag.prompt_len)
            for window in op.windows
        ]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The distinct vectors that the pool holds for a request."""
        found = [vector for op in self for vector in op.spec.vectors]
        for group in () if self.layout is None else self.layout.groups:
            if group.probes is not None:
                found.append(group.probes)
        return list({id(tensor): tensor for tensor in found}.values())

    def hash_large(self) -> None:
        """Hash large vectors on the caller's thread. The engine's thread hashes the rest, on demand."""
        if "hashed" in self.shared:
            return
        for spec in (*self.specs, *(op.spec for op in self)):
            if isinstance(spec, Spec) and any(tensor.numel() > LARGE for _, tensor in spec._content().tensors):
                hash((spec.fingerprint, spec.effect))
        self.shared["hashed"] = True

    def why_undrafted(self, in_tables: bool) -> str:
        """Counts or captures that `Declared.settle` cannot take back after a pass with drafts, or "".

        Args:
            in_tables: ops run as kernels, from device tables, and captures use the ring.
        """
        if PATTERN in self.new_by_layer:
            return "attention patterns"
        if KV in self.new_by_layer:
            return "captures of K and V"
        if in_tables and self.layout is not None and self.layout.in_order:
            return "pooled captures on CUDA"
        if any(monitor.flag is not None for monitor in self.monitors):
            return "a monitor that acts"
        return "gates on CUDA" if in_tables and any(op.spec.when is not None for op in self) else ""

    @property
    def cuts_edges(self) -> bool:
        """Whether edges of attention are cut, or patterns captured."""
        return bool(self.knockouts) or PATTERN in self.new_by_layer

    def applied(
        self, num_positions: int, fires: Fires, first_fired: Mapping[int, torch.Tensor] = MappingProxyType({})
    ) -> list[Applied]:
        """Number of rows that each op acted on, among the first `num_positions` positions.

        Args:
            fires: fires of the request's gates.
            first_fired: slot of a flag -> first position at which the ops behind it act.
        """
        if not (self.ops or self.knockouts or self.state_patches or self.kv_patches):
            return []
        if any(op.spec.when is not None or (op.flag is not None and op.flag.monitor) for op in self):
            return self._applied(num_positions, fires, first_fired)
        known, found = self.shared.get("applied", (None, []))
        if known != num_positions:
            found = self._applied(num_positions, fires, {})
            self.shared["applied"] = num_positions, found
        return list(found)

    def _applied(self, num_positions: int, fires: Fires, first_fired: Mapping[int, torch.Tensor]) -> list[Applied]:
        names = {monitor.flag: monitor.name for monitor in self.monitors}

        def rows(op: PlacedOp, first: int, stop: int) -> int:
            if op.flag is not None and op.flag.monitor:
                first = max(first, int(first_fired.get(op.flag.slot, num_positions)))
            return sum([window.among(first, min(stop, num_positions)) for window in op.windows])

        return (
            [
                Applied(
                    intervention=type(op.spec).__name__,
                    site=str(op.site),
                    prompt_rows=rows(op, self.logits_from if op.site.kind == LOGITS else 0, self.prompt_len),
                    generated_rows=rows(op, self.prompt_len, num_positions),
                    gate_fires=None if op.spec.when is None else int(fires.get((site, i), 0)),
                    missing=op.missing,
                    monitor=names[op.flag.slot] if op.flag is not None and op.flag.monitor else "",
                )
                for site, found in sorted(self.ops.items())
                for i, op in enumerate(found)
                if not isinstance(op.spec, GateRead | ScoreRead)
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
            + [
                Applied("PatchKV", f"{KV}.{patch.layer}", len(patch.positions) * (num_positions >= patch.span[1]))
                for patch in self.kv_patches
            ]
        )


class Bindings:
    """Binds the hooks of requests. Equal hooks of prompts of one length are bound once. Thread-safe.

    Args:
        model, limits, readout: see `BoundHooks.of`.
        only_captures: cache only bindings without vectors or weights, so that the cache does not keep tensors alive.
    """

    def __init__(
        self, model: ModelSpec, limits: DeclaredLimits, readout: Readout | None, only_captures: bool = False
    ) -> None:
        self._model, self._limits, self._readout, self._only_captures = model, limits, readout, only_captures
        self._known: OrderedDict[Any, BoundHooks] = OrderedDict()
        self._lock = threading.Lock()

    def bound(self, hooks: RequestHooks, prompt_len: int) -> BoundHooks:
        """The hooks of one request, bound. Specs are equal where their fingerprints are.
        Raises ValueError: see `BoundHooks.of_request`."""
        traced = hooks.differentiable, hooks.trace_key is not None
        key = *hooks.interventions, None, *hooks.captures, prompt_len, hooks.max_tokens, hooks.logits_from, *traced
        hash(key)  # large vectors are hashed here, outside of the lock
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        found = BoundHooks.of_request(hooks, prompt_len, self._model, self._limits, self._readout)
        large = found.layout is not None and found.layout.table_bytes > MAX_TABLE_BYTES
        if large or (self._only_captures and not found.only_captures):
            return found
        with self._lock:
            self._known[key] = found
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def clear(self) -> None:
        """Forget all bindings."""
        with self._lock:
            self._known.clear()

    def close(self) -> None:
        """Forget all, and let go of the model."""
        self.clear()
        self._readout, self._limits = None, replace(self._limits, encoders=None)


def _bound_monitors(
    specs: Sequence[Intervention], model: ModelSpec, prompt_len: int, gates: RequestGates
) -> tuple[tuple[BoundMonitor, ...], list[tuple[Op, Flag]], list[ScoredSite]]:
    """(the monitors among the specs, their ops with the flags that these wait for, reads of the monitors' sites)."""
    watching = [bound for spec in specs if isinstance(spec, Monitor) for bound in bind(spec, model, prompt_len)]
    flags = [gates.of_monitor(str(m.spec.name), m.spec.fingerprint) if m.spec.ops else None for m in watching]
    acting = [(op, flag) for m, flag in zip(watching, flags, strict=True) for op in m.spec.ops if flag is not None]
    places = [(bound.site, bound.windows) for bound in watching]
    slots = [None if flag is None else flag.slot for flag in flags]
    monitors, scored = bind_monitors([bound.spec for bound in watching], places, slots, model)
    return monitors, acting, scored


def _placed_ops(
    specs: Sequence[Intervention],
    acting: Sequence[tuple[Op, Flag]],
    model: ModelSpec,
    prompt_len: int,
    limits: DeclaredLimits,
    gates: RequestGates,
    reads: RequestReads,
) -> dict[int, list[PlacedOp]]:
    """Site -> ops in the order in which they act, without those that change nothing.

    Args:
        acting: ops of monitors, and the flag that each waits for.
    """
    placed: list[tuple[int, bool, PlacedOp]] = []
    counts: Counter[int] = Counter()
    plain = [(spec, None) for spec in specs if isinstance(spec, Op) and not is_state_patch(spec)]
    for spec, waits in [*plain, *acting]:
        for index, bound in enumerate(bind(spec, model, prompt_len)):
            if waits is not None:
                bound = after_prompt(bound, prompt_len)
            # resid_pre.i is the state that resid_post.i-1 left, so its ops follow; likewise resid_pre.0 after embed.
            later = bound.site.kind == "resid_pre"
            limits.check_op(bound.spec, bound.site)
            site = site_index(bound.site, model.num_hidden_layers)
            if not bound.spec.identity:
                counts[site] += len(bound.windows)
                limits.check_count(bound.site, counts[site])
            flag = waits or gates.flag_of(bound.spec, bound.site)
            placed.append(
                (site, later, PlacedOp(bound.spec.at(index, model), bound.site, bound.windows, bound.missing, flag))
            )
    ops: dict[int, list[PlacedOp]] = {}
    for site, _, op in sorted(placed, key=lambda entry: entry[:2]):  # a stable sort keeps the order given
        if not op.spec.identity:
            ops.setdefault(site, []).append(op)
    for site, found in ops.items():
        own = reads.of([op.spec for op in found], site)
        if any(own):
            ops[site] = [op._replace(read=read) for op, read in zip(found, own, strict=True)]
    return ops


def _depth(
    ops: Iterable[int],
    layout: CaptureLayout | None,
    knockouts: Sequence[BoundKnockout],
    patches: Sequence[StatePatch | KVPatch],
    by_layer: Sequence[LayerCaptures[Any]],
    num_layers: int,
) -> int | None:
    """`BoundHooks.depth` of bound specs."""
    found = [layers_to(site, num_layers) for site in (*ops, *(() if layout is None else layout.by_site))]
    found += [layer + 1 for knockout in knockouts for layer in knockout.layers]
    found += [patch.layer + 1 for patch in patches]
    found += [layer + 1 for own in by_layer for layer in own.layers]
    depth = max(1, *found, 0)
    return depth if depth < num_layers else None


def _check_size(
    sources: Sequence[CaptureLayout | LayerCaptures[Any] | None], longest: int, limits: DeclaredLimits
) -> None:
    num_bytes = sum(captured.num_bytes for captured in sources if captured is not None)
    if num_bytes > limits.max_capture_bytes:
        raise ValueError(
            f"the captures of a request of {longest} positions may take {num_bytes / 2**20:.0f} MiB; a request's results hold "
            f"{limits.max_capture_bytes / 2**20:.0f} (max_capture_bytes): raise it, or capture fewer sites or positions"
        )
