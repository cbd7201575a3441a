"""Constraints for tests: fixed sets, sets that follow the last token, and ones that fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pymllm_interp.sampling import allow_only

SETS = ((5, 6, 7, 8, 40), (20, 21, 33, 64, 96))
"""`Alternating` allows one, then the other or the same, by the last token."""


@dataclass(frozen=True)
class OnlyThese:
    """Allows the same tokens at every step; it has no state, so all requests share it."""

    token_ids: tuple[int, ...]

    def make(self, vocab_size: int) -> OnlyThese:
        return self

    def mask(self, row: torch.Tensor) -> None:
        allow_only(row, self.token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        assert set(token_ids) <= set(self.token_ids)

    def rollback(self, num_tokens: int) -> None:
        pass


def next_set(history: Sequence[int]) -> tuple[int, ...]:
    """An even token is followed by the other set, an odd one by the set that it is in."""
    index = 0
    for token in history:
        assert token in SETS[index], f"{history}: {token} is not in {SETS[index]}"
        index ^= token % 2 == 0
    return SETS[index]


@dataclass
class History:
    """Keeps the accepted tokens, and allows what `next_set` says."""

    tokens: list[int] = field(default_factory=list)

    def mask(self, row: torch.Tensor) -> None:
        allow_only(row, next_set(self.tokens))

    def accept(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


@dataclass(frozen=True)
class Alternating:
    """Makes a `History` for each request. `made` keeps them, for tests."""

    made: list[History] = field(default_factory=list, compare=False)

    def make(self, vocab_size: int) -> History:
        self.made.append(History())
        return self.made[-1]


@dataclass(frozen=True)
class Failing:
    """As `Alternating`; after `after` tokens its `method` raises `error`, or its mask allows nothing."""

    method: str
    after: int = 3
    error: BaseException | None = None

    def make(self, vocab_size: int) -> History:
        if self.method == "make":
            assert self.error is not None
            raise self.error
        return FailingHistory(spec=self)


@dataclass
class FailingHistory(History):
    """The constraint of a `Failing`."""

    spec: Failing = Failing("mask")

    def _fail(self, method: str) -> None:
        if method == self.spec.method and len(self.tokens) == self.spec.after and self.spec.error is not None:
            raise self.spec.error

    def mask(self, row: torch.Tensor) -> None:
        self._fail("mask")
        super().mask(row)
        if self.spec.method == "nothing" and len(self.tokens) == self.spec.after:
            row.zero_()

    def accept(self, token_ids: Sequence[int]) -> None:
        self._fail("accept")
        super().accept(token_ids)


@dataclass(frozen=True)
class Slow:
    """Allows some tokens, and takes so many seconds of the processor for each mask."""

    token_ids: tuple[int, ...]
    seconds: float

    def make(self, vocab_size: int) -> Slow:
        return self

    def mask(self, row: torch.Tensor) -> None:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        allow_only(row, self.token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        pass

    def rollback(self, num_tokens: int) -> None:
        pass
