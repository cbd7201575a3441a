"""Where the model meets the blocks of many requests.

nnsight's `Interleaver` runs one set of blocks against one model call. An engine has many requests, each with blocks of its
own, and which of them take part changes from pass to pass; so this one keeps, for each pass, the *points* at which
somebody waits, and lets each request count its own passes. What it keeps of nnsight's: a module's controller calls
`handle`, a block parks by switching a `Pending` to its parent, and strictly one of them runs at a time.

    model reaches "model.layers.3.output"
      -> handle(location, value): nobody at that point? one dict lookup, and on
      -> the blocks parked there for this visit, in the order of the batch: each gets its own rows, edits are put back
      -> caches that watch the location take what the model goes on with
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .nnsight_compat import Envoy, Event, Interleaver, Mediator, Pending, apply, save_scope
from .rows import EditError
from .watchdog import TraceTimeoutError, Watchdog

if TYPE_CHECKING:
    from .trace import RequestTrace


class Block(Mediator):
    """One block of a request: a mediator that counts its request's passes and keeps its request's saves.

    A block that takes part in every second step of the engine must not notice the others: which occurrence of a location
    it meets is a matter of its own request's passes.

    Attributes:
        served: the block is past its first wait.
    """

    trace: RequestTrace
    served = False

    def occurrence(self, location: str) -> int:
        """How many times the request's passes have reached `location`."""
        return self.trace.occurrence(location)

    def switch(self, *args: Any) -> Any:
        """Run the block to where it parks next; returns its `Pending`, or None at its end."""
        return self.run(super().switch, *args)

    def throw(self, error: BaseException) -> Any:
        """Raise `error` in the block, at the line where it waits; returns as `switch` does."""
        assert self.worker is not None
        return self.run(self.worker.throw, error)

    def run(self, resume: Callable[..., Any], *args: Any) -> Any:
        """Call `resume`, which runs the block, with its request's saves as the thread's and the watchdog on."""
        # nnsight keeps the saved ids and the nesting depth with the thread; here they belong to the request.
        trace = self.trace
        interleaver = trace.interleaver
        scope = save_scope.__dict__
        depth, saves = scope.get("depth", 0), scope.get("saves")
        outer, watchdog = interleaver.serving, interleaver.watchdog
        scope["depth"], scope["saves"], interleaver.serving = 1, trace.saves, trace
        visit = watchdog.enter(trace) if watchdog is not None else None
        try:
            return resume(*args)
        finally:
            # Plain stores, so that the watchdog's exception cannot come between them.
            scope["depth"], scope["saves"], interleaver.serving = depth, saves, outer
            if watchdog is not None:
                watchdog.visit = visit
                if watchdog.posted:
                    watchdog.drain()


@dataclass(eq=False)
class Point:
    """A location at which something waits in this pass."""

    parked: list[Block] = field(default_factory=list)
    caches: list[tuple[Block, Any, tuple[str, str]]] = field(default_factory=list)
    """(block, cache, what the cache stores)"""
    skips: list[tuple[Block, Any]] = field(default_factory=list)
    """Replacements for the rows of requests that skip the module."""

    def __bool__(self) -> bool:
        return bool(self.parked or self.caches or self.skips)


