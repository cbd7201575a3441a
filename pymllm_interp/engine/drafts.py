"""`Drafts`: the drafts of an engine's requests, from its drafter to their counts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from ..core.request import Request
from ..core.request_drafts import RequestDrafts
from ..core.step import ScheduledRequest, SchedulerOutput
from ..hooks.captures.egress.admission import RingAdmission
from ..runner.interp_model_runner import InterpModelRunner
from ..speculative.drafter import Drafter, DrafterError, SpeculativeConfig
from ..utils.arguments import PromptError
from .kv_manager import KVManager

logger = logging.getLogger(__name__)


class Drafts:
    """Asks the drafter for drafts of decoding requests, adds them to steps, and counts accepted ones.

    A request is drafted for if its hooks allow it (`why_undrafted`). This is decided when it is added.

    Args:
        drafter: proposes them.
        k: most drafts of a request in a step.
        vocab_size: drafts are below it.
    """

    def __init__(self, drafter: Drafter, k: int, vocab_size: int) -> None:
        self._drafter, self._k, self._vocab_size = drafter, k, vocab_size
        self._counts: Counter[str] = Counter(dict.fromkeys(("steps", "drafted", "accepted", "pauses"), 0))
        self._undrafted: Counter[str] = Counter()
        self._warned = False

    @classmethod
    def of(cls, runner: InterpModelRunner) -> Drafts | None:
        """The drafts of an engine over this runner; None without a drafter.
        Raises ValueError: the passes have too few rows for the drafts of a model."""
        config = SpeculativeConfig.of(runner.server_config.speculative)
        if config is None:
            return None
        k, rows = config.num_speculative_tokens, runner.max_num_tokens
        if runner.graphs.prefill is not None:
            rows = min(rows, runner.graphs.prefill.sizes[-1])
        if config.model and k >= rows:
            raise ValueError(
                f"speculative: num_speculative_tokens={k} takes {k + 1} rows of a step, which has {rows}: lower it, or raise "
                f"max_num_tokens (now {runner.max_num_tokens}) and prefill_graph_tokens "
                f"(now {runner.server_config.prefill_graph_tokens})"
            )
        return cls(runner.drafter or config.make(), k, runner.vocab_size)

    @property
    def name(self) -> str:
        """Names the drafter in messages."""
        return type(self._drafter).__name__

    def add(self, request: Request) -> None:
        """A request arrived: decide whether it is drafted for."""
        if not request.generates:
            return
        if why := why_undrafted(request):
            self._undrafted[why] += 1
        else:
            request.drafts = RequestDrafts()

    # -- a step ------------------------------------------------------------------------

    def extend(
        self,
        step: SchedulerOutput,
        requests: Mapping[str, Request],
        kv: KVManager,
        ring: RingAdmission | None,
        num_rows: int,
    ) -> None:
        """Give decoding requests of a step rows for drafts.

        They take rows, pages and room in the ring that are left: they neither preempt nor delay a request.

        Args:
            requests: the live ones, by id.
            num_rows: rows that the step has left.
        """
        if num_rows <= 0:
            return
        places = {entry.request_id: i for i, entry in enumerate(step.scheduled) if entry.decodes}
        for request, drafts in self._propose([requests[request_id] for request_id in places]):
            drafts, boundary = drafts[:num_rows], kv.rope_boundary
            if boundary is not None and request.num_entered <= boundary:  # behind it, all keys change
                drafts = drafts[: boundary - request.kv_len - 1]
            if ring is not None and not ring.take_drafts(request, len(drafts)):
                continue
            if not kv.grow(request, request.kv_len + 1 + len(drafts)):
                drafts = drafts[: len(request.pages) * kv.page_size - request.kv_len - 1]
            if not drafts:
                continue
            num_rows -= len(drafts)
            step.drafts[request.request_id] = drafts
            i, count = places[request.request_id], 1 + len(drafts)
            step.scheduled[i] = step.scheduled[i]._replace(num_tokens=count, decodes=False, logit_rows=count)
        step.by_row = all(entry.decodes or entry.request_id in step.drafts for entry in step.scheduled)

    def may_follow(self, requests: Sequence[Request]) -> bool:
        """Whether the drafter may propose something behind the next token of one of these, which the host has not read."""
        foresees = getattr(self._drafter, "foresees", None)
        for request in requests:
            if request.drafts is None or not request.drafts.due(request.num_generated):
                continue
            try:
                if foresees is None or foresees(request):
                    return True
            except BaseException:  # `propose` is asked, and answers for it
                return True
            self._counts["pauses"] += request.drafts.miss(request.num_generated)
        return False

    def _propose(self, requests: Sequence[Request]) -> list[tuple[Request, list[int]]]:
        """The requests with drafts, and their drafts: no more than can become tokens."""
        asked = [
            request
            for request in requests
            if request.drafts is not None
            and not request.num_pending
            and request.accepted_len + 1 < request.max_tokens
            and request.drafts.due(request.accepted_len)
        ]
        if not asked:
            return []
        try:
            proposed = self._drafter.propose(list(asked), self._k)
            if len(proposed) != len(asked):
                raise DrafterError(f"{len(proposed)} lists of drafts came for {len(asked)} requests")
        except BaseException as error:  # SystemExit, too: drafts are not needed
            self._give_up(asked, error)
            return []
        found: list[tuple[Request, list[int]]] = []
        for request, drafts in zip(asked, proposed, strict=True):
            try:
                own = self._checked(drafts)
            except Exception as error:
                self._give_up([request], error)
                continue
            if own:
                found.append((request, own[: request.max_tokens - request.accepted_len - 1]))
            elif request.drafts is not None:
                self._counts["pauses"] += request.drafts.miss(request.accepted_len)
        return found

    def _checked(self, drafts: Sequence[int]) -> list[int]:
        found = [index(token) for token in drafts[: self._k]]
        wrong = next((token for token in found if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise DrafterError(f"token {wrong} is proposed, but token ids go from 0 to {self._vocab_size - 1}")
        return found

    def _give_up(self, requests: Sequence[Request], error: BaseException) -> None:
        """The drafter failed for these requests, which continue without drafts."""
        what = str(error) if isinstance(error, DrafterError) else f"propose() raised {error!r}"
        message = f"the drafter {self.name}: {what}; the request continues without drafts"
        if not self._warned:
            logger.warning("%s", message)
            self._warned = True
        for request in requests:
            if request.drafts is not None:
                request.drafts.stop()
            request.warnings.append(message)
            self._undrafted["the drafter failed"] += 1

    # -- results ------------------------------------------------------------------------

    def settle(self, request: Request, entry: ScheduledRequest, num_drafts: int, num_sampled: int) -> None:
        """Count a step of a request with drafts. Then all of its tokens have KV, except the last.

        Args:
            entry: entry of the step.
            num_sampled: tokens that the step gave, before any was dropped.
        """
        assert request.drafts is not None, "it had drafts"
        request.kv_len = request.prompt_len + request.accepted_len - 1
        accepted = min(request.kv_len - entry.start, num_sampled - 1)
        pauses = request.drafts.count(num_drafts, accepted, request.accepted_len)
        self._counts.update(steps=1, drafted=num_drafts, accepted=accepted, pauses=pauses)

    def failed(self, request: Request) -> None:
        """A pass with drafts of the request failed: it will run again without."""
        assert request.drafts is not None, "it had drafts"
        self._counts["pauses"] += request.drafts.pause(request.accepted_len)

    def stats(self) -> dict[str, Any]:
        """Passes with drafts, one for each request; drafts, and accepted ones; pauses; requests without drafts, by why."""
        return {**self._counts, "undrafted": dict(self._undrafted)}


def why_undrafted(request: Request) -> str:
    """Reason that a generating request has no drafts, or ""."""
    if request.params.speculate is False:
        return "speculate=False"
    if request.trace is not None:
        return "a trace"
    return "" if request.declared is None else request.declared.why_undrafted


def check_speculate(request: Request, drafts: bool, what: str) -> None:
    """Check that a request, which asks for drafts, can be drafted for.

    Args:
        drafts: the engine has a drafter.
        what: prompt name used in error messages.

    Raises:
        PromptError: the request cannot have drafts.
    """
    if not drafts:
        raise PromptError(f"{what}: speculate=True, but this engine has no drafter: LM(..., speculative=...) sets one")
    if why := why_undrafted(request):
        raise PromptError(
            f"{what}: speculate=True, but no drafts are proposed beside {why} (docs/engine/speculative.md)"
        )
