"""`replay`: runs a lowered block after its request, on its caller's thread, over the captured states.

The block's own code runs. At a module it waits as it does in a forward pass, and gets the captured rows of that
step. So loops over steps, the order of reads and names are the same as in the pass.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, cast

import torch
from greenlet import GreenletExit, getcurrent

from ....core.families import LOGITS
from ...captures.activations import Activations
from ..blocks.errors import LoopEnd, too_late
from ..blocks.trace import Block, RequestTrace
from ..nnsight_compat import Mediator, OutOfOrderError, Pending, save_scope
from ..serving.visits import VisitCounts
from .ahead import RowsAhead
from .plan import LAST, BlockPlan, Points, Row, SiteLocation, StepLoop, same_state
from .site_rows import SiteRows
from .step_loop import lists_of, part_of, taken_rows

_NO_KEY = -1, -2
FEWEST_STEPS = 2
"""Steps that are worth taking at once."""


class Replay:
    """The passes of one request, as its block sees them.

    Args:
        trace: trace of the block.
        plan: plan of the block's reads and edits.
        points: locations that are sites.
        states: captured states of the request.
        token_ids: tokens of the prompt and of the generation.
        prompt_len: positions of the prompt.
        device: device that computes the values; None: the CPU.
        ahead: tensors that exist already for the rows of its loop.

    Attributes:
        block: block of the trace.
        counts: nnsight asks for these when a block starts.
        passes: number of passes of the request.
        shares: other blocks run beside it, and fill the same lists.
    """

    shares = False

    event_count = pass_index = -3

    def __init__(
        self,
        trace: RequestTrace,
        plan: BlockPlan,
        points: Points,
        states: Activations,
        token_ids: Sequence[int],
        prompt_len: int,
        device: torch.device | None,
        ahead: RowsAhead | None = None,
    ) -> None:
        self.trace, self.plan, self._points, self._states, self._ahead = trace, plan, points, states, ahead
        assert trace.main_block is not None
        self.block = trace.main_block
        self._token_ids, self._prompt_len, self._device = token_ids, prompt_len, device
        self._step, self._order = 0, -1
        self._served: Any = None
        self._taken: Future[list[list[torch.Tensor]] | None] | None = None
        self._has_taken = False
        self._last: tuple[str, int, torch.Tensor] | None = None
        self._rows_of: dict[str, SiteRows] = {}
        self.counts: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.points = self.visits = self
        self.passes = 1 if trace.single else len(token_ids) - prompt_len

    # -- calls of a waiting block ----------------------------------------------------------------

    def at(self, location: str) -> str:
        """The location itself (`Points.at`)."""
        return location

    def occurrence(self, *asked: Any) -> int:
        """`VisitCounts.occurrence` of a location, or `Points.occurrence` of a trace and a location."""
        location = asked[1] if isinstance(asked[0], RequestTrace) else asked[0]
        point = self._points.get(location)
        if point is None or location == "result":
            return 0
        return self._step + (point.order < self._order)

    def pass_of(self, _: RequestTrace) -> int:
        """Number of the replayed pass (`Points.pass_of`)."""
        return self._step

    def has_passed(self, block: Block, location: str) -> bool:
        """Whether the replay is past a location (`Points.has_passed`)."""
        point = self._points.get(location)
        if point is None or location == "result":
            return False
        return (self._step, self._order) > (block.pinned_pass, point.order)

    def key(self, *_: Any) -> tuple[int, int]:
        """Key that equals no other (`VisitCounts.key`)."""
        return _NO_KEY

    # -- the block -------------------------------------------------------------------------------

    @property
    def waits_for(self) -> tuple[int, int] | None:
        """(step, rank of the location) that the block waits for; None once it has ended."""
        pending = self.block.pending
        if pending is None:
            return None
        point = self._points.get(pending.provider or "")
        return (
            (self.passes, 0) if point is None or pending.provider == "result" else (pending.iteration or 0, point.order)
        )

    def start(self) -> None:
        """Run the block to its first read."""
        trace = self.trace
        trace.visits = self  # pyright: ignore[reportAttributeAccessIssue]
        if self.plan.code is not None:
            self.block.code = self.plan.code
        if self.plan.loop is not None:
            self.block.take_steps = self._take_steps
        trace.max_passes = max(trace.max_passes, self.passes)
        self._run(lambda: Mediator.start(self.block, self) or self.block.pending, once=True)  # pyright: ignore[reportArgumentType]

    def advance(self, once: bool = True) -> None:
        """Serve the read that the block waits for, and run it to the next one; without `once`, to its end."""
        self._run(self._answered, once)

    def _answered(self) -> Pending | None:
        """Serve one read. Returns the block's next request."""
        block, worker, pending = self.block, cast(Any, self.block.worker), self.block.pending
        assert pending is not None
        block.pending = None
        try:
            value = self._answer(pending)
        except (LoopEnd, OutOfOrderError) as error:
            return worker.throw(error)
        self.trace.receipt.reads += 1
        if block.iteration:  # the rest of the step follows in sequence
            block.iteration, block.pinned_pass = None, self._step
        block.last_location = pending[1] or ""
        return worker.switch(value)

    def _run(self, resume: Callable[[], Pending | None], once: bool) -> None:
        """Run the block with its own scope of saves, as the engine does. An error ends its trace."""
        block, trace, scope = self.block, self.trace, save_scope.__dict__
        depth, saves = scope.get("depth", 0), scope.get("saves")
        scope["depth"], scope["saves"] = block.depth, trace.saves.ids
        if block.worker is not None:
            block.worker.parent = getcurrent()
        try:
            with torch.no_grad():
                block.pending = resume()
                while not once and block.pending is not None:
                    block.pending = resume()
        except Exception as raised:
            block.pending = None
            trace.fail(raised)
        finally:
            scope["depth"], scope["saves"] = depth, saves

    def close(self) -> None:
        """Unwind the block, if it still waits."""
        block = self.block
        if block.alive:
            cast(Any, block.worker).throw(GreenletExit())
        block.pending = None
        self.trace.visits = VisitCounts()
        vars(self).clear()  # the block holds the replay

    def _answer(self, pending: Pending) -> Any:
        """The value that the block waits for."""
        location, step = pending.provider, pending.iteration
        block, trace = self.block, self.trace
        assert location is not None and step is not None
        point = self._points.get(location)
        if location == "result" and step == 0:
            self._order, self._step = 0, self.passes
            trace.over = True
            return self._result()
        if point is None or step >= self.passes or (step, point.order) < (self._step, self._order):
            trace.over = True
            if block.iteration != 0:
                raise LoopEnd(f"'{pending}' was never reached: the generation was over")
            raise OutOfOrderError(too_late(trace.request_id, location, block.last_location))
        if (step, point.order) != (self._step, self._order):
            self._step, self._order = step, point.order
            self._served = self._value(point, step)
        return self._served

    def _value(self, point: SiteLocation, step: int) -> Any:
        needs, site = self.plan.needs, point.site
        if site and site not in needs and same_state(site) in needs:
            site = same_state(site)
        if site and site not in needs:
            if all(edit.site != site for edit in self.plan.edits):
                raise LookupError(f"{site} was not captured: an object from outside changed while the request ran")
            return None if point.end == "output" else ((None,), {})  # the pass has made the edit
        if not site:
            return torch.tensor([[self._token_ids[self._prompt_len + step]]], device=self._device)
        rows = self._rows(site, step)
        if not point.end:  # the step's logits
            return rows[0, -1:]
        if point.end == "input":
            return (rows,), {}
        return (rows, None) if point.in_tuple else rows

    def _rows(self, site: str, step: int) -> torch.Tensor:
        """[1, tokens, width]: value from this step's pass. All its names give one tensor."""
        if self._last is None or self._last[:2] != (site, step):
            whole = self.plan.needs[site].whole
            self._last = site, step, self._site_rows(site).of_step(step, self._has_taken, whole)
        return self._last[2]

    def _site_rows(self, site: str) -> SiteRows:
        rows = self._rows_of.get(site)
        if rows is None:
            last_only = site == LOGITS and not self.trace.single
            places = self.plan.places(site, self._prompt_len)
            rows = self._rows_of[site] = SiteRows(self._states.as_arrived(site), places, last_only, self._device)
        return rows

    # -- steps that only append ---------------------------------------------------------------------

    def prepare(self, pool: Executor) -> None:
        """Start reading the steps of the block's loop."""
        if self.plan.loop is not None:
            self._taken = pool.submit(self._loop_values)

    def _loop_values(self) -> list[list[torch.Tensor]] | None:
        """Values that the loop reads, by step; None if the loop has to run."""
        loop = self.plan.loop
        assert loop is not None
        stop = self._loop_stop(loop)
        if stop - loop.start < FEWEST_STEPS:
            return None
        try:
            for row in loop.unkept:  # an index may be out of range
                part_of(self._site_rows(row.site).among(loop.start, stop, row.is_last), row)
            rows = [self._site_rows(row.site).among(loop.start, stop, row.is_last) for row in loop.rows]
            parts = [part_of(steps, row) for steps, row in zip(rows, loop.rows, strict=True)]
            return taken_rows(parts, loop) if self._ahead is None else taken_rows(parts, loop, self._ahead.take)
        except LookupError:  # which the block raises at its line
            return None

    def _loop_stop(self, loop: StepLoop) -> int:
        """The last step of the loop. It runs: it binds the loop's names, and ends the loop."""
        return (self.passes if loop.stop is None else min(loop.stop, self.passes)) - 1

    def _take_steps(self, start: int, stop: int | None) -> int:
        """Take all steps of the block's loop at once, except for the last one. Returns the step from which the loop runs."""
        loop, saves = self.plan.loop, self.trace.saves
        if loop is None or (start, stop) != (loop.start, loop.stop):
            return start
        values = self._loop_values() if self._taken is None else self._taken.result()
        lists = lists_of(loop, self.block.lcls)
        shared = {id(value) for value in saves.outer.values()} if self.shares else set()
        if values is None or lists is None or not shared.isdisjoint(map(id, lists)):
            return start
        columns: dict[int, tuple[list[Any], list[list[torch.Tensor]]]] = {}
        for into, (_, place) in zip(lists, loop.appends, strict=True):
            columns.setdefault(id(into), (into, []))[1].append(values[place])
        for into, appended in columns.values():
            began_empty = not into
            into += itertools.chain.from_iterable(zip(*appended, strict=True))
            if began_empty and self._device is None:
                saves.settle(into)
        for row, taken in zip(loop.rows, values, strict=True):
            if row.saved:
                for value in taken:
                    saves.ids.add(id(value))
        self._has_taken, end = True, self._loop_stop(loop)
        self.trace.receipt.reads += loop.reads * (end - start)
        return end

    def first_part(self, row: Row) -> torch.Tensor:
        """Part of a site that the block reads in its first step, with separate storage.
        Raises LookupError: the index is out of range, or its rows were not captured."""
        part = part_of(self._site_rows(row.site).among(0, 1, row.is_last), row).prompt
        assert part is not None, "step 0 has the prompt"
        return part.clone(memory_format=torch.contiguous_format)

    def last_row(self, row: Row) -> torch.Tensor | None:
        """[1, ...] captured at the prompt's last position, if the block reads just that. Raises LookupError without rows."""
        if row.indexes != (0, LAST) or row.methods or self._device is not None:
            return None
        rows = self._states.as_arrived(row.site)
        return rows if self.plan.needs[row.site].positions == (LAST,) and len(rows) == 1 else None

    def _result(self) -> Any:
        """Value of ``tracer.result``."""
        if not self.trace.single:
            return torch.tensor([list(self._token_ids)])
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(logits=self._rows("logits", 0))  # pyright: ignore[reportArgumentType]


