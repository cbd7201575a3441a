"""`BlockRunner`: runs blocks on the engine's thread, one at a time, and serves them values of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from greenlet import GreenletExit, getcurrent
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from ....utils.arguments import plain_text
from ..nnsight_compat import Event, Interleaver, Mediator, Pending, save_scope
from ..serving.attention_mask import READ_ONLY
from ..serving.points import Points
from ..serving.rows import BatchRows
from ..serving.shared_value import SharedValue, leaves, same_objects, versions_of
from .errors import EditError, MixedRowsError, TraceTimeoutError
from .torch_modes import (
    NO_AUTOCAST,
    BlockModes,
    Modes,
    autocast_by_device,
    get_default_dtype,
    is_any_autocast_enabled,
    num_dispatch_modes,
    num_function_modes,
)
from .trace import Block, RequestTrace
from .unread import replaces, unread_error
from .watchdog import Watchdog

VALUE = Event.VALUE  # looking up an enum's member is slow


class BlockRunner:
    """Runs blocks on the engine's thread. An error of a block ends its own request and no other.

    Args:
        points: points at which waiting blocks are filed.

    Attributes:
        serving: the trace of the block that runs now; else None.
        watchdog: watches for blocks that run too long; None for none.
        seconds: seconds for which the engine's thread has served blocks.
    """

    def __init__(self, points: Points) -> None:
        self.points = points
        self.seconds = 0.0
        self.serving: RequestTrace | None = None
        self.watchdog: Watchdog | None = None

    def start(self, block: Block, interleaver: Interleaver) -> None:
        """Run a new block until it first waits."""
        with BlockScope(self) as turn:
            turn.switch(block, partial(Mediator.start, block), interleaver)

    def resume(self, block: Block, error: BaseException | None = None) -> None:
        """Resume a block, or raise `error` at its waiting line."""
        worker = block.worker
        assert worker is not None
        block.served = True
        with BlockScope(self) as turn:
            block.pending = turn.switch(block, worker.switch if error is None else worker.throw, error)

    def release(self, block: Block) -> None:
        """Resume a block that waited at a barrier, and file it at its next location.

        It may be pinned to an earlier step than the block that released it.
        """
        block.interleaver.visits.event_count += 1
        self.resume(block)
        if block.trace.in_pass:
            self.points.park(block)

    def kill(self, block: Block) -> None:
        """Unwind a block that will not be served again, so that its frame is freed."""
        worker = block.worker
        assert worker is not None
        with BlockScope(self) as turn:
            turn.switch(block, worker.throw, GreenletExit(), _warn_of)

    def serve(self, blocks: list[Block], location: str, visit: int, shared: SharedValue) -> None:
        """Serve the blocks that wait for this visit of `location`, in order."""
        with BlockScope(self) as turn:
            turn.serve(blocks, location, visit, shared)


class BlockScope:
    """The engine's thread while blocks run on it. A block finds its own state of the thread, and the engine's comes back between
    two blocks.

    nnsight keeps the saved ids and the nesting depth in thread-local state. Here they belong to the request.
    """

    __slots__ = (
        "_autocast", "_began", "_depth", "_dispatched", "_dtype", "_functions", "_grad", "_greenlet", "_inference", "_outer_run",
        "_runner", "_saves", "_scope", "_serving", "_watchdog",
    )  # fmt: skip

    def __init__(self, runner: BlockRunner) -> None:
        self._runner = runner

    def __enter__(self) -> BlockScope:
        runner = self._runner
        self._began = perf_counter()
        self._greenlet, self._serving = getcurrent(), runner.serving
        # By attribute: to build a `Modes` takes as long as the rest.
        self._grad, self._inference, self._dtype = is_grad_enabled(), is_inference_mode_enabled(), get_default_dtype()
        self._functions, self._dispatched = num_function_modes(), num_dispatch_modes()
        self._autocast = autocast_by_device()
        scope = self._scope = save_scope.__dict__
        self._depth, self._saves = scope.get("depth", 0), scope.get("saves")
        watchdog = self._watchdog = runner.watchdog
        self._outer_run = None
        if watchdog is not None:
            watchdog.watch()
            self._outer_run = watchdog.running
        return self

    def __exit__(self, *_: object) -> None:
        scope = self._scope
        scope["depth"], scope["saves"], self._runner.serving = self._depth, self._saves, self._serving
        if self._serving is None:  # else it is part of an outer turn
            self._runner.seconds += perf_counter() - self._began

    def switch(
        self,
        block: Block,
        resume: Callable[[Any], Any],
        argument: Any,
        failed: Callable[[Block, BaseException], None] | None = None,
    ) -> Pending | None:
        """Call ``resume(argument)``, which runs the block, with its request's state in the thread and the watchdog on.

        Args:
            failed: called with the error of the block; by default, the error ends the block's request.

        Returns:
            request that the block waits for next, or None.
        """
        trace, worker, watchdog, scope = block.trace, block.worker, self._watchdog, self._scope
        saves, depth, following, error = trace.saves, block.depth, None, None
        saves.changed, block.pending = True, None
        scope["depth"], scope["saves"], self._runner.serving = depth, saves.ids, trace
        if worker is not None:
            worker.parent = self._greenlet
        if block.modes is not None:
            block.modes.resume()
            block.modes = None
        if watchdog is not None:
            watchdog.running = [trace, None]
        try:
            following = resume(argument)
        except BaseException as raised:
            error = raised
        if watchdog is not None:
            watchdog.running = self._outer_run  # no call since the `try`, so that no timeout arrives in between
            if watchdog.posted:
                watchdog.drain()
        if scope["depth"] != depth:
            block.depth = scope["depth"]
        if (
            is_grad_enabled() is not self._grad
            or is_inference_mode_enabled() is not self._inference
            or self._autocast is not NO_AUTOCAST
            or is_any_autocast_enabled()
            or num_function_modes() != self._functions
            or num_dispatch_modes() != self._dispatched
            or get_default_dtype() is not self._dtype
        ):
            block.modes = BlockModes.park(
                Modes(self._inference, self._grad, self._autocast, self._dtype, self._functions, self._dispatched)
            )
        if error is not None:
            (failed or self._failed)(block, error)
            return None
        if trace.gang or type(trace.rows) is BatchRows:
            for own in trace.gang or (trace,):  # a block may edit values that another one was served
                if type(own.rows) is BatchRows:
                    own.rows.write_edits()
        return following

    def _failed(self, block: Block, raised: BaseException) -> None:
        watchdog = self._watchdog
        if issubclass(type(raised), TraceTimeoutError) and watchdog is not None:  # `isinstance` would ask the instance
            raised.args = (
                f"request {block.trace.request_id}: its block ran for more than trace_step_timeout="
                f"{watchdog.end_after} s without reaching the model",
            )
        block.trace.fail(raised)

    def serve(self, blocks: list[Block], location: str, visit: int, shared: SharedValue) -> None:
        """Serve the blocks that wait for this visit of `location`, and file each at its next location."""
        points, run, answer = self._runner.points, self.switch, self._answer
        # File of the block before. Blocks that wait for the same `Pending` and have equal visit counts go there too.
        asked: Pending | None = None
        pass_index, target_visit, parked = -1, 0, []
        alike: Pending | None = None  # most blocks wait for one and the same `Pending`: its location is compared once
        for block in blocks:
            pending, trace = block.pending, block.trace
            # Blocks before it may have ended its request, or may have resumed it.
            if pending is None or block.target_visit != visit or trace.ended:
                continue
            if pending is not alike:
                if pending[1] != location:
                    continue
                alike = pending
            visits, occurrence = trace.visits, pending[2]
            if visits.pass_index < 0 and visits.skips(location):
                continue
            block.served, block.last_location = True, location
            while True:
                if block.iteration:
                    # As in nnsight: after the first hit of iter[n], the rest of that step follows in sequence.
                    block.iteration, block.pinned_pass = None, visits.passes
                if pending[0] is VALUE and (served := shared.tensor_for(trace)) is not None:
                    trace.receipt.reads += 1
                    version, block.asked, block.shared = served._version, pending, shared
                    following = run(block, block.worker.switch, served)  # pyright: ignore[reportOptionalMemberAccess]
                    block.shared = None
                    if served._version != version:
                        shared.count_edit(trace)  # in place
                else:
                    following = answer(block, pending, location, shared)
                if following is None or following is asked or following[1] != location or following[2] != occurrence:
                    break
                pending = following
            block.pending = following
            if following is not None and following is asked and visits.pass_index == pass_index:
                block.target_visit = target_visit
                parked.append(block)
                continue
            points.park(block)
            asked, awaited = None, None if following is None else following[1]
            if awaited is not None and visits.pass_index >= 0:
                point = points.opened[awaited]
                if point.in_model:
                    asked, pass_index, target_visit, parked = (
                        following, visits.pass_index, block.target_visit, point.parked,
                    )  # fmt: skip

    def _answer(self, block: Block, pending: Pending, location: str, shared: SharedValue) -> Pending | None:
        """Handle a request for anything but a tensor, and run the block until it waits again. Returns its next request or None."""
        trace, worker = block.trace, block.worker
        assert worker is not None
        if pending[0] is not VALUE:
            error = None
            if pending[0] is Event.SKIP:
                self._skip(block, location, shared, pending[3])
            else:
                error = _swap(block, location, shared, pending[3])
            return self.switch(block, worker.switch if error is None else worker.throw, error)
        trace.receipt.reads += 1
        try:
            served = shared.served_to(trace)
        except MixedRowsError as error:
            named = MixedRowsError(f"request {trace.request_id}: `{location}`: {error}")
            return self.switch(block, worker.throw, named)
        parts = leaves(served)
        version, dropped = versions_of(parts), self._runner.points.unread.get(location)
        dropped_version = versions_of(parts[dropped[0] : dropped[0] + 1]) if dropped is not None else 0
        following = self.switch(block, worker.switch, served)
        if dropped is not None and versions_of(parts[dropped[0] : dropped[0] + 1]) != dropped_version:
            trace.fail(unread_error(block.trace.request_id, location, dropped))
        if not same_objects(leaves(served), parts):
            _put_back(block, location, shared, served)
        elif versions_of(parts) != version:
            shared.count_edit(trace)
            if shared.masks is not None and shared.masks.edited():
                trace.fail(EditError(f"request {trace.request_id}: edit of `{location}`: {READ_ONLY}"))
        return following

    def _skip(self, block: Block, location: str, shared: SharedValue, replacement: Any) -> None:
        """Skip a module. It does not run if the request is the only one of the pass. In a shared batch, the request's rows are
        replaced.

        A module with an attention always runs. Otherwise later positions would attend to another request's values in the
        skipped slots of the KV cache.
        """
        trace, path = block.trace, location.removesuffix(".skip")
        trace.visits.skip(path)
        points = self._runner.points
        if (trace.rows is None or trace.rows.covers_pass) and not points.at(location).has_attention:
            shared.count_edit(trace)
            shared.value = replacement
        else:
            points.open(f"{path}.output").skips.append((block, replacement))


def _warn_of(block: Block, raised: BaseException) -> None:
    block.trace.warn(f"the block raised {plain_text(raised, repr)} while it was unwound")


def _swap(block: Block, location: str, shared: SharedValue, edited: Any) -> EditError | MixedRowsError | None:
    """Replace the request's rows. Returns the error of an edit that does not fit, or that the model would not read."""
    dropped = block.interleaver.points.unread.get(location)
    try:
        if dropped is not None and replaces(dropped[0], shared.served_to(block.trace), edited):
            return unread_error(block.trace.request_id, location, dropped)
        shared.replace(block.trace.rows, edited)
        shared.containers = {} if isinstance(edited, Tensor) else {block.trace: edited}
    except (EditError, MixedRowsError) as error:
        return type(error)(f"request {block.trace.request_id}: edit of `{location}`: {error}")
    shared.count_edit(block.trace)
    return None


def _put_back(block: Block, location: str, shared: SharedValue, served: Any) -> None:
    """Replace the request's rows after the block has put other values into the container that it was served."""
    error = _swap(block, location, shared, served)
    if error is not None:
        block.trace.fail(error)
