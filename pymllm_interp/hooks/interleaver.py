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

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from operator import is_
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent
from torch import is_grad_enabled, is_inference_mode_enabled

from ..core.forward_batch import Waits
from .edit_log import EditLog
from .modes import NO_AUTOCAST, BlockModes, Modes, autocast_by_device, is_any_autocast_enabled
from .nnsight_compat import (
    NO_SKIP,
    Controller,
    Envoy,
    Event,
    Interleaver,
    Mediator,
    Pending,
    apply,
    install_controller,
    save_scope,
)
from .rows import EditError, Shared
from .saves import Delivery, own
from .watchdog import TraceTimeoutError, Watchdog

if TYPE_CHECKING:
    from .trace import RequestTrace


VALUE = Event.VALUE  # an enum's members are slow to get at


class Block(Mediator):
    """One block of a request: a mediator that counts its request's passes and keeps its request's saves.

    A block that takes part in every second step of the engine must not notice the others: which occurrence of a location
    it meets is a matter of its own request's passes.

    Attributes:
        due: the visit of this pass that it waits for, where it waits for a location.
        served: the block is past its first wait.
        last: where it was served last, "" before the first time.
        depth: how many ``with`` of nnsight's it is in: more than 1 where it waits inside of ``with tracer.iter[...]:``.
    """

    trace: RequestTrace
    modes: BlockModes
    due = 0
    served = False
    last = ""
    depth = 1

    def occurrence(self, location: str) -> int:
        """How many times the request's passes have reached `location`."""
        return self.trace.occurrence(location)

    def wanted(self, location: str) -> int:
        """The occurrence of `location` that it asks for when it reads there now."""
        iteration = self.iteration
        return self.trace.occurrence(location) if iteration is None else iteration

    def switch(self, *args: Any) -> Any:
        """Run the block to where it parks next; returns its `Pending`, or None at its end."""
        assert self.worker is not None
        with Turn(self.trace.interleaver) as turn:
            return turn.run(self, self.worker.switch, *args)

    def throw(self, error: BaseException) -> Any:
        """Raise `error` in the block, at the line where it waits; returns as `switch` does."""
        assert self.worker is not None
        with Turn(self.trace.interleaver) as turn:
            return turn.run(self, self.worker.throw, error)


