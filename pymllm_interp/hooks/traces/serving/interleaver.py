"""`EngineInterleaver`: connects the model's passes with the blocks of many requests.

nnsight's `Interleaver` runs one set of blocks against one model call. In an engine, each request has its own blocks, and
every pass has other requests. So this interleaver keeps, for each pass, the *points* at which blocks wait, and each request
counts its own passes. The rest is nnsight's: a module's controller hands its values to `handle`. A block waits by switching a
`Pending` to its parent greenlet, and one of them runs at a time.

    model reaches "model.layers.3.output"
      -> no point there: one dict lookup
      -> blocks parked for this visit, in batch order: each is served its own rows, and its edits are put back
      -> caches at the location store the value after the edits
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from typing import Any

import torch

from ....core.forward_batch import Waits
from ....core.model_spec import Family
from ..blocks.block_runner import BlockRunner
from ..blocks.errors import EditError, MixedRowsError
from ..blocks.trace import Block, RequestTrace
from ..blocks.unread import unread_outputs
from ..blocks.watchdog import Watchdog
from ..nnsight_compat import Controller, Envoy, Interleaver, apply, install_controller
from ..saves.save_transfer import SaveTransfer
from ..saves.saved import give_own_storage
from ..syntax.pass_options import NONE, options_of
from .handover import Handover, serve_sites
from .module_parts import refuse_inside, rows_inside, serve_part
from .nan_check import NaNCheck
from .points import Point, Points
from .shared_value import SharedValue, without_batch
from .visits import PassVisits


class EngineInterleaver(Interleaver):
    """Serves the blocks of the requests that take part in a pass, and is the pass's `HookQuery`.

    Modules hand their values to `handle` between `begin_pass` and `end_pass`, on the engine's thread only. On other threads
    (``lm.lm_head(h)`` outside a trace) they are plain modules.

    Attributes:
        traces: the traces of the current pass, in batch order.
        visits: visits of the current pass.
        points: locations at which blocks wait, or have waited, in the current pass.
        blocks: runs the blocks.
        nan_check: counts edits that contain NaN.
        thread: the thread whose modules hand over their values during a pass; else None.
        sync_previous_step: called before a pass serves its first value, so that no block of an ended request is
            served. None without overlapped steps.
        call_back: calls a trace's `on_step` on another thread; None: it is called at once.
        samples, streamer: locations of a step's tokens: as drawn, and after edits, as the generation continues.
        result_locations: locations of a finished request's result.
        run_locations: locations that the runner serves, not a module: the step's logits and samples.
        eager_parts: number of times that an attention or an MLP ran kernel by kernel in a pass of graph segments. Keys
            are the awaited locations inside it: the module's path relative to the layer, plus ".source" for operations.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        super().__init__()
        self.logits = self.samples = self.streamer = ""
        self.result_locations: tuple[str, ...] = ("result",)
        self.run_locations: frozenset[str] = frozenset()
        self._logit_locations: frozenset[str] = frozenset()
        self._recorded: frozenset[str] = frozenset()
        self._output = ""
        self._model_paths: set[str] = set()
        self._with_attention: set[str] = set()
        self._root = self._layers = ""
        self.traces: list[RequestTrace] = []
        self.visits = PassVisits()
        self.pass_options = NONE
        self.points = Points(self.visits, self._locate)
        self.blocks = BlockRunner(self.points)
        self.nan_check = NaNCheck()
        self.sync_previous_step: Callable[[], None] | None = None
        self.call_back: Callable[[RequestTrace, Callable[[], None]], None] | None = None
        self._synced = True
        self._in_order = False  # blocks that see the rows of others are served in the order of the invokes
        self._row_memory: list[torch.Tensor] = []
        self.eager_parts: Counter[str] = Counter()

    def bind(self, model: Envoy, family: Family) -> None:
        """Learn the locations of the model, before users attach modules."""
        self._model_paths = {envoy.path for envoy in model.modules()}
        attentions = [f"{path}." for path in self._model_paths if path.endswith(f".{family.attention}")]
        self._with_attention = {
            path for path in self._model_paths if any(attention.startswith(f"{path}.") for attention in attentions)
        }
        self._root, self._layers = model.path, f"{model.path}.{family.layers}."
        self.points.unread = dict(unread_outputs(self._model_paths, model.path, family))
        self.samples, self.streamer = f"{model.path}.samples", f"{model.path}.generator.streamer.output"
        self.result_locations = (f"{model.path}.generator.output", "result")
        self._recorded = frozenset({self.streamer, self.result_locations[0]})
        self._output = f"{model.path}.output"
        self.logits = f"{model.path}.logits"
        self.run_locations = frozenset({self.logits, self.samples})
        head = f"{model.path}.{family.head}"
        self._logit_locations = self.run_locations | {f"{head}.input", f"{head}.output", f"{model.path}.output"}

    @property
    def watchdog(self) -> Watchdog | None:
        """Watches for blocks that run too long; None for none."""
        return self.blocks.watchdog

    @watchdog.setter
    def watchdog(self, watchdog: Watchdog | None) -> None:
        self.blocks.watchdog = watchdog

    def instrument(self, envoy: Envoy) -> None:
        """Make the envoy's module hand its values to this interleaver."""
        state, own = install_controller(envoy), envoy._module.__dict__
        if "site_ends" in own:
            serve_sites(state, own["site_ends"])
        # A controller that accelerate's hook calls is not moved.
        if isinstance(own["forward"], Controller) and "_hf_hook" not in own:
            own["forward"] = Handover(envoy._module, state, self)

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
        return Point(
            location,
            in_model=in_model,
            of_module=in_model and not made_by_run,
            of_logits=location in self._logit_locations,
            layer=layer,
            below=below,
            module_output=f"{path}.output" if op else None,
            has_attention=path in self._with_attention,
        )

    # nnsight's probes and controllers read this gate.
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
        self.points.end_pass()
        self.visits.begin_pass()
        park = self.points.park
        for trace in self.traces:
            trace.visits.begin_pass()
            for block in trace.blocks:
                park(block)
                for cache in block.caches:
                    for location, slot in cache.subscriptions().items():
                        self.points.open(location).caches.append((block, cache, slot))
        self.busy = self.interleaving = True
        self._in_order = any(trace.whole_batch for trace in self.traces)
        self._synced = self.sync_previous_step is None
        self.pass_options = options_of(trace.options for trace in self.traces)

    def hooked(self) -> set[RequestTrace]:
        """The traces with blocks that wait for a module of the pass, which must not have begun to run.

        A gang is hooked as a whole, since its blocks may resume each other in the middle of a pass.
        """
        found = {trace for trace in self.traces if trace.grad or trace.options is not NONE}
        for point in self.points.opened.values():
            found.update(entry[0].trace for entry in point.caches)
            if point.of_module:
                visits = self.visits.per_pass.get(point.name, 1)
                found.update(block.trace for block in point.parked if 0 <= block.target_visit < visits)
        alive = {trace for trace in found if not trace.ended}
        return alive.union(*(trace.gang for trace in alive if trace.gang)).intersection(self.traces)

    def leave(self, trace: RequestTrace) -> None:
        """Take a trace out of the pass, which then does not count for it: its request had ended before."""
        if trace.in_pass:
            trace.visits.leave_pass()
            trace.rows = None
            self.traces.remove(trace)
            for point in self.points.opened.values():
                point.leave(trace)

    def sync_once(self) -> None:
        """Call `sync_previous_step`, once per pass."""
        if not self._synced:
            self._synced = True
            assert self.sync_previous_step is not None
            self.sync_previous_step()

    def end_pass(self) -> None:
        """Disarm the modules, count the pass for its traces, and move their saves out of the batch."""
        self.busy = self.interleaving = False
        self.visits.end_pass()
        saved: defaultdict[SaveTransfer, list[torch.Tensor]] = defaultdict(list)
        searched: set[int] = set()
        for trace in self.traces:
            trace.visits.end_pass()
            trace.rows = None
            trace.saves.find(saved[trace.saves.transfer], searched)
        left: list[torch.Tensor] = []
        for transfer, tensors in saved.items():
            if tensors:
                left += transfer.leave_batch(tensors, self._row_memory)
        give_own_storage(left)
        self._row_memory = []
        self.nan_check.end_pass()
        for trace in self.traces:
            if trace.on_step is not None:
                self._call_on_step(trace)
        self.traces, self.pass_options = [], NONE
        self.points.end_pass()

    def _call_on_step(self, trace: RequestTrace) -> None:
        """Hand copies of the saves so far to `on_step`, on another thread if there is one for callbacks."""
        if trace.on_step is None or trace.ended:
            return
        try:
            saved = trace.saves.transfer.copies_of(trace.saves.saved_names())
            call = partial(trace.on_step, trace.visits.passes - 1, saved)
            if self.call_back is None:
                call()
            else:
                self.call_back(trace, call)
        except BaseException as raised:
            trace.fail(raised)

    # -- calls of the pass (HookQuery) ---------------------------------------------

    def first_hook(self, first: int, stop: int) -> tuple[int, Waits]:
        if self.pass_options is not NONE:
            return first, "within"
        while first < stop:
            layer = self.points.first_layer(first, stop)
            self.visits.fuse_layers(first, layer)
            if layer < stop and (waits := self._waits_in(layer)) != "nowhere":
                return layer, waits
            first = layer + 1
        return stop, "nowhere"

    def _waits_in(self, layer: int) -> Waits:
        waits: Waits = "nowhere"
        for point in self.points.in_layer(layer):
            if point.awaited(self.visits.of(point)):
                if not point.ends_layer:
                    return "within"
                waits = "at output"
        self.visits.fuse_layer(layer, f"{self._layers}{layer}.output" if waits == "at output" else None)
        return waits

    def try_fuse(self, layer: int, module: str = "", but: str = "") -> bool:
        if self.pass_options is not NONE or any(
            point.lies_inside(module, but) for point in self.points.awaited_in(layer)
        ):
            return False
        self.visits.fuse_part(layer, module, but)
        return True

    def runs_eagerly(self, layer: int, module: str, but: str) -> None:
        self.sync_once()
        for point in self.points.awaited_in(layer):
            if point.lies_inside(module, but):
                self.eager_parts[point.below if point.module_output is None else f"{point.below}.source"] += 1
                for trace in point.waiting(self.visits.of(point)):
                    trace.receipt.eager_parts[point.name.partition(".")[2]] += 1

    def is_own_call(self) -> bool:
        return self.blocks.serving is not None or self.thread != get_ident()

    def at_output(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.visit(f"{self._layers}{layer}.output", hidden)

    def rows_inside(self, *paths: str) -> list[tuple[int, int]]:
        return rows_inside(self, [f"{self._root}.{path}" for path in paths])

    def refuse_inside(self, *paths: str, why: str) -> None:
        refuse_inside(self, [f"{self._root}.{path}" for path in paths], why)

    def serve_part(
        self, *paths: str, span: tuple[int, int] | None, num_rows: int | None = None
    ) -> AbstractContextManager[None]:
        return serve_part(self, [f"{self._root}.{path}" for path in paths], span, num_rows)

    # -- tokens ----------------------------------------------------------------------

    def awaits_token(self) -> bool:
        """Whether a block waits for this step's tokens."""
        samples, streamer = self.points.opened.get(self.samples), self.points.opened.get(self.streamer)
        return (samples is not None and samples.awaited(0)) or (
            streamer is not None and bool(streamer.parked or streamer.caches)
        )

    def pass_token(self) -> None:
        """Count this step's tokens as served. No block waits for them."""
        self.visits.counts[self.samples] = 1
        for trace in self.traces:
            if not trace.single:
                trace.visits.calls[self.streamer] += 1

    # -- one visit -------------------------------------------------------------------

    def handle(self, provider: str, value: Any) -> Any:
        """Serve `value` to the blocks that wait at `provider`. Returns the value that the model continues with."""
        if self.blocks.serving is not None:
            return self.offer(self.blocks.serving, provider, value)
        if provider in self.points.opened:
            return self.visit(provider, value)
        self.visits.counts[provider] += 1
        return value

    def visit(self, location: str, value: Any) -> Any:
        """`handle` at one of `points`, from the model."""
        self.sync_once()
        visits = self.visits
        visits.event_count += 1
        point, visit = self.points.opened[location], visits.counts.get(location, 0)
        shared = SharedValue(value, point.of_logits, len(point.parked))
        if point.skips:
            _replace_skipped(point, shared)
        caches = point.caches
        if caches:  # a stop here comes after the value
            caches = [entry for entry in caches if entry[0].trace.is_served_at(location)]
        # A served block may release another one, which parks here too (a barrier).
        while point.parked and (ready := point.take(visit)):
            if self._in_order:
                ready.sort(key=lambda block: block.trace.order)
            self.blocks.serve(ready, location, visit, shared)
        self._row_memory += shared.row_memory
        value = shared.settle()
        if shared.edits:
            self.nan_check.check(value, point.of_logits, shared.edits)
        if caches:
            _fill_caches(caches, shared)
        if location == self._output:
            for trace, served in shared.containers.items():
                trace.result = served
        visits.counts[location] = visit + 1
        return value

    def caches_of(self, trace: RequestTrace, location: str) -> list[tuple[Block, Any, tuple[str, str]]]:
        """(block, cache, slot) of the trace's caches that record a location outside of the model's passes."""
        if trace.ended or location not in self._recorded:
            return []
        caches = ((block, cache) for block in trace.blocks for cache in block.caches)
        slots = ((block, cache, cache.subscriptions().get(location)) for block, cache in caches)
        return [(block, cache, slot) for block, cache, slot in slots if slot is not None]

    def offer(self, trace: RequestTrace, location: str, value: Any) -> Any:
        """Serve a value of one request: its result, next token, or that of a module called by its block
        (``module(x, hook=True)``)."""
        rows, trace.rows = trace.rows, None
        self.visits.event_count += 1
        shared, caches = SharedValue(value, of_logits=False), self.caches_of(trace, location)
        try:
            while ready := [block for block in trace.blocks if self.points.reaches(block, location)]:
                for block in ready:
                    self.points.unpark(block, location)
                    block.target_visit = 0
                    block.reads_tokens |= location == self.streamer
                self.blocks.serve(ready, location, 0, shared)
            if shared.edits:
                self.nan_check.check(shared.value, shared.of_logits, shared.edits)
            _fill_caches(caches, shared)
        finally:
            trace.rows = rows
        trace.visits.calls[location] += 1
        return shared.value


def _replace_skipped(point: Point, shared: SharedValue) -> None:
    for block, replacement in point.skips:
        try:
            shared.replace(block.trace.rows, replacement)
            shared.count_edit(block.trace)
        except (EditError, MixedRowsError) as error:
            block.trace.fail(type(error)(f"request {block.trace.request_id}: skip of `{point.name}`: {error}"))
    point.skips.clear()


def _fill_caches(caches: Iterable[tuple[Block, Any, tuple[str, str]]], shared: SharedValue) -> None:
    for block, cache, slot in caches:
        if block.trace.error is None:
            try:
                served = without_batch(shared.rows_of(block.trace.rows))
            except MixedRowsError as error:
                block.trace.fail(MixedRowsError(f"request {block.trace.request_id}: cache of `{slot[0]}`: {error}"))
                continue
            cache.observe_selected(slot, apply(served, torch.Tensor.clone, torch.Tensor))
