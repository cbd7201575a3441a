"""`replay`: runs a lowered block after its request, on its caller's thread, over what the request captured.

The block's own code runs. Where it reads a module, it waits as it does in a forward pass, and gets the captured rows of the
step that it waits for. So loops over steps, the order of reads and names are those of a block that runs in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from greenlet import GreenletExit

from ...captures.activations import Activations
from ...positions import selected, windows_of
from ..blocks.errors import LoopEnd
from ..blocks.trace import RequestTrace
from ..nnsight_compat import Mediator, OutOfOrderError, Pending, save_scope
from ..serving.lifecycle import TOO_LATE
from .plan import Plan, Point, Points

_NO_KEY = -1, -2


class Replay:
    """The passes of one request, as its block sees them.

    Args:
        trace: of the block.
        plan: what the block reads.
        points: locations that are sites.
        states: what the request captured.
        token_ids: of the prompt and of the generation.
        prompt_len: positions of the prompt.
        device: where values are computed; None leaves them on the CPU.

    Attributes:
        counts: nnsight asks for these when a block starts.
        passes: of the request.
    """

    event_count = pass_index = -3

    def __init__(
        self,
        trace: RequestTrace,
        plan: Plan,
        points: Points,
        states: Activations,
        token_ids: Sequence[int],
        prompt_len: int,
        device: torch.device | None,
    ) -> None:
        self._trace, self._plan, self._points, self._states = trace, plan, points, states
        self._token_ids, self._prompt_len, self._device = token_ids, prompt_len, device
        self._step, self._order = 0, -1
        self._served: tuple[str, Any] = "", None
        self.counts: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.points = self.visits = self
        self.passes = 1 if trace.single else len(token_ids) - prompt_len

    # -- what a waiting block asks ---------------------------------------------------------------

    def at(self, location: str) -> str:
        """`Points.at`."""
        return location

    def occurrence(self, *asked: Any) -> int:
        """`VisitCounts.occurrence` of a location, or `Points.occurrence` of a trace and a location."""
        location = asked[1] if isinstance(asked[0], RequestTrace) else asked[0]
        point = self._points.get(location)
        if point is None or location == "result":
            return 0
        return self._step + (point.order < self._order)

    def key(self, *_: Any) -> tuple[int, int]:
        """`VisitCounts.key`: none is equal."""
        return _NO_KEY

    # -- the block -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the block to its end. What it raises ends its trace."""
        trace, block = self._trace, self._trace.main_block
        assert block is not None
        scope = save_scope.__dict__
        depth, saves = scope.get("depth", 0), scope.get("saves")
        scope["depth"], scope["saves"] = block.depth, trace.saves.ids
        trace.visits = self  # pyright: ignore[reportAttributeAccessIssue]
        trace.max_passes = max(trace.max_passes, self.passes)
        try:
            with torch.no_grad():
                resume: Any = partial(Mediator.start, block, self)  # pyright: ignore[reportArgumentType]
                resume()
                pending = block.pending
                while pending is not None:
                    worker: Any = block.worker
                    try:
                        value = self._answer(pending)
                    except (LoopEnd, OutOfOrderError) as error:
                        pending = worker.throw(error)
                    else:
                        trace.receipt.reads += 1
                        if block.iteration:
                            block.iteration = None
                        block.last_location = pending.provider
                        pending = worker.switch(value)
        except Exception as raised:
            trace.fail(raised)
        finally:
            block.pending = None
            if block.alive:  # it waits for what never comes
                cast(Any, block.worker).throw(GreenletExit())
            scope["depth"], scope["saves"] = depth, saves

    def _answer(self, pending: Pending) -> Any:
        """The value that the block waits for."""
        location, step = pending.provider, pending.iteration
        block, trace = self._trace.main_block, self._trace
        assert location is not None and step is not None and block is not None
        point = self._points.get(location)
        if location == "result" and step == 0:
            self._order, self._step = 0, self.passes
            trace.over = True
            return self._result()
        if point is None or step >= self.passes or (step, point.order) < (self._step, self._order):
            trace.over = True
            if block.iteration != 0:
                raise LoopEnd(f"'{pending}' was never reached: the generation was over")
            before = f": the block was at `{block.last_location}` before" if block.last_location else ""
            raise OutOfOrderError(f"request {trace.request_id}: {TOO_LATE.format(location, before)}")
        if (step, point.order) != (self._step, self._order):
            self._step, self._order = step, point.order
            self._served = location, self._value(location, point, step)
        return self._served[1]

    def _value(self, location: str, point: Point, step: int) -> Any:
        if not point.site:
            return torch.tensor([[self._token_ids[self._prompt_len + step]]], device=self._device)
        rows = self._rows(point.site, step)
        if not point.end:  # the step's logits
            return rows[0, -1:]
        if point.end == "input":
            return (rows,), {}
        return (rows, None) if point.in_tuple else rows

    def _rows(self, site: str, step: int) -> torch.Tensor:
        """[1, tokens, width]: what the pass of this step computed."""
        need, states, n = self._plan.needs[site], self._states.as_arrived(site), self._prompt_len
        windows = windows_of(need.positions, n)
        if step:
            before = sum(window.among(0, n + step - 1) for window in windows)
            found = states[before : before + 1]
        else:
            of_prompt = sum(window.among(0, n) for window in windows)
            found = states[:of_prompt]
            if site == "logits" and not self._trace.single:
                found = found[-1:]
            elif of_prompt < n:
                filled = found.new_empty(n, *found.shape[1:])
                filled[torch.from_numpy(selected(windows, n))] = found
                found = filled
        found = found.reshape(1, len(found), -1)
        return found.clone() if self._device is None else found.to(self._device, copy=True)

    def _result(self) -> Any:
        """What ``tracer.result`` is."""
        if not self._trace.single:
            return torch.tensor([list(self._token_ids)])
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(logits=self._rows("logits", 0))  # pyright: ignore[reportArgumentType]
