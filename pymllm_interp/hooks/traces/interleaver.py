"""Where the model meets the blocks of many requests.

nnsight's `Interleaver` runs one set of blocks against one model call. An engine has many requests, each with blocks of its
own, and which of them take part changes from pass to pass; so this one keeps, for each pass, the *points* at which
somebody waits, and lets each request count its own passes. What it keeps of nnsight's: a module's controller hands its
values to `handle`, a block parks by switching a `Pending` to its parent, and strictly one of them runs at a time.

    model reaches "model.layers.3.output"
      -> nobody at that point? one dict lookup, and on
      -> the blocks parked there for this visit, in the order of the batch: each gets its own rows, edits are put back
      -> caches that watch the location take what the model goes on with
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from ...core.forward_batch import Waits
from ...core.model_spec import Family
from .delivery import Delivery
from .nan_check import EditLog
from .nnsight_compat import (
    Controller,
    Envoy,
    Interleaver,
    apply,
    install_controller,
)
from .rows import EditError, Shared
from .saves import own
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .trace import RequestTrace
from .block import Block, Turn
from .handover import Handover
from .leaves import without_batch
from .visits import Point


class EngineInterleaver(Interleaver):
    """Serves the blocks of the requests that take part in a pass, and is the pass's `HookQuery`.

    Between `begin_pass` and `end_pass`, and on that thread only, modules hand their values to `handle`. A module that a
    client calls on a thread of its own (``lm.lm_head(h)`` outside a trace) is a plain module.

    Attributes:
        thread: the thread whose modules hand over, during a pass.
        points: those at which something waits, or has waited in this pass.
        samples, streamer: where a step's tokens are served, as they were drawn, and as generation goes on with them.
        run_locations: what a step makes outside the modules: its logits and samples.
        per_pass: visits that a pass makes to a location, where it is not one.
        visits: this pass's visits. Those of parts that ran fused are not in it: see `visited`.
        sync_previous_step: called before a pass serves its first value: those whose request has ended meanwhile must not see it.
        serving: the request whose block runs now.
        moves: visits and passes so far: while it stays the same, the model stands where it stood.
        edits: looks for those that held NaN.
        watchdog: watches for blocks that take long; None where nobody does.
        eager_parts: how often an attention or an MLP went kernel by kernel in a pass of stretches, by what blocks waited for
            inside of it: a module's path from its layer on, with ".source" for its operations.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        super().__init__()
        self.samples = self.streamer = ""
        self.run_locations: frozenset[str] = frozenset()
        self._logit_locations: frozenset[str] = frozenset()
        self._model_paths: set[str] = set()
        self._with_attention: set[str] = set()
        self._layers = ""
        self._known: dict[str, Point] = {}
        self.per_pass: dict[str, int] = {}
        self.visits: defaultdict[str, int] = defaultdict(int)
        self._fused: set[int] = set()
        self._fused_inside: dict[int, set[tuple[str, str]]] = {}
        self.points: dict[str, Point] = {}
        self._waiting: dict[int, list[Point]] = {}
        self.traces: list[RequestTrace] = []
        self.sync_previous_step: Callable[[], None] | None = None
        self._synced = True
        self._cut: list[torch.Tensor] = []
        self.moves = 0
        self.serving: RequestTrace | None = None
        self.edits = EditLog()
        self.watchdog: Watchdog | None = None
        self.eager_parts: Counter[str] = Counter()

    def bind(self, model: Envoy, family: Family) -> None:
        """Learn the model's own locations, before users attach modules of theirs."""
        self._model_paths = {envoy.path for envoy in model.modules()}
        attentions = [f"{path}." for path in self._model_paths if path.endswith(f".{family.attention}")]
        self._with_attention = {
            path for path in self._model_paths if any(attention.startswith(f"{path}.") for attention in attentions)
        }
        self._layers = f"{model.path}.{family.layers}."
        self.samples, self.streamer = f"{model.path}.samples", f"{model.path}.generator.streamer.output"
        self.run_locations = frozenset({f"{model.path}.logits", self.samples})
        head = f"{model.path}.{family.head}"
        self._logit_locations = self.run_locations | {f"{head}.input", f"{head}.output", f"{model.path}.output"}

    def instrument(self, envoy: Envoy) -> None:
        """Have the envoy's module hand its values to this interleaver."""
        state, own = install_controller(envoy), envoy._module.__dict__
        if (
            isinstance(own["forward"], Controller) and "_hf_hook" not in own
        ):  # accelerate's hook is the controller's to run
            own["forward"] = Handover(envoy._module, state, self)

    def point(self, location: str) -> Point:
        """The point at `location`, whether anything waits there or not."""
        return self._known.get(location) or self._known.setdefault(location, self._locate(location))

    def _locate(self, location: str) -> Point:
        path, op, _ = location.partition(".source.")
        if not op:
            path = location.rpartition(".")[0]
        made_by_run = location in self.run_locations
        in_model = path in self._model_paths or made_by_run
        layer, below = None, ""
        if in_model and path.startswith(self._layers):
            index, _, rest = path.removeprefix(self._layers).partition(".")
            if index.isdigit():
                layer, below = int(index), rest
        of_logits = location in self._logit_locations
        of_module = in_model and not made_by_run
        return Point(location, in_model, of_module, of_logits, layer, below, f"{path}.output" if op else None)

    # nnsight's gate, read by its probes and controllers.
    @property
    def interleaving(self) -> bool:
        return self.thread is not None and self.thread == get_ident()

    @interleaving.setter
    def interleaving(self, value: bool) -> None:
        self.thread = get_ident() if value else None

    # -- one pass ----------------------------------------------------------------

    def begin_pass(self, traces: Iterable[RequestTrace]) -> None:
        """Arm the modules for one pass of the model, in which `traces` take part (in batch order)."""
        self.traces = list(traces)
        self._clear()
        self.moves += 1
        self.visits = defaultdict(int)
        self._fused.clear()
        self._fused_inside.clear()
        self.sourced.clear()
        for trace in self.traces:
            trace.join_pass()
            for block in trace.blocks:
                self._park(block)
                for cache in block.caches:
                    for location, slot in cache.subscriptions().items():
                        self._open(location).caches.append((block, cache, slot))
        self.busy = self.interleaving = True
        self._synced = self.sync_previous_step is None

    def hooked(self) -> set[RequestTrace]:
        """The traces of a pass that has not begun to run whose blocks wait for a module that it reaches.

        The blocks of a gang may let each other go on in the middle of a pass, so it is all of them or none.
        """
        found = {trace for trace in self.traces if trace.grad}
        for point in self.points.values():
            found.update(entry[0].trace for entry in point.caches)
            if point.of_module:
                visits = self.per_pass.get(point.location, 1)
                found.update(block.trace for block in point.parked if 0 <= block.due < visits)
        alive = {trace for trace in found if not trace.ended}
        return alive.union(*(trace.gang for trace in alive if trace.gang)).intersection(self.traces)

    def leave(self, trace: RequestTrace) -> None:
        """Take a trace out of the pass: its request ended before, and this pass never was."""
        if trace.in_pass:
            trace.in_pass, trace.rows, trace.pace = False, None, -1
            self.traces.remove(trace)
            for point in self.points.values():
                point.leave(trace)

    def sync_once(self) -> None:
        """Call `sync_previous_step`, once in a pass."""
        if not self._synced:
            self._synced = True
            assert self.sync_previous_step is not None
            self.sync_previous_step()

    def end_pass(self) -> None:
        """Disarm the modules and count the pass for those that took part."""
        self.busy = self.interleaving = False
        for location, count in self.visits.items():
            if count > 1:  # what a pass that failed did not come to is no rule
                self.per_pass[location] = count
        saved: defaultdict[Delivery, list[torch.Tensor]] = defaultdict(list)
        shared: set[int] = set()
        for trace in self.traces:
            trace.end_pass(saved[trace.delivery], shared)
        left: list[torch.Tensor] = []
        for delivery, tensors in saved.items():
            if tensors:
                left += delivery.keep(tensors, self._cut)
        own(left)
        self._cut = []
        self.edits.end_pass()
        for trace in self.traces:
            if trace.on_step is not None:
                trace.stream()
        self.traces = []
        self._clear()

    def hook_position(self, layer: int) -> Waits:
        waits: Waits = "nowhere"
        points = self._waiting.get(layer)
        if points is not None:
            for point in points:
                if point.awaited(self.visited(point)):
                    if not point.ends_layer:
                        return "within"
                    waits = "at output"
        self._fused.add(layer)
        if waits == "at output":
            self.visits[f"{self._layers}{layer}.output"] = 0  # that one is yet to come
        return waits

    def try_fuse(self, layer: int, module: str = "", but: str = "") -> bool:
        if any(point.lies_inside(module, but) for point in self._awaited(layer)):
            return False
        self._fused_inside.setdefault(layer, set()).add((module, but))
        return True

    def runs_eagerly(self, layer: int, module: str, but: str) -> None:
        self.sync_once()
        for point in self._awaited(layer):
            if point.lies_inside(module, but):
                self.eager_parts[point.below if point.module is None else f"{point.below}.source"] += 1
                for trace in point.waiting(self.visited(point)):
                    trace.receipt.eager_parts[point.location.partition(".")[2]] += 1

    def is_own_call(self) -> bool:
        return self.serving is not None or self.thread != get_ident()

    def at_output(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.visit(f"{self._layers}{layer}.output", hidden)

    def _awaited(self, layer: int) -> list[Point]:
        return [point for point in self._waiting.get(layer, ()) if point.awaited(self.visited(point))]

    def visited(self, point: Point) -> int:
        """How many times this pass has reached `point`."""
        count = self.visits.get(point.location)
        if count is not None:
            return count
        layer = point.layer
        if layer is not None:
            if layer in self._fused:
                return 1
            parts = self._fused_inside.get(layer)
            if parts is not None and any(point.lies_inside(*part) for part in parts):
                return 1
        # A module may have run without its operations being called.
        return self.visits.get(point.module, 0) if point.module is not None else 0

    def awaits_token(self) -> bool:
        """Whether a block waits for this step's tokens."""
        samples, streamer = self.points.get(self.samples), self.points.get(self.streamer)
        return (samples is not None and samples.awaited(0)) or (streamer is not None and bool(streamer.parked))

    def pass_token(self) -> None:
        """Count the tokens as offered, where nobody waits for them."""
        self.visits[self.samples] = 1
        for trace in self.traces:
            if not trace.single:
                trace.calls[self.streamer] = trace.calls.get(self.streamer, 0) + 1

    def handle(self, provider: str, value: Any) -> Any:
        """Offer `value` to whoever waits at `provider`; return what the model goes on with."""
        if self.serving is not None:
            return self._handle_call(self.serving, provider, value)
        if provider in self.points:
            return self.visit(provider, value)
        self.visits[provider] += 1
        return value

    def resume(self, block: Block, error: BaseException | None = None) -> None:
        """Run a block on, or raise `error` in it. What it raises ends its own request and no other."""
        with Turn(self) as turn:
            turn.resume(block, error=error)

    def release(self, block: Block) -> None:
        """Run a block on that waited for other blocks, and file it where it parks next."""
        block.trace.dirty = True
        self.resume(block)
        if block.trace.in_pass:
            self._park(block)

    # -- one visit -------------------------------------------------------------

    def visit(self, location: str, value: Any) -> Any:
        """`handle` at one of `points`, from the model."""
        self.sync_once()
        self.moves += 1
        point, visit = self.points[location], self.visits.get(location, 0)
        shared = Shared(value, point.of_logits, len(point.parked))
        if point.skips:
            self._replace_skipped(point, shared)
        if point.parked:
            with Turn(self) as turn:
                # One that is served may release another, which parks here too (a barrier).
                while point.parked and (ready := point.take(visit)):
                    turn.serve(ready, location, visit, shared)
        self._cut += shared.cut
        value = shared.settle()
        if shared.edits:
            self.edits.note(value, point.of_logits, shared.edits)
        if point.caches:
            self._fill_caches(point, shared)
        self.visits[location] = visit + 1
        return value

    def _replace_skipped(self, point: Point, shared: Shared) -> None:
        for block, replacement in point.skips:
            try:
                shared.replace(block.trace.rows, replacement)
                shared.count_edit(block.trace)
            except EditError as error:
                message = f"request {block.trace.request_id}: skip of `{point.location}`: {error}"
                block.trace.fail(EditError(message))
        point.skips.clear()

    def _fill_caches(self, point: Point, shared: Shared) -> None:
        for block, cache, slot in point.caches:
            if block.trace.is_served_at(point.location):
                served = without_batch(shared.rows_of(block.trace.rows))
                cache.observe_selected(slot, apply(served, torch.Tensor.clone, torch.Tensor))

    def _swap(self, block: Block, provider: str, shared: Shared, edited: Any) -> EditError | None:
        try:
            shared.replace(block.trace.rows, edited)
        except EditError as error:
            return EditError(f"request {block.trace.request_id}: edit of `{provider}`: {error}")
        shared.count_edit(block.trace)
        return None

    def _put_back(self, block: Block, provider: str, shared: Shared, served: Any) -> None:
        """A block has put other values into the container that it was served: that one was its own."""
        error = self._swap(block, provider, shared, served)
        if error is not None:
            block.trace.fail(error)

    def _skip(self, block: Block, provider: str, shared: Shared, replacement: Any) -> None:
        """A lone request's module does not run. In a shared batch it runs for the others; the skipper's rows are replaced.

        Nor is one left out that holds an attention: later positions would find what another request left in its slot of the cache.
        """
        trace, path = block.trace, provider.removesuffix(".skip")
        trace.skipping.append(path)
        trace.pace = -1
        if (trace.rows is None or trace.rows.alone) and path not in self._with_attention:
            shared.count_edit(trace)
            shared.value = replacement
        else:
            self._open(f"{path}.output").skips.append((block, replacement))

    def offer(self, trace: RequestTrace, location: str, value: Any) -> Any:
        """Serve a value that belongs to one request and to no module of the pass (its result, its next token)."""
        return self._handle_call(trace, location, value)

    # -- a module called by a block ---------------------------------------------

    def _handle_call(self, trace: RequestTrace, provider: str, value: Any) -> Any:
        """A visit that a block's own call makes (``module(x, hook=True)``): its request's, whole, and nobody else's."""
        rows, trace.rows = trace.rows, None
        self.moves += 1
        shared = Shared(value, of_logits=False)
        try:
            while ready := [block for block in trace.blocks if trace.reaches(block, provider)]:
                with Turn(self) as turn:
                    for block in ready:
                        self._unpark(block, provider)
                        block.due = 0
                    turn.serve(ready, provider, 0, shared)
            if shared.edits:
                self.edits.note(shared.value, shared.of_logits, shared.edits)
        finally:
            trace.rows = rows
        trace.calls[provider] = trace.calls.get(provider, 0) + 1
        return shared.value

    # -- points ------------------------------------------------------------------

    def _open(self, location: str) -> Point:
        """The point at `location`, where something is about to wait."""
        point = self.points.get(location)
        if point is None:
            point = self.points[location] = self.point(location)
            if point.layer is not None:
                self._waiting.setdefault(point.layer, []).append(point)
        return point

    def _clear(self) -> None:
        for point in self.points.values():
            point.clear()
        self.points, self._waiting = {}, {}

    def _park(self, block: Block) -> None:
        pending = block.pending
        if pending is not None:
            _, location, iteration, _ = pending
            if location is not None and iteration is not None:
                point = self.points.get(location) or self._open(location)
                block.due = iteration - block.trace.before_pass(point)
                point.parked.append(block)

    def _unpark(self, block: Block, location: str) -> None:
        point = self.points.get(location)
        if point is not None and block in point.parked:
            point.parked.remove(block)
