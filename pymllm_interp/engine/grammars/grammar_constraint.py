"""`GrammarConstraint`: xgrammar's matcher of one request, as a `TokenConstraint`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ...core.structured.token_constraint import ConstraintError
from ...sampling.bitmasks import allow_only

MASK_SECONDS = 0.25
"""Time of the processor that a mask, or a token, may take. A grammar with many readings of a text takes longer with each token."""

MEAN_SECONDS = 0.005
"""Time that masks and tokens may take on average, beside `MASK_SECONDS` once: all requests wait for it."""


class GrammarConstraint:
    """Mask of the tokens that continue a text of a grammar. A complete text may end.

    Accepted tokens, which a mask has allowed, are taken with the next mask.

    Args:
        compiled: xgrammar's CompiledGrammar.
        allowed: [words] int32, tokens that may come at all.
        within: [words] int32, the same without end-of-sequence tokens.
        end_ids: end-of-sequence tokens.
        name: kind of the structured output, for messages.
    """

    def __init__(
        self, compiled: Any, allowed: torch.Tensor, within: torch.Tensor, end_ids: Collection[int], name: str
    ) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=list(end_ids))
        self._allowed, self._within = allowed, within
        self._end_ids, self.name = frozenset(end_ids), f"structured_outputs ({name})"
        self._seconds, self._allowance = 0.0, MASK_SECONDS
        self._queue: list[int] = []  # accepted, and not taken yet
        self._past_end = 0  # tokens after the one that ended the text: of a request with ignore_eos

    def mask(self, row: torch.Tensor) -> None:
        self._take()
        if self._matcher.is_terminated():
            allow_only(row, self._end_ids)
            return
        started = time.thread_time()
        self._matcher.fill_next_token_bitmask(row[None], 0)
        self.cut(row)
        self._check_time(started)

    def cut(self, row: torch.Tensor) -> None:
        """Forbid tokens that may not come at all, and the end of a text that is not complete.

        xgrammar 0.2.9 allows the end of "[^a-z]?.+" at once, and of other patterns with parts that may be left out.
        """
        row &= self._allowed if self._matcher.is_completed() else self._within

    def matcher(self) -> Any:
        """xgrammar's matcher for the next mask; None if the text is complete. The mask is to be `cut`."""
        self._take()
        return None if self._matcher.is_terminated() else self._matcher

    def accept(self, token_ids: Sequence[int]) -> None:
        self._queue += token_ids

    def _take(self) -> None:
        started, (tokens, self._queue) = time.thread_time(), (self._queue, [])
        for token in tokens:
            if self._matcher.is_terminated():
                self._past_end += 1
            elif not self._matcher.accept_token(token):
                raise ConstraintError(f"token {token} does not continue the text")
        self._check_time(started)

    def rollback(self, num_tokens: int) -> None:
        waiting = min(num_tokens, len(self._queue))
        del self._queue[len(self._queue) - waiting :]
        num_tokens -= waiting
        past = min(num_tokens, self._past_end)
        self._past_end -= past
        if num_tokens > past:
            self._matcher.rollback(num_tokens - past)

    def _check_time(self, started: float) -> None:
        self._seconds += (seconds := time.thread_time() - started)
        self._allowance += MEAN_SECONDS
        if seconds > MASK_SECONDS or self._seconds > self._allowance:
            raise ConstraintError(
                f"a token took {seconds:.2g} s, and all of them {self._seconds:.2g} s; at most {MASK_SECONDS:g}, and "
                f"{MEAN_SECONDS:g} s on average: write a simpler grammar"
            )
