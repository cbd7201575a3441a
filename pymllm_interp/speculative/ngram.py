"""`NgramDrafter`: proposes the tokens after an earlier occurrence of the last n tokens (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

if TYPE_CHECKING:
    from ..core.request import Request

MAX_PLACES = 512
"""Latest places of the last token that are looked at."""


class NgramDrafter:
    """Finds an earlier occurrence of the longest n-gram that ends prompt and output, and proposes the tokens after it.

    Of equally long ones it takes the latest that `k` tokens follow.

    Args:
        longest, shortest: lengths of the n-grams.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """Propose the continuation of an earlier n-gram, see `Drafter.propose`."""
        return [continuation(self._tokens(request), self._longest, self._shortest, k) for request in requests]

    def foresees(self, request: Request) -> bool:
        """Whether the text so far has a continuation: the next token may then have one."""
        return bool(continuation(self._tokens(request), self._longest, self._shortest, 1))

    def _tokens(self, request: Request) -> np.ndarray:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.prompt_token_ids)
        return text.tokens(request.output_token_ids)


class _Text:
    """The tokens of a request as an array that grows with them."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt_len = self._count = len(prompt)
        self._room = np.empty(2 * len(prompt) + 64, dtype=np.int32)
        self._room[: len(prompt)] = prompt

    def tokens(self, output: Sequence[int]) -> np.ndarray:
        """Token ids of prompt and output, [length] int32."""
        count = self._prompt_len + len(output)
        if count > len(self._room):
            self._room = np.concatenate((self._room, np.empty(count, dtype=np.int32)))
        self._room[self._count : count] = output[self._count - self._prompt_len :]
        self._count = count
        return self._room[:count]


def continuation(tokens: np.ndarray, longest: int, shortest: int, k: int) -> list[int]:
    """The tokens after an earlier occurrence of the n-gram that ends `tokens` [n]: at most `k`."""
    count = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])[-MAX_PLACES:]  # where such an n-gram ends
    found = ends[:0]
    for size in range(1, longest + 1):
        if size > 1:
            ends = ends[ends >= size - 1]
            if len(ends):
                ends = ends[tokens[ends - (size - 1)] == tokens[-size]]
        if not len(ends):
            break
        if size >= shortest:
            found = ends
    if not len(found):
        return []
    full = int(np.searchsorted(found, count - k))  # those that k tokens follow
    first = int(found[full - 1 if full else 0]) + 1
    return tokens[first : first + k].tolist()