class Turn:
    """The thread, while one block after the other runs on it: what is theirs is put there, and taken away at the end.

    nnsight keeps the saved ids and the nesting depth with the thread; here they belong to the request.
    """

    __slots__ = (
        "_autocast", "_depth", "_grad", "_greenlet", "_inference", "_interleaver", "_saves", "_scope", "_serving", "_visit",
        "_watchdog",
    )  # fmt: skip

    def __init__(self, interleaver: EngineInterleaver) -> None:
        self._interleaver = interleaver

    def __enter__(self) -> Turn:
        interleaver = self._interleaver
        self._greenlet, self._serving = getcurrent(), interleaver.serving
        self._grad, self._inference = is_grad_enabled(), is_inference_mode_enabled()
        self._autocast = autocast_by_device()
        scope = self._scope = save_scope.__dict__
        self._depth, self._saves = scope.get("depth", 0), scope.get("saves")
        watchdog = self._watchdog = interleaver.watchdog
        self._visit = None
        if watchdog is not None:
            watchdog.watch()
            self._visit = watchdog.visit
        return self

    def __exit__(self, *_: object) -> None:
        scope = self._scope
        scope["depth"], scope["saves"], self._interleaver.serving = self._depth, self._saves, self._serving

    def run(self, block: Block, resume: Callable[..., Any], *args: Any) -> Any:
        """Call `resume`, which runs the block, with its request's saves as the thread's and the watchdog on."""
        trace, watchdog, scope = block.trace, self._watchdog, self._scope
        scope["depth"], scope["saves"], self._interleaver.serving = block.depth, trace.saves, trace
        block.worker.parent = self._greenlet  # pyright: ignore[reportOptionalMemberAccess]
        if block.modes.left is not None:
            block.modes.resume()
        if watchdog is not None:
            watchdog.visit = [trace, None]
        try:
            return resume(*args)
        except BaseException as raised:
            if not hasattr(raised, "__intervention_tb__"):
                raised.__intervention_tb__ = raised.__traceback__  # pyright: ignore[reportAttributeAccessIssue]
            raise
        finally:
            if scope["depth"] != block.depth:
                block.depth = scope["depth"]
            if watchdog is not None:
                watchdog.visit = self._visit  # a plain store: the watchdog's exception cannot come between
                if watchdog.posted:
                    watchdog.drain()
            if (
                is_grad_enabled() is not self._grad
                or is_inference_mode_enabled() is not self._inference
                or self._autocast is not NO_AUTOCAST
                or is_any_autocast_enabled()
            ):
                self._park_modes(block)

    def _park_modes(self, block: Block) -> None:
        block.modes.park(Modes(self._inference, self._grad, self._autocast))

    def resume(self, block: Block, error: BaseException | None = None) -> Pending | None:
        """`EngineInterleaver.resume`, of one of several. Returns what the block waits for next."""
        worker = block.worker
        assert worker is not None
        block.pending = None
        block.served = True
        try:
            pending = self.run(block, worker.switch) if error is None else self.run(block, worker.throw, error)
        except BaseException as raised:
            self._failed(block, raised)
            return None
        block.pending = pending
        return pending

    def _failed(self, block: Block, raised: BaseException) -> None:
        """`raised` ended the block, and ends its request."""
        watchdog = self._watchdog
        if isinstance(raised, TraceTimeoutError) and watchdog is not None:
            raised.args = (
                f"request {block.trace.request_id}: its block ran for more than trace_step_timeout="
                f"{watchdog.end_after} s without reaching the model",
            )
        if not hasattr(raised, "__intervention_tb__"):
            raised.__intervention_tb__ = raised.__traceback__  # pyright: ignore[reportAttributeAccessIssue]
        block.exception = raised
        block.trace.fail(raised)

    def serve(self, blocks: list[Block], location: str, visit: int, shared: Shared) -> None:
        """Serve the blocks that still wait for this visit of `location`, one after the other, and file each where it parks next.

        A step of a large batch comes here thousands of times, so this is `run` and `_park` once more, as one loop: calls, and
        what is the same for all, would take as long as all the rest.
        """
        interleaver, scope, greenlet, watchdog = self._interleaver, self._scope, self._greenlet, self._watchdog
        grad, inference, autocast, outer = self._grad, self._inference, self._autocast is not NO_AUTOCAST, self._visit
        asked: Pending | None = None  # by the block before, of `pace`, which was filed at `parked` for `due`
        pace, due, parked = -1, 0, []
        for block in blocks:
            pending, trace = block.pending, block.trace
            # Those before it may have ended its request, or have had it go on.
            if pending is None or pending[1] != location or block.due != visit or trace.ended:
                continue
            if trace.skipping and trace.skips(location):
                continue
            trace.dirty = block.served = True
            worker, occurrence = block.worker, pending[2]
            assert worker is not None
            while pending is not None and pending[1] == location and pending[2] == occurrence:
                if block.iteration:
                    # As in nnsight: after the first hit of iter[n] the rest of that step follows in sequence.
                    block.iteration = None
                served: Any = None
                error: EditError | None = None
                if pending[0] is VALUE:
                    trace.receipt.reads += 1
                    served = shared.rows_of(trace.rows)
                elif pending[0] is Event.SKIP:
                    interleaver._skip(block, location, shared, pending[3])
                else:
                    error = interleaver._swap(block, location, shared, pending[3])
                counts = isinstance(served, torch.Tensor)
                parts = [] if counts else leaves(served := without_batch(served))
                version = served._version if counts else writes_to(parts)
                scope["depth"], scope["saves"], interleaver.serving = block.depth, trace.saves, trace
                worker.parent = greenlet
                if block.modes.left is not None:
                    block.modes.resume()
                block.pending = pending = None
                block.last = location
                if watchdog is not None:
                    watchdog.visit = [trace, None]
                try:
                    try:
                        if error is None:
                            pending = worker.switch(served)
                        else:
                            pending = worker.throw(error)
                    finally:
                        if scope["depth"] != block.depth:
                            block.depth = scope["depth"]
                        if watchdog is not None:
                            watchdog.visit = outer
                            if watchdog.posted:
                                watchdog.drain()
                        if (
                            is_grad_enabled() is not grad
                            or is_inference_mode_enabled() is not inference
                            or autocast
                            or is_any_autocast_enabled()
                        ):
                            self._park_modes(block)
                except BaseException as raised:
                    self._failed(block, raised)
                block.pending = pending
                if parts and not same_objects(leaves(served), parts):
                    interleaver._put_back(block, location, shared, served)
                elif (served._version if counts else writes_to(parts)) != version:
                    shared.count_edit(trace)  # in place
            if pending is not None and pending is asked and trace.pace == pace:
                block.due = due
                parked.append(block)
                continue
            interleaver._park(block)
            asked, awaited = None, None if pending is None else pending[1]
            if awaited is not None and trace.pace >= 0:
                point = interleaver.points[awaited]
                if point.in_model:
                    asked, pace, due, parked = pending, trace.pace, block.due, point.parked


