"""`HookedRequest`: a rank's state of a request with hooks."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ...core.step import DeclaredResult, RequestHooks
from ...hooks.captures.rows import CapturedRows
from ...hooks.declared import Declared
from ...hooks.monitors.request_monitors import RequestMonitors

MAX_STEPS_BEHIND = 8
"""Most steps that vLLM has scheduled behind a token when it learns that the token ends the generation."""


@dataclass
class HookedRequest:
    """A request with hooks, while vLLM knows it.

    Attributes:
        request_id: id of this package.
        row: row of the tables, while it has one.
        declared: None once its results were asked for.
        met: rows that the op met of it, over all taps; on CUDA the tables' count comes on top.
        scheduled: token rows of its steps.
        computed: positions that steps have computed, before a preemption, too.
        steps: number of steps by execution.
    """

    request_id: str
    hooks: RequestHooks
    prompt_len: int
    row: int | None = None
    declared: Declared | None = None
    met: int = 0
    scheduled: int = 0
    computed: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    last_steps: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=MAX_STEPS_BEHIND))
    """Execution and first position of each of its last steps."""
    sites: frozenset[int] = frozenset()
    """Sites with an op or a capture. All ranks have the same ones, also after rank 0 has sent the results."""
    acting: RequestMonitors | None = None
    """Its monitors, if ops wait for one to fire: each rank decides for itself, by equal scores."""
    num_scores: int = 0
    """Dot products of its monitors for each row. All ranks have the same number."""
    cuts: bool = False
    """Cut edges of attention, or captured patterns: its passes are by modules."""
    links_sites: bool = False
    """An op depends on the state at another site: by a gate, an SAE, or a monitor."""
    failed: str = ""
    """Reason that a pass was without its cut edges, or ""."""
    preemptions: int = 0
    forgotten: bool = False
    """vLLM has removed it."""

    @property
    def captures(self) -> CapturedRows | None:
        """Captured rows of the ring, or None."""
        return None if self.declared is None else self.declared.captures

    @property
    def reads_all_logits(self) -> bool:
        """Whether logits of all its positions are computed for its captures."""
        return self.hooks.logits_from == 0 and bool(self.hooks.captures)

    def forget_steps_behind(self, num_output_tokens: int) -> None:
        """Take the steps behind the token that ended the generation out of `steps`: vLLM runs ahead of its tokens."""
        behind = self.prompt_len + max(num_output_tokens, 1) - 1
        self.steps -= Counter(mode for mode, first in self.last_steps if first >= behind)

    def bind(self, declared: Declared) -> None:
        """Begin with these ops and captures."""
        self.declared = declared
        captured = () if declared.captures is None else declared.captures.layout.by_site
        self.sites = frozenset((*declared.hooks.ops, *captured))
        self.cuts, self.num_scores = declared.hooks.cuts_edges, declared.hooks.num_scores
        monitors = declared.hooks.monitors
        self.links_sites = any(op.flag is not None or op.read is not None for op in declared.hooks)
        if any(bound.flag is not None for bound in monitors):
            self.acting = RequestMonitors(monitors, self.request_id, self.prompt_len)


@dataclass
class RankResult:
    """Outcome of an ended request on rank 0.

    Attributes:
        error: reason that it is invalid, or None.
    """

    declared: DeclaredResult
    steps: Counter[str]
    preemptions: int = 0
    error: str | None = None
