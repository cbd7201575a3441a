"""`Layout`: positions of prompts' tokens in a padded batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Layout:
    """A batch [prompts, width, ...] of prompts that may have different lengths. Padding is zeros.

    Attributes:
        tokens: ids of each prompt, without padding.
        starts: column of each prompt's first token.
        width: columns.
    """

    tokens: list[list[int]]
    starts: list[int]
    width: int

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> Layout:
        """The layout of token ids [batch, tokens] or [tokens], and a mask of that shape (1: token, 0: padding).
        Raises ValueError: no prompt, other shapes, or a mask with padding between tokens."""
        if input_ids is None:
            raise ValueError("a prompt is expected: text, or token ids [batch, tokens]")
        ids = torch.as_tensor(input_ids)
        if ids.dim() not in (1, 2) or ids.numel() == 0:
            raise ValueError(f"token ids have shape {list(ids.shape)}; expected [batch, tokens], or [tokens]")
        ids = torch.atleast_2d(ids)
        mask = torch.ones_like(ids) if attention_mask is None else torch.atleast_2d(torch.as_tensor(attention_mask))
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}; expected that of the token ids, {list(ids.shape)}"
            )
        columns = [row.nonzero().flatten().tolist() for row in mask.bool()]
        if not all(row and row[-1] - row[0] + 1 == len(row) for row in columns):
            raise ValueError("attention_mask: each prompt needs a token, and padding on its left or right, not within")
        tokens = [row[found[0] : found[-1] + 1].tolist() for row, found in zip(ids, columns, strict=True)]
        return cls(tokens, [found[0] for found in columns], ids.shape[1])

    @property
    def padded(self) -> bool:
        """Whether any prompt is padded."""
        return any(len(ids) < self.width for ids in self.tokens)

    def stacked(self, rows: Sequence[torch.Tensor], square: bool = False) -> torch.Tensor:
        """The batch of each prompt's values.

        Args:
            rows: [tokens, ...] for each prompt; if `square`, [heads, tokens, tokens].
        """
        if not self.padded:
            return torch.stack(list(rows))
        made = []
        for start, ids, row in zip(self.starts, self.tokens, rows, strict=True):
            shape = list(row.shape)
            shape[1 if square else 0] = self.width
            if square:
                shape[2] = self.width
            whole, where = row.new_zeros(shape), slice(start, start + len(ids))
            whole[(slice(None), where, where) if square else where] = row
            made.append(whole)
        return torch.stack(made)

    def from_trace(self, value: torch.Tensor) -> torch.Tensor:
        """The batch of a trace's value, in which shorter prompts are padded on the left."""
        if not self.padded:
            return value
        return self.stacked([row[row.shape[0] - len(ids) :] for row, ids in zip(value, self.tokens, strict=True)])

    def to_trace(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`from_trace` backwards, for a value of the trace's shape `like`."""
        if not self.padded:
            return value
        found = torch.zeros_like(like)
        for row, new, start, ids in zip(found, value, self.starts, self.tokens, strict=True):
            row[row.shape[0] - len(ids) :] = new[start : start + len(ids)]
        return found

    def edit(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """`function` of batches as a function of a trace's values. Padding stays zero."""
        if not self.padded:
            return function

        def edit(value: torch.Tensor) -> torch.Tensor:
            batch = self.from_trace(value)
            version, new = batch._version, function(batch)
            if new is batch and batch._version == version:
                return value
            if new.shape != batch.shape:
                raise ValueError(f"a hook returned {list(new.shape)}; expected {list(batch.shape)}, or None")
            return self.to_trace(new, value)

        return edit
