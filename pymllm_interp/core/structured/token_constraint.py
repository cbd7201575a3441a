"""Constraints: which tokens a request may sample next, given those that it has generated.

`SamplingParams(constraint=spec)` carries a `ConstraintSpec`. Each request makes a `TokenConstraint` of it. While a step's pass
runs, the constraint writes a bitmask of the allowed tokens, in the layout of xgrammar. Bit ``t % 32`` of the int32 word ``t // 32``
is 1 for an allowed token t. Only sampling waits for it::

    class Digits:
        def __init__(self, ids): self.ids = ids
        def make(self, vocab_size): return self          # no state: each request may have the same
        def mask(self, row): allow_only(row, self.ids)
        def accept(self, token_ids): ...
        def rollback(self, num_tokens): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch, which servers' HTTP processes do without
    import torch


class ConstraintError(ValueError):
    """A request's constraint failed, allowed no token, or forbids the token that came."""


class TokenConstraint(Protocol):
    """The constraint of one request. The engine's thread calls it; an error that it raises ends its request only."""

    def mask(self, row: torch.Tensor) -> None:
        """Write which tokens may come next. A step that fails asks again, without an `accept` in between.

        Args:
            row: [ceil(vocab / 32)] int32 on the CPU, all bits set.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take tokens, each once and in order; the last `mask` allowed the first of them. The request keeps them, unless they are
        drafts: `rollback` follows then, in the same step.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens: drafts, which the model may not sample."""
        ...


class ConstraintSpec(Protocol):
    """A picklable description of a request's constraint."""

    def make(self, vocab_size: int) -> TokenConstraint:
        """The constraint of a new request, on the caller's thread. An error refuses the request."""
        ...
