"""Execution of a step: one decision table, counted by reason.

| the step holds | it runs as |
|---|---|
| nothing | idle: no forward pass |
| no block that waits for a module of this pass | plain: `forward_fused`, no module is called |
| the same, in a decode pass that was captured | replay: `forward_fused`, as a CUDA graph |
| the same, in a decode pass that is to be captured | plain: `forward_fused` on the padded rows of that graph |
| the same, in a prefill or mixed pass that was captured | replay: `forward_fused`, as CUDA graphs between its attention layers |
| a block that waits for a module of this pass | modules: `forward`, module by module |
| the same, in a decode pass that was captured | segments: `forward`, with CUDA graphs between the blocks |
| the same, in a prefill or mixed pass that was captured | segments: the same, with attention between two graphs |
| a request that asks for transformers' own attention, or for hidden states | modules |
| a request with cut edges of attention | segments where the pass was captured, else plain |
| a block that waits, with ``hook_execution="split"`` | split: plain requests as above, hooked requests module by module |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ..core.forward_batch import ForwardMode


class Execution(Enum):
    """A way to run a step's forward pass."""

    IDLE = "idle"
    PLAIN = "plain"
    REPLAY = "replay"
    MODULES = "modules"
    SEGMENTS = "segments"
    SPLIT = "split"


class BatchExecutionDescriptor(NamedTuple):
    """Execution of a batch, and its shape."""

    execution: Execution
    num_tokens: int
    num_reqs: int
    reason: str
    num_hooked: int = 0
    """Requests with a block that waits for a module of this pass."""


@dataclass
class Partition:
    """Decides how steps run, and counts the decisions."""

    hook_execution: str = "auto"
    """ "auto", "segments", "split" or "eager": see `ServerConfig.hook_execution`."""
    can_split: bool = True
    """Plain requests can run without a call of the modules that blocks wait for (`CausalLM.fuses_ops`)."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(execution, reason) -> steps."""

    def decide(
        self,
        mode: ForwardMode,
        num_tokens: int,
        num_reqs: int,
        hooked: int,
        is_profile: bool = False,
        can_replay: bool = False,
        modules_for: str = "",
        cuts: bool = False,
        missing: bool = False,
    ) -> BatchExecutionDescriptor:
        """Pick the row of the table.

        Args:
            hooked: requests with a block that waits for a module of this pass.
            is_profile: a run that measures memory. It runs module by module, which has the higher peak.
            can_replay: the pass was captured at its padded size, or its graph segments can be.
            modules_for: reason that the pass runs module by module, wherever blocks wait, or "".
            cuts: requests cut edges of attention, so no graph serves the whole pass.
            missing: graphs are still to be captured.
        """
        if mode.is_idle() or num_tokens == 0:
            execution, reason = Execution.IDLE, "no tokens"
        elif is_profile:
            execution, reason = Execution.MODULES, "profile"
        elif modules_for:
            execution, reason = Execution.MODULES, modules_for
        elif hooked:
            execution, reason = self._decide_hooked(mode, num_reqs - hooked, can_replay)
        elif cuts:
            in_segments = can_replay and self.hook_execution != "eager"
            execution, reason = Execution.SEGMENTS if in_segments else Execution.PLAIN, "edges of attention are cut"
        elif can_replay:
            execution, reason = Execution.REPLAY, "nobody waits for a module, and the pass was captured"
        else:
            execution, reason = Execution.PLAIN, "nobody waits for a module"
            if missing:
                reason += ", and not all passes are captured yet"
        self.counts[execution.value, reason] += 1
        return BatchExecutionDescriptor(execution, num_tokens, num_reqs, reason, hooked)

    def _decide_hooked(self, mode: ForwardMode, plain: int, can_replay: bool) -> tuple[Execution, str]:
        waits = "a block waits for a module"
        if mode.is_decode() and plain and self.hook_execution == "split":
            if self.can_split:
                return Execution.SPLIT, f"{waits}: hook_execution='split'"
            return Execution.MODULES, f"{waits}, and every pass of this model calls modules"
        if mode.is_decode() and self.hook_execution == "eager":
            return Execution.MODULES, f"{waits}: hook_execution='eager'"
        if can_replay and self.hook_execution in ("auto", "segments"):
            return Execution.SEGMENTS, f"{waits}, and the pass was captured"
        return Execution.MODULES, waits
