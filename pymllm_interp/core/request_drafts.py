"""`RequestDrafts`: counts of a request's draft tokens, and when to propose more."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from .events import DraftCounts

WINDOW = 64
"""Drafts after which their use is judged. Of half as many, few may be accepted by chance."""
LEAST_ACCEPTED = 0.15
"""Fraction of them that must have been accepted: a pass with drafts takes longer than a replayed one."""
PAUSE = 64
"""Tokens without drafts, where fewer were accepted, or a pass with drafts failed."""
MAX_MISSES, MISSED_PAUSE = 16, 16
"""Tokens in a row that nothing was proposed for, and tokens that nothing is then looked for."""
MISSES_AGAIN = 4
"""The same after such a pause. To look for drafts takes time, and a step that they may follow does not overlap with the host's."""
LONGEST_PAUSE = 256
"""Upper bound of a pause. Each pause in a row is twice as long as the one before."""


@dataclass(eq=False, slots=True)
class RequestDrafts:
    """The drafts of one request so far. The engine's thread writes it."""

    steps: int = 0
    """Passes with drafts."""
    drafted: int = 0
    accepted: int = 0
    """Drafts that became tokens of the request."""
    resumes_at: int = 1
    """Generated tokens from which drafts are proposed."""
    _judged: tuple[int, int] = (0, 0)
    """`drafted` and `accepted` when their use was last judged."""
    _misses: int = 0
    _pauses: int = 0
    """Pauses in a row."""

    @property
    def counts(self) -> DraftCounts:
        """Counts for callers."""
        return DraftCounts(self.steps, self.drafted, self.accepted)

    def due(self, num_generated: int) -> bool:
        """Whether drafts are proposed after this many generated tokens."""
        return num_generated >= self.resumes_at

    def count(self, drafted: int, accepted: int, num_generated: int) -> bool:
        """Count a pass with drafts. Returns whether it pauses now: too few of the last ones were accepted."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self._misses = 0
        drafted, accepted = self.drafted - self._judged[0], self.accepted - self._judged[1]
        if drafted >= WINDOW:
            self._judged = self.drafted, self.accepted
            if accepted < LEAST_ACCEPTED * drafted:
                return self.pause(num_generated)
            self._pauses = 0
        return False

    def miss(self, num_generated: int) -> bool:
        """Record that nothing was proposed after this many generated tokens. Returns whether proposing pauses now."""
        self._misses += 1
        if self._misses < (MISSES_AGAIN if self._pauses else MAX_MISSES):
            return False
        self._misses = 0
        return self.pause(num_generated, MISSED_PAUSE)

    def pause(self, num_generated: int, num_tokens: int = PAUSE) -> bool:
        """Propose nothing for the next tokens: more after each pause. Returns True."""
        self.resumes_at = num_generated + min(num_tokens << min(self._pauses, 8), LONGEST_PAUSE)
        self._pauses += 1
        return True

    def stop(self) -> None:
        """Stop proposing drafts for this request."""
        self.resumes_at = sys.maxsize