def replay(replays: Sequence[Replay]) -> None:
    """Run the blocks of several requests in the order in which one forward pass runs them.

    Values that they append to one list have that order.
    """
    waiting: list[tuple[tuple[int, int], int, int]] = []
    arrivals = itertools.count()  # at one place, blocks are served in the order in which they came
    try:
        if len(replays) == 1:
            replays[0].start()
            if replays[0].waits_for is not None:
                replays[0].advance(once=False)
            return
        for index, one in enumerate(replays):
            one.shares = True
            one.start()
            if (place := one.waits_for) is not None:
                heapq.heappush(waiting, (place, next(arrivals), index))
        while waiting:
            before, _, index = heapq.heappop(waiting)
            replays[index].advance()
            while replays[index].waits_for == before:  # a pass serves a block there until it waits elsewhere
                replays[index].advance()
            if (place := replays[index].waits_for) is not None:
                heapq.heappush(waiting, (place, next(arrivals), index))
    finally:
        for one in replays:
            one.close()


def append_rows(replays: Sequence[Replay]) -> bool:
    """Append the rows of blocks that do only that to lists of their ``with``. No block runs.

    The order is that of a forward pass: place after place, and at a place request after request.

    Returns:
        False, and nothing is appended, if a block has to run: they do more, or raise.
    """
    loop = replays[0].plan.appends if len(replays) > 1 else None
    if loop is None or len({row.site for row in loop.rows}) < len(loop.appends):
        return False
    if any(one.plan is not replays[0].plan or not one.trace.saves.outer for one in replays):
        return False
    lists = [own for one in replays if (own := lists_of(loop, one.block.lcls)) is not None]
    if len(lists) < len(replays):
        return False
    try:
        values = [_first_parts(replays, row) for row in loop.rows]
    except LookupError:  # which a block raises at its line
        return False
    empty = [into for into in {id(into): into for own in lists for into in own}.values() if not into]
    for number, (_, place) in enumerate(loop.appends):
        for own, value in zip(lists, values[place], strict=True):
            own[number].append(value)
    for into in empty:  # all of their items are rows with separate storage
        replays[0].trace.saves.settle(into)
    for one in replays:
        one.trace.max_passes = max(one.trace.max_passes, one.passes)
        one.trace.receipt.reads += loop.reads
    return True


def _first_parts(replays: Sequence[Replay], row: Row) -> Sequence[torch.Tensor]:
    """`Replay.first_part` of each. Raises LookupError as that does."""
    last = [own for one in replays if (own := one.last_row(row)) is not None]
    if len(last) < len(replays):
        return [one.first_part(row) for one in replays]
    # Two calls of torch for all of them.
    return torch.unbind_copy(torch.cat(last).flatten(1))  # pyright: ignore[reportReturnType]
