"""Bitmasks of the tokens that may come next, as a `TokenConstraint` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..core.structured.token_constraint import ConstraintError
from ..utils.upload import upload

WORD = 32
"""Tokens in a word of a bitmask."""


def empty_bitmask(rows: int, vocab_size: int) -> torch.Tensor:
    """A bitmask that allows every token: [rows, ceil(vocab / 32)] int32 on the CPU. Bits past the vocabulary are 0."""
    # By NumPy: torch starts its intra-op threads for the masks of a batch, which takes milliseconds.
    bits = torch.from_numpy(np.full((rows, -(-vocab_size // WORD)), -1, dtype=np.int32))
    if past := vocab_size % WORD:
        bits[:, -1] = (1 << past) - 1
    return bits


def allow_only(row: torch.Tensor, token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens in a row of a bitmask, and clear all others.

    Args:
        row: [words] int32 on the CPU.

    Raises:
        ConstraintError: a token that the row has no bit for.
    """
    words: dict[int, int] = {}
    for token in token_ids:
        if not 0 <= token < WORD * len(row):
            raise ConstraintError(f"token {token}: expected a token id from 0, below the vocabulary's size")
        words[token // WORD] = words.get(token // WORD, 0) | 1 << (token % WORD)
    row.zero_()
    if words:
        row[list(words)] = torch.tensor(list(words.values())).to(row.dtype)  # int32 keeps the low bits


def allows(row: torch.Tensor, token_id: int) -> bool:
    """Whether a row of a bitmask has the token's bit."""
    return bool(int(row[token_id // WORD]) >> (token_id % WORD) & 1)


class BitmaskRows(NamedTuple):
    """The bitmasks of `k` rows of a batch, on the logits' device."""

    rows: torch.Tensor  # [k] int64
    bits: torch.Tensor  # [k, ceil(vocab / 32)] int32

    def apply_(self, scores: torch.Tensor) -> torch.Tensor:
        """Set the forbidden tokens of these rows of `scores` [batch, vocab] to -inf.
        Returns [batch] bool: rows in which the largest score was forbidden."""
        places = 1 << torch.arange(8, dtype=torch.uint8, device=self.bits.device)
        # By bytes, the lowest first as on all machines that torch runs on: a quarter of the memory of words.
        forbidden = (self.bits.view(torch.uint8)[:, :, None] & places).flatten(1)[:, : scores.shape[1]] == 0
        found = scores.index_select(0, self.rows)
        largest = forbidden.gather(1, found.max(dim=-1).indices[:, None])[:, 0]
        scores.index_copy_(0, self.rows, found.masked_fill_(forbidden, -torch.inf))
        return torch.zeros(len(scores), dtype=torch.bool, device=scores.device).index_copy_(0, self.rows, largest)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The bitmasks of a step's constrained requests, as data."""

    request_ids: list[str]
    """The request of each mask: it samples in the step. With drafts it has several masks, in the order of its rows."""
    bits: torch.Tensor
    """[masks, ceil(vocab / 32)] int32 on the CPU."""

    def for_rows(self, sampled_ids: Sequence[str], device: torch.device | str) -> BitmaskRows:
        """The masks on `device`, by sampled row.

        Args:
            sampled_ids: the request of each sampled row.
        """
        places: dict[str, list[int]] = {}
        for row, request_id in enumerate(sampled_ids):
            places.setdefault(request_id, []).append(row)
        rows = [row for request_id in dict.fromkeys(self.request_ids) for row in places[request_id]]
        return BitmaskRows(*upload(device, torch.tensor(rows), self.bits))
