"""Log probabilities of sampled and of prompt tokens, as tensors that leave the device with the sampled tokens.

The caller chooses their source (`Sampler.logprobs_mode`). By default this is the raw logits, in float32, before any
penalty, temperature or filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.step import SampledLogprobs
from ..utils.upload import upload

_CHUNK = 256
"""Rows with a log-softmax in memory at a time: a long prompt's would not fit."""


class LogprobTensors(NamedTuple):
    """Log probabilities of the rows that ask for them; `tolists` makes one entry for each row of the batch.

    A row's tokens are its own token, then the most likely ones in falling order. Its own may be among them. A rank is 1 + the
    number of tokens with a strictly greater value, so equal values share a rank.
    """

    # fmt: off
    token_ids: torch.Tensor  # [asking rows, 1 + largest num] int64
    values:    torch.Tensor  # [asking rows, 1 + largest num] float32: log probabilities, or logits
    ranks:     torch.Tensor  # [asking rows, 1 + largest num] int64
    rows:      list[int]     # rows of the batch that ask
    num:       list[int]     # most likely tokens that each of them asks for
    num_rows:  int           # rows of the batch
    # fmt: on

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors, in the order of the fields."""
        return self.token_ids, self.values, self.ranks

    def tolists(self) -> list[SampledLogprobs | None]:
        """An entry of ``1 + num`` tokens for each row of the batch; None for rows that do not ask. Waits for the device."""
        result: list[SampledLogprobs | None] = [None] * self.num_rows
        lists = (tensor.tolist() for tensor in self.tensors)
        for row, num, ids, values, ranks in zip(self.rows, self.num, *lists, strict=True):
            result[row] = SampledLogprobs(ids[: num + 1], values[: num + 1], ranks[: num + 1])
        return result


def gather_logprobs(
    logits: torch.Tensor,  # [rows, vocab]
    token_ids: torch.Tensor,  # [rows] int
    num: Sequence[int | None],
    as_logits: bool = False,
) -> LogprobTensors:
    """Log probability of each row's token, and the `num` most likely tokens with theirs. Does not synchronize.

    Args:
        num: None for rows that do not ask.
        as_logits: give the logits themselves, as float32, in place of their log-softmax.

    Raises:
        ValueError: `token_ids` or `num` has another length than `logits` has rows.
    """
    rows = logits.shape[0]
    if token_ids.shape != (rows,) or len(num) != rows:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and num {len(num)} entries; logits has {rows} rows: "
            "give one of each for every row"
        )
    asking = [row for row, count in enumerate(num) if count is not None]
    counts = [count for count in num if count is not None]
    width = min(max(counts, default=0), logits.shape[1])
    index = None if len(asking) == rows else upload(logits.device, torch.tensor(asking, dtype=torch.int64))[0]
    parts = []
    for start in range(0, len(asking), _CHUNK):
        chunk = slice(start, start + _CHUNK) if index is None else index[start : start + _CHUNK]
        parts.append(_row_logprobs(logits[chunk], token_ids[chunk], width, as_logits))
    if not parts:
        parts.append(_row_logprobs(logits[:0], token_ids[:0], width, as_logits))
    tensors = parts[0] if len(parts) == 1 else [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    return LogprobTensors(*tensors, rows=asking, num=counts, num_rows=rows)


def prompt_logprobs(
    logits: torch.Tensor,  # [n, vocab] of n consecutive prompt positions
    next_token_ids: torch.Tensor,  # [n] int, the tokens that follow them
    num: int,
    as_logits: bool = False,
) -> LogprobTensors:
    """Log probabilities of prompt tokens, as `gather_logprobs` returns them. Row i is about the token at the next position."""
    return gather_logprobs(logits, next_token_ids, [num] * logits.shape[0], as_logits)


def _row_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, width: int, as_logits: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, values and ranks [rows, 1 + width] of rows that all ask."""
    own = token_ids.to(torch.int64)[:, None]
    top, top_ids = logits.topk(width)
    ids = torch.cat([own, top_ids], dim=1)
    values = logits if as_logits else torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    own_rank = (logits > logits.gather(1, own)).sum(dim=-1, keepdim=True)
    top_ranks = (top[:, None, :] > top[:, :, None]).sum(dim=-1)
    return ids, values.gather(1, ids).to(torch.float32), torch.cat([own_rank, top_ranks], dim=1) + 1