class Point:
    """A location, and what waits there in this pass.

    Attributes:
        in_model: each pass reaches it. Modules that a user attached, and results, are counted by their calls.
        of_module: it is such a place, and a module's.
        of_logits: its values carry logit rows, not token rows.
        layer: the decoder layer that it belongs to, if any.
        below: its module's path from there on, "" for the layer's own.
        ends_layer: it is the layer's own output.
        module: of an operation (`.source`): where its module's output is.
        parked: blocks that wait here.
        caches: (block, cache, what the cache stores).
        skips: replacements for the rows of requests that skip the module.
    """

    __slots__ = (
        "below", "caches", "ends_layer", "in_model", "layer", "location", "module", "of_logits", "of_module", "parked", "skips",
    )  # fmt: skip

    def __init__(
        self,
        location: str,
        in_model: bool,
        of_module: bool,
        of_logits: bool,
        layer: int | None,
        below: str,
        module: str | None,
    ) -> None:
        self.location, self.in_model, self.of_module, self.of_logits = location, in_model, of_module, of_logits
        self.layer, self.below, self.module = layer, below, module
        self.ends_layer = layer is not None and module is None and not below and location.endswith(".output")
        self.parked: list[Block] = []
        self.caches: list[tuple[Block, Any, tuple[str, str]]] = []
        self.skips: list[tuple[Block, Any]] = []

    def lies_inside(self, module: str, but: str) -> bool:
        """Whether it lies inside of its layer (or of the layer's `module`), but not at the module `but` or in it."""
        inside = self.module is not None if self.below == module else self.below.startswith(module and f"{module}.")
        return inside and not (but and (self.below == but or self.below.startswith(f"{but}.")))

    def awaited(self, visit: int) -> bool:
        """Whether something waits for this visit."""
        if self.caches or self.skips:
            return True
        for block in self.parked:  # a generator costs more, and this is asked for each layer of a pass
            if block.due == visit:
                return True
        return False

    def waiting(self, visit: int) -> set[RequestTrace]:
        """The traces of what waits for this visit."""
        blocks = [entry[0] for entry in (*self.caches, *self.skips)]
        return {block.trace for block in (*blocks, *(block for block in self.parked if block.due == visit))}

    def take(self, visit: int) -> list[Block]:
        """The blocks that wait for this visit; they are parked here no more."""
        parked = self.parked
        ready = [block for block in parked if block.due == visit]
        self.parked = [block for block in parked if block.due != visit] if len(ready) < len(parked) else []
        return ready

    def leave(self, trace: RequestTrace) -> None:
        """Forget what waits here for a trace."""
        self.parked = [block for block in self.parked if block.trace is not trace]
        self.caches = [entry for entry in self.caches if entry[0].trace is not trace]
        self.skips = [entry for entry in self.skips if entry[0].trace is not trace]

    def clear(self) -> None:
        """Forget who waits: the pass is over."""
        self.parked, self.caches, self.skips = [], [], []