class EngineInterleaver(Interleaver):
    """Serves the blocks of the requests that take part in a pass, and is the pass's `LayerWatch`.

    Between `begin_pass` and `end_pass`, and on that thread only, modules hand their values to `handle`. A module that a
    client calls on a thread of its own (``lm.lm_head(h)`` outside a trace) is a plain module.

    Attributes:
        logit_locations: locations whose values carry logit rows, not token rows.
        run_locations: what a step makes outside the modules: its logits and samples.
        per_pass: visits that a pass makes to a location, where it is not one.
        visits: this pass's visits.
        serving: the request whose block runs now.
        watchdog: watches for blocks that take long; None where nobody does.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        super().__init__()
        self.logit_locations: frozenset[str] = frozenset()
        self.run_locations: frozenset[str] = frozenset()
        self._model_paths: set[str] = set()
        self._in_model: dict[str, bool] = {}
        self._layers: list[tuple[str, dict[str, int], dict[str, int]]] = []
        self.per_pass: dict[str, int] = {}
        self.visits: dict[str, int] = {}
        self.points: dict[str, Point] = {}
        self.traces: list[RequestTrace] = []
        self.serving: RequestTrace | None = None
        self.watchdog: Watchdog | None = None

    def bind(self, model: Envoy) -> None:
        """Learn the model's own locations, before users attach modules of theirs."""
        paths = {envoy.path for envoy in model.modules()}
        self._model_paths = paths
        layers = f"{model.path}.model.layers."
        self._layers = []
        while (path := f"{layers}{len(self._layers)}") in paths:
            inside = [p for p in paths if p.startswith(f"{path}.")]
            visits = {f"{p}.{end}": 1 for p in inside for end in ("input", "skip", "output")}
            own = {f"{path}.{end}": 1 for end in ("input", "skip", "output")}
            self._layers.append((f"{path}.", own, visits))
        self.run_locations = frozenset({f"{model.path}.logits", f"{model.path}.samples"})
        head = f"{model.path}.lm_head"
        self.logit_locations = (
            frozenset({f"{head}.input", f"{head}.output", f"{model.path}.output"}) | self.run_locations
        )

    def in_model(self, location: str) -> bool:
        """Whether each pass reaches `location`. Modules that a user attached, and results, are counted by their calls."""
        known = self._in_model.get(location)
        if known is None:
            module = location.partition(".source.")[0] if ".source." in location else location.rpartition(".")[0]
            known = self._in_model[location] = module in self._model_paths or location in self.run_locations
        return known

    # nnsight's gate, read by every instrumented module on every call.
    @property
    def interleaving(self) -> bool:
        return self._thread is not None and self._thread == threading.get_ident()

    @interleaving.setter
    def interleaving(self, value: bool) -> None:
        self._thread = threading.get_ident() if value else None

    def begin_pass(self, traces: Iterable[RequestTrace]) -> None:
        """Arm the modules for one pass of the model, in which `traces` take part (in batch order)."""
        self.traces = list(traces)
        self.points, self.visits = {}, {}
        self.sourced.clear()
        for trace in self.traces:
            trace.in_pass = True
            for block in trace.blocks:
                self._park(block)
                for cache in block.caches:
                    for location, slot in cache.subscriptions().items():
                        self._point(location).caches.append((block, cache, slot))
        self.busy = self.interleaving = True

    def end_pass(self) -> None:
        """Disarm the modules and count the pass for those that took part."""
        self.busy = self.interleaving = False
        for location, count in self.visits.items():
            if count != 1:
                self.per_pass[location] = count
        for trace in self.traces:
            trace.end_pass()
        self.traces, self.points = [], {}

    def handle(self, provider: str, value: Any) -> Any:
        """Offer `value` to whoever waits at `provider`; return what the model goes on with."""
        if self.serving is not None:
            return self._handle_call(self.serving, provider, value)
        point = self.points.get(provider)
        if point is not None:
            value = self._visit(point, provider, value)
        self.visits[provider] = self.visits.get(provider, 0) + 1
        return value

    def nobody_at(self, layer: int) -> bool:
        prefix, own, visits = self._layers[layer]
        for location in self.points:
            if location.startswith(prefix):
                return False
        self.visits.update(visits)
        self.visits.update(own)
        return True

    def nobody_inside(self, layer: int) -> bool:
        prefix, own, visits = self._layers[layer]
        for location in self.points:
            if location.startswith(prefix) and location not in own:
                return False
        self.visits.update(visits)
        return True

    def resume(self, block: Block, *args: Any, error: BaseException | None = None) -> None:
        """Run a block on. What it raises ends its own request and no other."""
        block.pending = None
        block.served = True
        try:
            block.pending = block.switch(*args) if error is None else block.throw(error)
        except BaseException as raised:
            if isinstance(raised, TraceTimeoutError) and self.watchdog is not None:
                raised.args = (
                    f"request {block.trace.request_id}: its block ran for more than trace_step_timeout="
                    f"{self.watchdog.end_after} s without reaching the model",
                )
            block.exception = raised
            block.trace.fail(raised)

    def release(self, block: Block) -> None:
        """Run a block on that waited for other blocks, and file it where it parks next."""
        self.resume(block)
        if block.trace.in_pass:
            self._park(block)

    # -- one visit -------------------------------------------------------------

    def _visit(self, point: Point, provider: str, value: Any) -> Any:
        of_logits = provider in self.logit_locations
        owned: dict[int, torch.Tensor] = {}
        for block, replacement in point.skips:
            try:
                value = self._merge(block.trace, value, replacement, of_logits, owned)
            except EditError as error:
                block.trace.fail(EditError(f"request {block.trace.request_id}: skip of `{provider}`: {error}"))
        point.skips.clear()
        while ready := [block for block in point.parked if block.trace.reaches(block, provider)]:
            point.parked = (
                [block for block in point.parked if block not in ready] if len(ready) < len(point.parked) else []
            )
            for block in ready:
                value = self._serve(block, provider, value, of_logits, owned)
                self._park(block)
        for block, cache, slot in point.caches:
            trace = block.trace
            if not (trace.ended or trace.skips(provider)):
                served = trace.rows.narrow(value, of_logits) if trace.rows else value
                cache.observe_selected(slot, apply(without_batch(served), torch.Tensor.clone, torch.Tensor))
        if not point:
            self.points.pop(provider, None)
        return value

    def _serve(self, block: Block, provider: str, value: Any, of_logits: bool, owned: dict[int, torch.Tensor]) -> Any:
        """Serve a block's requests at this visit until it parks elsewhere or ends; returns the value, edited or not."""
        trace = block.trace
        occurrence = trace.occurrence(provider)
        trace.dirty = True
        while (pending := block.pending) is not None and (pending.provider, pending.iteration) == (
            provider,
            occurrence,
        ):
            if (
                block.iteration
            ):  # as in nnsight: after the first hit of iter[n] the rest of that step follows in sequence
                block.iteration = None
            if pending.event is Event.VALUE:
                trace.receipt.reads += 1
                served = trace.rows.narrow(value, of_logits) if trace.rows else value
                version = served._version if isinstance(served, torch.Tensor) else None
                self.resume(block, without_batch(served))
                if version is not None and served._version != version:
                    trace.count_edit(served)  # in place
            elif pending.event is Event.SKIP:
                value = self._skip(block, provider, value, pending)
                self.resume(block)
            else:
                value = self._swap(block, provider, value, pending, of_logits, owned)
        return value

    def _swap(
        self,
        block: Block,
        provider: str,
        value: Any,
        pending: Pending,
        of_logits: bool,
        owned: dict[int, torch.Tensor],
    ) -> Any:
        try:
            value = self._merge(block.trace, value, pending.value, of_logits, owned)
        except EditError as error:
            message = f"request {block.trace.request_id}: edit of `{provider}`: {error}"
            self.resume(block, error=EditError(message))
        else:
            self.resume(block)
        return value

    def _merge(
        self, trace: RequestTrace, value: Any, edited: Any, of_logits: bool, owned: dict[int, torch.Tensor]
    ) -> Any:
        merged = trace.rows.splice(value, edited, of_logits, owned) if trace.rows else edited
        trace.count_edit(edited)
        return merged

    def _skip(self, block: Block, provider: str, value: Any, pending: Pending) -> Any:
        """A lone request's module does not run. In a shared batch it runs for the others; the skipper's rows are replaced."""
        trace, path = block.trace, provider.removesuffix(".skip")
        trace.skipping.append(path)
        if trace.rows is None or trace.rows.alone:
            trace.count_edit(pending.value)
            return pending.value
        self._point(f"{path}.output").skips.append((block, pending.value))
        return value

    def offer(self, trace: RequestTrace, location: str, value: Any) -> Any:
        """Serve a value that belongs to one request and to no module of the pass (its result, its next token)."""
        return self._handle_call(trace, location, value)

    # -- a module called by a block ---------------------------------------------

    def _handle_call(self, trace: RequestTrace, provider: str, value: Any) -> Any:
        """A visit that a block's own call makes (``module(x, hook=True)``): its request's, whole, and nobody else's."""
        rows, trace.rows = trace.rows, None
        try:
            while ready := [block for block in trace.blocks if trace.reaches(block, provider)]:
                for block in ready:
                    self._unpark(block, provider)
                    value = self._serve(block, provider, value, False, {})
                    self._park(block)
        finally:
            trace.rows = rows
        trace.calls[provider] = trace.calls.get(provider, 0) + 1
        return value

    # -- points ------------------------------------------------------------------

    def _point(self, location: str) -> Point:
        point = self.points.get(location)
        if point is None:
            point = self.points[location] = Point()
        return point

    def _park(self, block: Block) -> None:
        if (pending := block.pending) is not None and pending.provider is not None:
            self._point(pending.provider).parked.append(block)

    def _unpark(self, block: Block, location: str) -> None:
        point = self.points.get(location)
        if point is not None and block in point.parked:
            point.parked.remove(block)


def without_batch(value: Any) -> Any:
    """A module's ``(args, kwargs)`` without the engine's own `forward_batch`: a block must not hold the whole batch."""
    if type(value) is tuple and len(value) == 2 and type(value[1]) is dict and "forward_batch" in value[1]:
        return value[0], {**value[1], "forward_batch": None}
    return value
