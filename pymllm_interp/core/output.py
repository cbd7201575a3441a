"""Values of a request's results."""

from __future__ import annotations

from typing import NamedTuple


class Logprob(NamedTuple):
    """A token's log probability; under the raw logits, unless `ServerConfig.logprobs_mode` says otherwise."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str | None = None


class DraftCounts(NamedTuple):
    """Passes of a request with drafts, their drafts, and the accepted ones."""

    steps: int
    drafted: int
    accepted: int
