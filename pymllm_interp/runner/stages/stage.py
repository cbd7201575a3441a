"""`Stage`: serves the hooks of a runner's requests, beside its passes. A `ModelRunner` without stages serves plain requests.

The runner calls its stages in their order, at fixed points of a step::

    execute_model    begin         the step's requests are in the request table; the stage states its demands on the pass
                     prepare       the pass is laid out, and not run yet
                     enter_pass    only where the pass calls modules
                     ran           the pass has its logits
    sample_tokens    sample_from   the logits that tokens are sampled from
                     sampled       the tokens
                     scores        what monitors read
                     end           the step was launched
    a failed step    abandon       in place of all that would follow
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...core.forward_batch import ForwardBatch, PartQuery
from ...core.step import LogitsProcessorOutput, ModelRunnerOutput, SchedulerOutput
from ..input_batch import InputBatch, InputBuffers
from ..request_state import RequestState


class StepScores(NamedTuple):
    """Dot products of the monitors in a step."""

    values: torch.Tensor
    """[slots, tokens] float32, on the device."""
    parts: list[tuple[str, int, int]]
    """(request id, first column, stop) of each request with monitors."""
    limits: np.ndarray
    """[slots, tokens] float32: monitors decide where a dot product is above."""


@dataclass(slots=True)
class PassDemands:
    """Demands of the stages on a step's pass, beside its `ForwardBatch`."""

    num_hooked: int = 0
    """Requests with a block that waits for a module of the pass."""
    modules_for: str = ""
    """Reason that the pass runs module by module, wherever blocks wait, or ""."""
    unpadded: bool = False
    """The pass has rows of requests only."""
    keeps_logits: bool = False
    """Its logits are read after the next pass has begun."""
    query: PartQuery | None = None
    """Serves blocks in parts of the model that run before the pass; None: no request has a trace."""
    grouped: bool = False
    """The rows of a request are one group of the batch, in steps with drafts, too."""


class Stage(Protocol):
    """A part of a runner beside its passes, such as `TracedStage` and `DeclaredStage`. Each method may do nothing."""

    monitored: Collection[str] = ()
    """Ids of the live requests with monitors."""

    @property
    def wants_plain_graphs(self) -> bool:
        """Whether its part of captured passes takes so long that passes without hooks have separate graphs."""
        return False

    def init_tables(self, states: RequestState, buffers: InputBuffers) -> None:
        """Allocate its memory for each row of the request table, or of the input buffers."""

    def captured_site_ops(self, rows: int) -> Any:
        """`ForwardBatch.site_ops` of a pass that is captured for the first `rows` of the input buffers; None without."""
        return None

    def close(self) -> None:
        """Release all memory. A second call does nothing."""

    # -- a step ----------------------------------------------------------------------

    def begin(self, step: SchedulerOutput, demands: PassDemands) -> None:
        """Take over the hooks of requests that enter. May reorder `step.scheduled`. Steps without tokens come here, too."""

    def prepare(self, batch: ForwardBatch, rows: InputBatch) -> None:
        """Add its hooks to the pass."""

    def enter_pass(self, batch: ForwardBatch, first: int) -> None:
        """The pass calls modules from here on.

        Args:
            batch: running batch: the step's batch, padded, or in part.
            first: index of its first request among the step's.
        """

    def ran(self, batch: ForwardBatch, output: LogitsProcessorOutput) -> None:
        """The pass has run: `output.next_token_logits` [logit rows, vocab]."""

    def sample_from(self, rows: InputBatch, all_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits [sampling requests, vocab] that tokens are sampled from.

        Args:
            all_logits: [logit rows, vocab] of the pass.
            logits: [sampling requests, vocab] as the stages before left them.
        """
        return logits

    def sampled(self, rows: InputBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """The tokens [sampling requests] int32 with which generation continues."""
        return token_ids

    def scores(self, rows: InputBatch) -> StepScores | None:
        """The dot products of monitors in the step, to be copied to the host with its tokens; None without monitors."""
        return None

    def end(self, output: ModelRunnerOutput) -> None:
        """The step was launched. `output` lacks tokens and log probabilities, which may still be on their way."""

    def abandon(self) -> None:
        """Forget the state of a failed step."""
