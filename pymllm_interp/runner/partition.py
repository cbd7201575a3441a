"""How a step runs: one decision table, counted by reason.

| the step holds | it runs as |
|---|---|
| nothing | idle: no forward pass |
| no block that waits for a module of this pass | plain: `forward_fused`, no module is called |
| the same, in a decode pass that was captured | replay: `forward_fused`, as a CUDA graph |
| a block that waits for a module of this pass | modules: `forward`, module by module |
| the same, in a decode pass beside others | split, where that is quicker: the others as above, the hooked by modules |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from ..core.forward_batch import ForwardMode


class Execution(Enum):
    """A way to run a step's forward pass."""

    IDLE = "idle"
    PLAIN = "plain"
    REPLAY = "replay"
    MODULES = "modules"
    SPLIT = "split"


class BatchExecutionDescriptor(NamedTuple):
    """How a batch runs, and the shape that it is padded to."""

    execution: Execution
    num_tokens: int
    num_reqs: int
    reason: str
    num_hooked: int = 0
    """Requests with a block that waits for a module which this pass reaches."""


@dataclass(frozen=True)
class DecodeCosts:
    """What decode passes took when they were measured at start-up, in milliseconds by batch size."""

    sizes: list[int]
    modules_ms: list[float]
    """Module by module, all rows."""
    split_ms: list[float]
    """So many rows replayed, and one more module by module."""

    def split_is_cheaper(self, plain: int, hooked: int) -> bool:
        """Whether `hooked` rows beside `plain` ones take less time in a pass of their own."""
        alone = self._modules(hooked) - self._modules(1)
        return float(np.interp(plain, self.sizes, self.split_ms)) + alone < self._modules(plain + hooked)

    def _modules(self, rows: int) -> float:
        return float(np.interp(rows, self.sizes, self.modules_ms))


@dataclass
class Partition:
    """Decides, and counts what it decided."""

    hook_execution: str = "auto"
    """ "split" and "eager" (the whole batch by modules) force a row of the table; "auto" takes the cheaper one."""
    costs: DecodeCosts | None = None
    """None: not measured, and splitting pays nothing."""
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
            execution, reason = self._decide_hooked(mode, num_reqs - hooked, hooked)
        elif can_replay:
            execution, reason = Execution.REPLAY, "nobody waits for a module, and the pass was captured"
        else:
            execution, reason = Execution.PLAIN, "nobody waits for a module"
        self.counts[execution.value, reason] += 1
        return BatchExecutionDescriptor(execution, num_tokens, num_reqs, reason, hooked)

    def _decide_hooked(self, mode: ForwardMode, plain: int, hooked: int) -> tuple[Execution, str]:
        waits = "a block waits for a module"
        if not mode.is_decode() or not plain:
            return Execution.MODULES, waits
        if self.hook_execution != "auto":
            forced = Execution.SPLIT if self.hook_execution == "split" else Execution.MODULES
            return forced, f"{waits}: hook_execution={self.hook_execution!r}"
        if self.costs is None:
            return Execution.MODULES, waits
        if self.costs.split_is_cheaper(plain, hooked):
            return Execution.SPLIT, f"{waits}: by itself is quicker than with the whole batch"
        return Execution.MODULES, f"{waits}: the whole batch is quicker than by itself"
