"""`RankScores`: dot products of monitors, for the client, and for ops that wait for monitors to fire."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ....hooks.monitors.request_monitors import RequestMonitors
from ....runner.async_output import copy_to_host
from ...results import SentScores
from ..batch import VllmStep
from ..hooked_request import HookedRequest
from ..rank_taps import TappedStage


class RankScores:
    """The scores of a rank's steps.

    A pipeline rank has scores at the sites of its layers, and zeros elsewhere.
    All stages add them up, behind each pass with monitors.

    Args:
        stage: declared ops of the rank.

    Attributes:
        add_up: adds a tensor on the host up over the pipeline stages, in place; None with one stage.
        tell: sends scores to the client, on the first rank.
    """

    add_up: Callable[[torch.Tensor], None] | None = None
    tell: Callable[[SentScores], None] | None = None

    def __init__(self, stage: TappedStage) -> None:
        self._stage = stage
        self._shape: tuple[int, int] | None = None
        self._own: tuple[VllmStep, torch.Tensor, list[tuple[str, int, int]]] | None = None

    def begin(self, requests: Iterable[HookedRequest], num_tokens: int) -> None:
        """A step begins. All stages know the same requests, also when one of them has sent a result."""
        slots = max((one.num_scores for one in requests), default=0)
        self._own, self._shape = None, (slots, num_tokens) if slots and self.add_up is not None else None

    def take(self, step: VllmStep) -> None:
        """Send a step's scores to the client. If ops wait for a monitor to fire, wait for them: it may be before the next step."""
        acts = any(one.acting is not None and one.acting.may_act for _, one in step.batch.hooked)
        joins = self.add_up is not None
        if (joins and self._shape is None) or not (joins or acts or self.tell is not None):
            return
        found = self._stage.scores(step)
        if found is None:
            return
        if joins:
            self._own = step, found.values.cpu(), found.parts
        else:
            self._use(step, found.values, found.parts)

    def join(self, step: VllmStep | None) -> None:
        """Add a pass's scores up over all stages, which wait for each other.

        Args:
            step: the step, if its tokens are yet to be sampled.
        """
        if self._shape is None or self.add_up is None:
            return
        if step is not None and step.batch.monitored:
            self.take(step)
        whole, own = torch.zeros(self._shape), self._own
        self._stage.clear_scores(*self._shape)
        if own is not None:
            whole[: len(own[1]), : own[1].shape[1]] = own[1]
        self.add_up(whole)
        self._own, self._shape = None, None
        if own is not None:
            self._use(own[0], whole, own[2])

    def _use(self, step: VllmStep, values: torch.Tensor, parts: list[tuple[str, int, int]]) -> None:
        first = {entry.request_id: entry.start for entry in step.entries}
        if self.tell is not None:
            (copy,), copied = copy_to_host([values])
            self.tell(SentScores([(name, first[name], start, stop) for name, start, stop in parts], copy, copied))
        acting: dict[str, RequestMonitors] = {
            one.request_id: one.acting for _, one in step.batch.hooked if one.acting is not None and one.acting.may_act
        }
        if acting:
            dots = values.cpu().numpy()
            for name, start, stop in parts:
                if (monitors := acting.get(name)) is not None:
                    monitors.take(first[name], dots[:, start:stop])
                    self._stage.note_fired(name, monitors.take_acted())
