"""`Block`: one block of a request, and `Turn`: the thread while blocks run on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent
from torch import is_grad_enabled, is_inference_mode_enabled

from .nnsight_compat import (
    Event,
    Mediator,
    Pending,
    save_scope,
)
from .rows import EditError, Shared
from .torch_modes import NO_AUTOCAST, BlockModes, Modes, autocast_by_device, is_any_autocast_enabled
from .watchdog import TraceTimeoutError

if TYPE_CHECKING:
    from .interleaver import EngineInterleaver
    from .trace import RequestTrace
from .leaves import leaves, same_objects, without_batch, writes_to

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
