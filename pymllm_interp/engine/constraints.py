"""Constraints of live requests: the masks of a step, and the tokens that they accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..core.request import Request
from ..core.sampling_params import SamplingParams
from ..sampling.token_constraint import ConstraintError, TokenConstraint, TokenMasks, allows, empty_bitmask
from ..utils.arguments import PromptError


class RequestConstraint:
    """A request's constraint, and the mask that its next token is sampled by. A preemption changes neither.

    Args:
        constraint: of this request only.
    """

    __slots__ = ("_constraint", "_row")

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint
        self._row: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Names the constraint in messages."""
        return type(self._constraint).__name__

    def mask(self, row: torch.Tensor) -> None:
        """Have the constraint write `row`: [words] int32, all tokens allowed. The row is kept until the token comes.

        Raises:
            ConstraintError: the constraint raised, or allows nothing.
        """
        inside = row.clone()
        self._guarded("mask", lambda: self._constraint.mask(row))
        row &= inside  # no bits past the vocabulary
        if not row.any():
            raise ConstraintError(f"the constraint {self.name} allows no token: allow an end-of-sequence token to end")
        self._row = row

    def accept(self, token: int) -> None:
        """Take the token that the request is given.

        Raises:
            ConstraintError: the constraint raised, or its mask forbids the token.
        """
        assert self._row is not None, "a token is sampled by a mask"
        if not allows(self._row, token):
            raise ConstraintError(
                f"the constraint {self.name} forbids token {token}: a trace set `samples` to it, or min_tokens, bad_words "
                "and allowed_token_ids forbid all tokens that the constraint allows"
            )
        self._guarded("accept", lambda: self._constraint.accept([token]))

    def _guarded(self, method: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # SystemExit, too: the other requests continue
            raise ConstraintError(f"{method}() of the constraint {self.name} raised {error!r}") from error


def constraint_of(params: SamplingParams, vocab_size: int, what: str) -> RequestConstraint | None:
    """A constraint for a new request; None where its parameters name none, or it generates nothing.

    Args:
        what: names the prompt in messages.

    Raises:
        PromptError: `params.constraint` cannot be made.
    """
    if params.constraint is None or params.max_tokens == 0:
        return None
    try:
        return RequestConstraint(params.constraint.make(vocab_size))
    except Exception as error:
        name = type(params.constraint).__name__
        raise PromptError(f"{what}: the constraint {name} could not be made: {error!r}") from error


def masks_of(
    requests: Sequence[Request], vocab_size: int, fail: Callable[[list[Request], BaseException], None]
) -> TokenMasks | None:
    """The masks that these requests are sampled by in a step; None without requests.

    Args:
        fail: ends requests by an error.
    """
    if not requests:
        return None
    bits = empty_bitmask(len(requests), vocab_size)
    for row, request in zip(bits, requests, strict=True):
        try:
            request.constraint.mask(row)
        except ConstraintError as error:
            fail([request], error)
    return TokenMasks([request.request_id for request in requests], bits)