class EngineInterleaver(Interleaver):
    """Serves the blocks of the requests that take part in a pass, and is the pass's `LayerWatch`.

    Between `begin_pass` and `end_pass`, and on that thread only, modules hand their values to `handle`. A module that a
    client calls on a thread of its own (``lm.lm_head(h)`` outside a trace) is a plain module.

    Attributes:
        thread: the thread whose modules hand over, during a pass.
        points: those at which something waits, or has waited in this pass.
        samples, streamer: where a step's tokens are served, as they were drawn, and as generation goes on with them.
        run_locations: what a step makes outside the modules: its logits and samples.
        per_pass: visits that a pass makes to a location, where it is not one.
        visits: this pass's visits. Those of parts that ran fused are not in it: see `visited`.
        catch_up: called before a pass serves its first value: those whose request has ended meanwhile must not see it.
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
        self.catch_up: Callable[[], None] | None = None
        self._caught_up = True
        self._cut: list[torch.Tensor] = []
        self.moves = 0
        self.serving: RequestTrace | None = None
        self.edits = EditLog()
        self.watchdog: Watchdog | None = None
        self.eager_parts: Counter[str] = Counter()

    def bind(self, model: Envoy) -> None:
        """Learn the model's own locations, before users attach modules of theirs."""
        self._model_paths = {envoy.path for envoy in model.modules()}
        attentions = [f"{path}." for path in self._model_paths if path.endswith(".self_attn")]
        self._with_attention = {
            path for path in self._model_paths if any(attention.startswith(f"{path}.") for attention in attentions)
        }
        self._layers = f"{model.path}.model.layers."
        self.samples, self.streamer = f"{model.path}.samples", f"{model.path}.generator.streamer.output"
        self.run_locations = frozenset({f"{model.path}.logits", self.samples})
        head = f"{model.path}.lm_head"
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
        self._caught_up = self.catch_up is None

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

    def catch_up_once(self) -> None:
        """Call `catch_up`, once in a pass."""
        if not self._caught_up:
            self._caught_up = True
            assert self.catch_up is not None
            self.catch_up()

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

    def waits_at(self, layer: int) -> Waits:
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

    def nobody_inside(self, layer: int, module: str = "", but: str = "") -> bool:
        if any(point.lies_inside(module, but) for point in self._awaited(layer)):
            return False
        self._fused_inside.setdefault(layer, set()).add((module, but))
        return True

    def runs_eagerly(self, layer: int, module: str, but: str) -> None:
        self.catch_up_once()
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
        self.catch_up_once()
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


class Handover(Controller):
    """A module's `forward` in the tree of an `EngineInterleaver`: nnsight's, with a short way past points where nobody waits.

    A pass calls hundreds of modules, and blocks wait at a few of them. Other trees that share the module, and calls that a
    block makes, go nnsight's way.
    """

    def __init__(self, module: torch.nn.Module, state: Any, interleaver: EngineInterleaver) -> None:
        super().__init__(module, state)
        self._interleaver = weakref.ref(interleaver)
        self._locations: tuple[str, str, str] = state.routes[-1][2]  # that of the tree which was registered last: ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        interleaver = self._interleaver()
        if interleaver is None or interleaver.thread != get_ident() or interleaver.serving is not None:
            return super().__call__(*args, **kwargs)
        at_input, at_skip, at_output = self._locations
        points, visits = interleaver.points, interleaver.visits
        if at_input in points:
            args, kwargs = interleaver.visit(at_input, (args, kwargs))
        else:
            visits[at_input] += 1
        output = NO_SKIP
        if at_skip in points:
            output = interleaver.visit(at_skip, NO_SKIP)
        else:
            visits[at_skip] += 1
        if output is NO_SKIP:
            output = self.state.body(self.module_ref(), *args, **kwargs)
        if at_output in points:
            return interleaver.visit(at_output, output)
        visits[at_output] += 1
        return output


def leaves(value: Any) -> list[Any]:
    """What a module's ``(args, kwargs)``, or its tuple or dict of outputs, holds, in order."""
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def same_objects(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the very same."""
    return len(now) == len(before) and all(map(is_, now, before))


def writes_to(parts: list[Any]) -> int:
    """How often torch has seen the tensors among `parts` written to."""
    return sum(part._version for part in parts if isinstance(part, torch.Tensor) and not part.is_inference())


def without_batch(value: Any) -> Any:
    """A module's ``(args, kwargs)`` without the engine's own `forward_batch`: a block must not hold the whole batch."""
    if type(value) is tuple and len(value) == 2 and type(value[1]) is dict and "forward_batch" in value[1]:
        return value[0], {**value[1], "forward_batch": None}
    return value
