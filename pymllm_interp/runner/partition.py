"""How a step runs: one decision table, counted by reason.

| the step holds | it runs as |
|---|---|
| nothing | idle: no forward pass |
| no block that waits for a module of this pass | plain: `forward_fused`, no module is called |
| the same, in a decode pass that was captured | replay: `forward_fused`, as a CUDA graph |
| a block that waits for a module of this pass | modules: `forward`, module by module |
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


class BatchExecutionDescriptor(NamedTuple):
    """How a batch runs, and the shape that it is padded to."""

    execution: Execution
    num_tokens: int
    num_reqs: int
    reason: str


@dataclass
class Partition:
    """Decides, and counts what it decided."""

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
    ) -> BatchExecutionDescriptor:
        """Pick the row of the table.

        Args:
            hooked: requests with a block that waits for a module which this pass reaches.
            is_profile: a run that measures memory goes module by module, whose peak is the higher one.
            can_replay: the pass was captured at this size (or at one that it can be padded to).
        """
        if mode.is_idle() or num_tokens == 0:
            execution, reason = Execution.IDLE, "no tokens"
        elif is_profile:
            execution, reason = Execution.MODULES, "profile"
        elif hooked:
            execution, reason = Execution.MODULES, "a block waits for a module"
        elif can_replay:
            execution, reason = Execution.REPLAY, "nobody waits for a module, and the pass was captured"
        else:
            execution, reason = Execution.PLAIN, "nobody waits for a module"
        self.counts[execution.value, reason] += 1
        return BatchExecutionDescriptor(execution, num_tokens, num_reqs, reason)
