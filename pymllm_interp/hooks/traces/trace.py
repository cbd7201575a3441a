"""A request's trace: its blocks, its saves, and where it stands.

A `RequestTrace` is what `Request.trace` points to. It is made on the caller's thread, where the ``with`` block was
written, and from then on lives on the engine's: `start` runs the block to where it first waits, the passes serve it
(hooks/interleaver.py), `finish` winds it up. Nothing is serialised: a local block runs on the caller's own objects.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..captures.activations import NOTHING
from ..receipt import Receipt
from .block import Block
from .block_analysis import names_of, only_binds, wants_gradients
from .delivery import Delivery
from .interleaver import EngineInterleaver
from .loops import LOOP_NAMES, PREFIX, LoopEnd, with_loop_ends
from .nnsight_compat import EarlyStopException, Event, Mediator, dangling_unwind, mark
from .rows import Rows
from .saves import find_tensors, own, unowned
from .torch_modes import BlockModes
from .visits import Point

if TYPE_CHECKING:
    from ...core.request import Request
    from .envoy import TracedModel

_trace_ids = itertools.count()


TOO_LATE = (
    "`{}` was requested but the model already ran past it{}; a block reads in the order in which the model runs: what is inside "
    "of a module before the module's own output"
)


OURS = ("nnsight.", "pymllm_interp.", "greenlet")
"""How the modules are called that stand between a user's lines."""


class GangError(RuntimeError):
    """Another request of the same gang failed."""


