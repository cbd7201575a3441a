"""Constraints of live requests: the masks of a step, and the tokens that they accept."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..core.receipt import Receipt
from ..core.request import Request
from ..core.sampling_params import SamplingParams
from ..core.structured.structured_outputs import StructuredOutputs
from ..core.structured.token_constraint import ConstraintError, TokenConstraint
from ..sampling.bitmasks import TokenMasks, allows, empty_bitmask
from ..utils.arguments import PromptError
from .grammars.grammar_constraint import GrammarConstraint
from .grammars.grammars import GrammarError, Grammars

logger = logging.getLogger(__name__)

SLOW_SECONDS = 0.001
"""Time of the processor from which on the masks of a request's step are slow."""
STEP_SECONDS = 0.01
"""Time that slow masks may take of a step: all requests wait for them."""
MAX_THREADS, FEWEST_TOGETHER = 8, 4
"""xgrammar's threads that make masks together, and masks that are worth it."""
WEIGHT = 0.25
"""Weight of the last step in a request's moving average."""
_turns = itertools.count(1)


class RequestConstraint:
    """A request's constraint, and the masks that its next tokens are sampled by. A preemption changes neither.

    Args:
        constraint: constraint that no other request uses.
        limits: names the request's parameters that forbid tokens as well; "" for none.
    """

    __slots__ = ("_constraint", "_limits", "_masks", "num_masked", "seconds", "turn")

    def __init__(self, constraint: TokenConstraint, limits: str = "") -> None:
        self._constraint, self._limits = constraint, limits
        self.seconds = 0.0
        """Time of the processor that the masks of a step take, on average."""
        self.turn = 0
        """Turn, counted over all requests, in which the masks were last made."""
        self.num_masked = 0
        """Tokens of the request at which the mask forbade the likeliest one."""
        self._masks: list[torch.Tensor | ConstraintError] = []  # of the next tokens, in their order

    @property
    def name(self) -> str:
        """Names the constraint in messages."""
        return getattr(self._constraint, "name", type(self._constraint).__name__)

    def matcher(self) -> Any:
        """The grammar's matcher, for a mask that is made together with others; `made_together` follows. None: `mask` makes it.

        Slow masks are made one by one, so that their time is known.

        Raises:
            ConstraintError: the constraint raised.
        """
        grammar = self._constraint
        if not isinstance(grammar, GrammarConstraint) or self.seconds > SLOW_SECONDS / 2:
            return None
        found: list[Any] = []
        self._guarded("mask", lambda: found.append(grammar.matcher()))
        return found[0]

    def made_together(self, row: torch.Tensor, seconds: float) -> None:
        """Take the mask `row` [words] that xgrammar wrote, and its share of the time.

        Raises:
            ConstraintError: no token is allowed.
        """
        self.turn = next(_turns)
        if seconds > SLOW_SECONDS / 2:  # one of them is slow: next each is timed separately
            self.seconds = SLOW_SECONDS
        else:
            self.seconds += WEIGHT * (seconds - self.seconds)
        self._constraint.cut(row)  # pyright: ignore[reportAttributeAccessIssue]
        self._masks = [self._checked(row)]

    def mask(self, rows: torch.Tensor, drafts: Sequence[int] = ()) -> None:
        """Have the constraint write the masks of the next token, and of the token behind each draft. They are kept until then.

        Rows behind a draft that is not allowed stay as they are: their tokens are not accepted. An error behind a draft is raised
        by `accept`, if the request comes so far.

        Args:
            rows: [1 + drafts, words] int32, all tokens allowed.

        Raises:
            ConstraintError: the constraint raised, or allows nothing.
        """
        started, self.turn = time.thread_time(), next(_turns)
        try:
            self._write(rows, drafts)
        finally:
            self.seconds += WEIGHT * (time.thread_time() - started - self.seconds)

    def _write(self, rows: torch.Tensor, drafts: Sequence[int]) -> None:
        self._masks = [self._mask(rows[0])]
        num_taken = 0
        for row, draft in zip(rows[1:], drafts, strict=True):
            last = self._masks[-1]
            if isinstance(last, ConstraintError) or not allows(last, draft):
                break
            try:
                self._guarded("accept", lambda draft=draft: self._constraint.accept([draft]))
                num_taken += 1
                self._masks.append(self._mask(row))
            except ConstraintError as error:
                self._masks.append(error)
        if num_taken:
            self._guarded("rollback", lambda: self._constraint.rollback(num_taken))

    def _mask(self, row: torch.Tensor) -> torch.Tensor:
        inside = row.clone()
        self._guarded("mask", lambda: self._constraint.mask(row))
        row &= inside  # no bits past the vocabulary
        return self._checked(row)

    def _checked(self, row: torch.Tensor) -> torch.Tensor:
        if not row.any():
            raise ConstraintError(f"the constraint {self.name} allows no token: allow an end-of-sequence token to end")
        return row

    def accept(self, token: int) -> None:
        """Take the token that the request is given.

        Raises:
            ConstraintError: the constraint raised, or its mask forbids the token.
        """
        mask = self._masks.pop(0)  # a token is sampled by a mask
        if isinstance(mask, ConstraintError):
            raise mask
        if not allows(mask, token):
            why = "a trace set `samples` to it"
            if self._limits:
                why = f"{self._limits} may forbid all tokens that it allows here: leave them out, or {why}"
            raise ConstraintError(f"the constraint {self.name} forbids token {token}: {why}")
        self._guarded("accept", lambda: self._constraint.accept([token]))

    def _guarded(self, method: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # SystemExit, too: the other requests continue
            raise ConstraintError(f"{method}() of the constraint {self.name} raised {error!r}") from error


def constraint_of(params: SamplingParams, grammars: Grammars, vocab_size: int, what: str) -> RequestConstraint:
    """Constraint of a new request with parameters that name one.

    Args:
        grammars: the engine's grammars. The first request with a grammar waits for its compilation.
        what: prompt name used in error messages.

    Raises:
        PromptError: `params.constraint` cannot be made, or `params.structured_outputs` not compiled.
    """
    form = params.structured_outputs
    if isinstance(form, StructuredOutputs):
        try:
            return RequestConstraint(grammars.compiled(form).constraint(), limits_of(params))
        except (GrammarError, ImportError) as error:
            raise PromptError(f"{what}: {error}") from error
    assert params.constraint is not None
    try:
        return RequestConstraint(params.constraint.make(vocab_size), limits_of(params))
    except Exception as error:
        name = type(params.constraint).__name__
        raise PromptError(f"{what}: the constraint {name} could not be made: {error!r}") from error


def in_mask_budget(requests: Sequence[Request]) -> list[Request]:
    """The requests that take part in the next step. Of those with slow masks, as many as `STEP_SECONDS` has time for, in turns.

    Requests that step together, and traced ones, always take part.
    """
    slow = [
        request
        for request in requests
        if request.constraint is not None
        and request.constraint.seconds > SLOW_SECONDS
        and request.trace is None
        and request.gang is None
    ]
    slow.sort(key=lambda request: request.constraint.turn)
    ends = itertools.accumulate(request.constraint.seconds for request in slow)
    late = {request for i, (request, end) in enumerate(zip(slow, ends, strict=True)) if i and end > STEP_SECONDS}
    return [request for request in requests if request not in late]


def limits_of(params: SamplingParams) -> str:
    """The parameters that forbid tokens beside a constraint, for messages: "min_tokens=9 and bad_words"."""
    found = [f"min_tokens={params.min_tokens}"] if params.min_tokens else []
    found += [name for name in ("bad_words", "allowed_token_ids") if getattr(params, name)]
    return " and ".join(found)


def note_masked(request: Request) -> None:
    """Write into the receipt of a request that ended how often its constraint forbade the likeliest token."""
    request.receipt = request.receipt or Receipt()
    request.receipt.masked_argmax = request.constraint.num_masked


def masks_of(
    requests: Sequence[Request],
    vocab_size: int,
    fail: Callable[[list[Request], BaseException], None],
    drafts: Mapping[str, Sequence[int]],
) -> TokenMasks | None:
    """The masks that these requests are sampled by in a step; None without requests.

    Args:
        drafts: request id -> its drafts in the step.
        fail: ends requests by an error.
    """
    if not requests:
        return None
    own = [drafts.get(request.request_id, ()) for request in requests]
    counts = [1 + len(tokens) for tokens in own]
    bits = empty_bitmask(sum(counts), vocab_size)
    rows = bits.split(counts)
    for i in range(len(requests)) if any(own) else _made_together(requests, bits, vocab_size, fail):
        try:
            requests[i].constraint.mask(rows[i], own[i])
        except ConstraintError as error:
            fail([requests[i]], error)
    ids = [request.request_id for request, count in zip(requests, counts, strict=True) for _ in range(count)]
    return TokenMasks(ids, bits)


def _made_together(
    requests: Sequence[Request],
    bits: torch.Tensor,
    vocab_size: int,
    fail: Callable[[list[Request], BaseException], None],
) -> list[int]:
    """Make masks of grammars by xgrammar's threads, one call for all. Returns the requests that are left, by row.

    Args:
        bits: [requests, words].
    """
    if num_threads() < 2 or len(requests) < FEWEST_TOGETHER:
        return list(range(len(requests)))
    started, left, matchers = time.perf_counter(), [], {}
    for row, request in enumerate(requests):
        try:
            matcher = request.constraint.matcher()
        except ConstraintError as error:
            fail([request], error)
            continue
        if matcher is None:
            left.append(row)
        else:
            matchers[row] = matcher
    if not matchers:
        return left
    try:
        _batch_matcher().batch_fill_next_token_bitmask(list(matchers.values()), bits, list(matchers))
    except Exception as error:  # of one matcher: made one by one, it ends its own request
        logger.warning("masks are made one by one: %r", error)
        bits.copy_(empty_bitmask(len(requests), vocab_size))
        return sorted((*left, *matchers))
    share = (time.perf_counter() - started) / len(matchers)
    for row in matchers:
        try:
            requests[row].constraint.made_together(bits[row], share)
        except ConstraintError as error:
            fail([requests[row]], error)
    return left


@cache
def num_threads() -> int:
    """Threads that make masks: half of the processors that this process has."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, found // 2)


@cache
def _batch_matcher() -> Any:
    from xgrammar import BatchGrammarMatcher

    return BatchGrammarMatcher(max_threads=num_threads())