class RequestTrace:
    """The blocks that watch one request.

    Attributes:
        trace_id: shared by the requests of one ``with`` block.
        num_prompts: how many requests that block has.
        blocks: persistent edits first, then the request's own block.
        rows: the request's rows in the current pass; None while it is in none.
        passes: passes of the model that the request took part in.
        max_passes: as many as there can be.
        single: its request is one forward pass, and generates nothing.
        over: no further pass comes.
        ended: no block of this trace is served any more.
        error: what a block raised, other than ``tracer.stop()``.
        stopped: a block called ``tracer.stop()``.
        gang: the traces that are stepped together with this one, itself included; empty where it goes alone.
        grad: its pass runs alone, and with gradients.
        delivery: how its caller is handed what it saved.
        activations: what its request captured; set when that has ended.
        on_step: called after each pass with its number and copies of the saved values by name, on the engine's thread.
        pace: `passes`, while it is in a pass and has missed nothing of any: those of one pace have reached a place of the model as
            often as each other; else -1.
        last_edit: the pass (`EditLog.number`) in which a block has edited last.
        outer: by name, what was saved above the block, where it stood then.
        dirty: a block has run since its saves were gone through.
    """

    def __init__(
        self,
        block: Mediator | None,
        interleaver: EngineInterleaver,
        edits: list[Mediator],
        *,
        grad: bool = False,
        delivery: Delivery | None = None,
        on_step: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> None:
        self.trace_id = next(_trace_ids)
        self.num_prompts = 1
        self.request_id = ""
        self.interleaver = interleaver
        self.saves: set[int] = set()
        self.outer: dict[str, Any] = {}
        self.blocks = [self._block(edit, edit.lcls.copy()) for edit in edits]
        self.own = self._block(block, block.lcls) if block is not None else None
        if self.own is not None:
            self.blocks.append(self.own)
        self.rows: Rows | None = None
        self.passes = 0
        self.max_passes = 1
        self.single = False
        self.pace = -1
        self.in_pass = self.over = self.ended = self.stopped = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.activations = NOTHING
        self.receipt = Receipt()
        self.warnings: list[str] = []
        self.gang: Sequence[RequestTrace] = ()
        self.grad = grad or any(wants_gradients(b.code) for b in self.blocks)
        self.delivery = delivery or Delivery(None)
        self.on_step = on_step
        self.reported_slow = False
        self.dirty = True
        self.last_edit: int | None = None
        self.calls: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self.skipping: list[str] = []
        self._seen: dict[int, int] = {}
        self._done: torch.cuda.Event | None = None

    def _block(self, source: Mediator, scope: Any) -> Block:
        code = with_loop_ends(source.node, source.code) if source.node is not None else source.code
        block = Block(code, source.glbls, {}, node=source.node)
        block.lcls = scope
        block.trace, block.modes = self, BlockModes()
        for name, value in LOOP_NAMES.items():
            dict.__setitem__(scope, name, value)  # not a name that the block binds
        return block

    # -- where it stands ---------------------------------------------------------

    def occurrence(self, location: str) -> int:
        """How many times this request's passes have reached `location`."""
        return self._count(self.interleaver.point(location))

    def _count(self, point: Point) -> int:
        count = self.before_pass(point)
        if point.in_model and self.in_pass and not (self.skipping and self.skips(point.location)):
            count += self.interleaver.visited(point)
        return count

    def before_pass(self, point: Point) -> int:
        """How many times the request's earlier passes have reached `point`, or its blocks' calls have."""
        if not point.in_model:
            return self.calls.get(point.location, 0)
        count = self.passes
        if self.interleaver.per_pass:
            count *= self.interleaver.per_pass.get(point.location, 1)
        if self.missed:
            count -= sum(missed for path, missed in self.missed.items() if _inside(path, point.location))
        return count

    def stands_at(self, location: str) -> tuple[int, int]:
        """(`EngineInterleaver.moves`, `pace`): whose are equal has reached `location` as often. (-1, -2): nobody's are."""
        if self.pace < 0 or not self.interleaver.point(location).in_model:
            return -1, -2
        return self.interleaver.moves, self.pace

    def join_pass(self) -> None:
        """It takes part in the pass that begins."""
        self.in_pass = True
        self.pace = -1 if self.missed else self.passes

    def reaches(self, block: Block, location: str) -> bool:
        """Whether `block` waits for this visit of `location`."""
        pending = block.pending
        return (
            pending is not None
            and pending.provider == location
            and pending.iteration == self.occurrence(location)
            and self.is_served_at(location)
        )

    def is_served_at(self, location: str) -> bool:
        """Whether this request's pass goes through `location`, and its blocks still take part."""
        return not (self.ended or (self.skipping and self.skips(location)))

    def skips(self, location: str) -> bool:
        """Whether `location` lies inside a module that this request skips in this pass."""
        return any(_inside(path, location) for path in self.skipping)

    # -- life --------------------------------------------------------------------

    def start(self, request: Request, model: TracedModel) -> None:
        """Run each block to where it first waits."""
        self.request_id = request.request_id
        self.single, self.max_passes = request.forward_only, 1 if request.forward_only else request.max_tokens
        for block in self.blocks:
            if self.ended:
                return
            try:
                Mediator.start(block, self.interleaver)
            except BaseException as raised:
                block.exception = raised
                self.fail(raised)
        self.offer(self.interleaver.streamer, lambda: torch.tensor([request.prompt_token_ids]))

    def offer(self, location: str, value: Callable[[], Any]) -> None:
        """Offer a value that is this request's alone, and made only if a block waits for it."""
        if any(self.reaches(block, location) for block in self.blocks):
            self.interleaver.offer(self, location, value())
        else:
            self.calls[location] = self.calls.get(location, 0) + 1

    def end_pass(self, saved: list[torch.Tensor], shared: set[int]) -> None:
        """Count the pass, and note in `saved` what was, and may have to be freed from the batch (`Delivery.keep`).

        Args:
            shared: ids of what was saved above several blocks, and has been looked through after this pass.
        """
        self.in_pass, self.pace = False, -1
        self.passes += 1
        if self.skipping:
            for path in self.skipping:
                self.missed[path] = self.missed.get(path, 0) + 1
            self.skipping.clear()
        self.rows = None
        if self.dirty:
            self.dirty = False
            self._find(saved)
            for value in self.outer.values():
                if id(value) not in shared:
                    shared.add(id(value))
                    find_tensors(value, saved, self.delivery.seen)

    def stream(self) -> None:
        """Hand copies of what is saved so far to `on_step`."""
        if self.on_step is not None and not self.ended:
            try:
                self.on_step(self.passes - 1, self.delivery.copies(self.saved_names()))
            except Exception as raised:
                self.fail(raised)

    def fail(self, raised: BaseException) -> None:
        """A block raised: no block of this request is served any more."""
        self.ended = True
        if isinstance(raised, EarlyStopException):
            self.stopped = True
        elif self.error is None:
            self.error = raised
            if isinstance(raised, NameError) and self._is_a_siblings(raised.name):
                raised.add_note(
                    f"`{raised.name}` is bound by another invoke of this trace, which has not come to that line yet: with "
                    "`barrier = tracer.barrier(2)`, call `barrier()` there behind that line, and here ahead of this one"
                )
            for other in self.gang:
                if not other.ended:
                    other.fail(
                        GangError(f"request {self.request_id}, which runs together with this one, failed: {raised!r}")
                    )

    def _is_a_siblings(self, name: str | None) -> bool:
        others = (trace.own for trace in self.gang if trace is not self)
        return any(own is not None and name in names_of(own.code).binds for own in others)

    def serve_results(self, request: Request, model: TracedModel) -> bool:
        """Serve what only a finished request has. False: no block asks for it."""
        result, served = self.result, False
        for location in (f"{model.path}.generator.output", "result"):
            while not self.ended and any(self.reaches(block, location) for block in self.blocks):
                if not served and not request.forward_only:
                    result = torch.tensor([request.all_token_ids])
                result = self.interleaver.offer(self, location, result)
                served = True
        return served

    def end_waiting(self, barriers: bool) -> bool:
        """End a wait that nothing will come of: of a loop for its next step, or of a block that came too late for a value.

        Args:
            barriers: also those at a barrier.

        Returns:
            False: no block waits.
        """
        for block in self.blocks:
            pending = block.pending
            if self.ended or not block.alive or pending is None or (pending.event is Event.BARRIER and not barriers):
                continue
            if pending.event is not Event.BARRIER and block.iteration != 0:
                error: BaseException = LoopEnd(f"'{pending}' was never reached: the generation is over")
            else:
                error, _ = dangling_unwind(block)
                before = f": the block was at `{block.last}` before" if block.last else ""
                text = TOO_LATE.format(pending.provider, before) if pending.provider else error
                error = type(error)(f"request {self.request_id}: {text}")
            self.dirty = True
            self.interleaver.resume(block, error=error)
            if self.error is error and isinstance(error, LoopEnd):
                self.error, self.ended = None, False
                self.warn(
                    f"'{pending}' was never reached: the generation was over, and the block ended inside the function "
                    "that holds the loop; values that were saved are kept"
                )
            return True
        return False

    def close(self, request: Request) -> None:
        """Free the blocks' frames, and what was saved from the batch."""
        for block in self.blocks:
            if block.alive:
                self.dirty = True
                self._kill(block)
        if self.last_edit is not None:
            self.interleaver.edits.settle(self.last_edit)
        self.receipt.preemptions = request.num_preemptions
        self.warnings += self.receipt.warnings
        if self.dirty:  # what its last lines put into a list from above is found after the next pass, or by `hand_over`
            saved: list[torch.Tensor] = []
            self._find(saved)
            own(unowned(saved, self.delivery.pieces))
        if torch.cuda.is_initialized():
            self._done = torch.cuda.Event()
            self._done.record()
        self.result = None
        self.gang = ()

    def _kill(self, block: Block) -> None:
        """Unwind a block that will not be served any more, so that its frame is freed."""
        from greenlet import GreenletExit

        try:
            block.throw(GreenletExit())
        except BaseException as raised:
            self.warn(f"the block raised {raised!r} while it was unwound")

    # -- what it made --------------------------------------------------------------

    def _own_saves(self) -> list[Any]:
        """What the block marked with ``.save()`` and still has under a name."""
        if self.own is None or not self.saves:
            return []
        bound = self.own.lcls
        return [bound[name] for name in bound.written if name in bound and id(bound[name]) in self.saves]

    def written(self) -> dict[str, Any]:
        """The names that the block bound, with their values; for the caller's frame."""
        if self.own is None:
            return {}
        return {n: v for n, v in self.own.lcls.writes().items() if not n.startswith(PREFIX)}

    def saved_names(self) -> dict[str, Any]:
        """What the block saved, by name."""
        return {name: value for name, value in self.written().items() if id(value) in self.saves}

    def _find(self, saved: list[torch.Tensor]) -> None:
        """Note the tensors that the block saved."""
        for value in self._own_saves():
            find_tensors(value, saved, self._seen)

    def announce_saves(self) -> None:
        """Tell `delivery` what `hand_over` is going to ask for."""
        if self._done is not None:
            torch.cuda.current_stream(self._done.device).wait_event(self._done)
        if self.delivery.device is not None:
            self.delivery.receive()
            for value in itertools.chain(self._own_saves(), self.outer.values()):
                self.delivery.expect(value)

    def hand_over(self, handed: dict[int, Any]) -> dict[str, Any]:
        """The names that the block bound, with what the caller gets for their values; saved ones are marked as such.
        `announce_saves` comes first, `settle_saves` last.

        Args:
            handed: what lives on is added here, by id.
        """
        names, session = self.written(), self.delivery.device is None
        for value in self.outer.values():
            value = mark(self.delivery.hand(value, self.grad))
            handed[id(value)] = value
        for name, value in names.items():
            if id(value) in self.saves:
                value = names[name] = mark(self.delivery.hand(value, self.grad))
                handed[id(value)] = value
            elif session:  # there the others live on too
                handed[id(value)] = value
        return names

    def in_vain(self) -> list[str]:
        """The names that the block gave to what it read, where it did nothing else, so that nothing is left of it."""
        own = self.own
        if own is None or own.node is None or self.saves or self.receipt.edits:
            return []
        if self.on_step is not None or self.activations is not NOTHING or len(self.blocks) > 1:
            return []
        names = sorted(name for name, value in self.written().items() if isinstance(value, torch.Tensor))
        return names if names and self.receipt.reads and only_binds(own.node) else []

    def let_go(self) -> None:
        """Forget the blocks: they and their trace hold each other, and what was read. It has been handed over."""
        self.blocks, self.own, self.outer = [], None, {}

    def warn(self, text: str) -> None:
        """Note something that the user should know; it reaches them with the result."""
        if text not in self.warnings:
            self.warnings.append(text)


def settle_saves(handed: Iterable[Any], delivery: Delivery) -> None:
    """Wait for what a ``with`` block's traces have handed over, and give it memory of its own where it has not: what was put
    into a list that had been gone through."""
    delivery.wait()
    found: list[torch.Tensor] = []
    for value in handed:
        find_tensors(value, found, delivery.owned)
    own(unowned(found))


def emit(texts: list[str]) -> None:
    """Give each text to Python's warnings, at the line of the user's ``with``."""
    if texts:
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OURS):
            level, frame = level + 1, frame.f_back
        for text in texts:
            warnings.warn(text, UserWarning, stacklevel=level)


def _inside(path: str, location: str) -> bool:
    """Whether `location` lies inside the module at `path`: deeper than its own input, skip gate and output."""
    return location.startswith(path + ".") and location[len(path) + 1 :] not in ("input", "skip", "output")
