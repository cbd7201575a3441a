"""Log probabilities of tokens under the raw logits: float32, before any penalty, temperature or filter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.step import SampledLogprobs
from ..core.upload import upload

_CHUNK = 256
"""Rows whose log-softmax is held at a time: a long prompt's would not fit."""


def gather_logprobs(
    logits: torch.Tensor,  # [rows, vocab]
    token_ids: torch.Tensor,  # [rows] int
    num: Sequence[int | None],
) -> list[SampledLogprobs | None]:
    """For each row its token's log probability and those of the `num` most likely ones; None where `num` is None.

    An entry has ``1 + num`` tokens: the row's own first, then the top ones in falling order, the row's own among them
    where it belongs there. A rank is 1 + the number of tokens with a strictly greater logit, so equals share one.

    Raises:
        ValueError: `token_ids` or `num` has another length than `logits` has rows.
    """
    rows = logits.shape[0]
    if token_ids.shape != (rows,) or len(num) != rows:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and num {len(num)} entries; logits has {rows} rows: "
            "give one of each for every row"
        )
    result: list[SampledLogprobs | None] = [None] * rows
    asked = [(row, count) for row, count in enumerate(num) if count is not None]
    for start in range(0, len(asked), _CHUNK):
        chunk = asked[start : start + _CHUNK]
        (index,) = upload(logits.device, torch.tensor([row for row, _ in chunk]))
        entries = _row_logprobs(logits[index], token_ids[index], [count for _, count in chunk])
        for (row, _), entry in zip(chunk, entries, strict=True):
            result[row] = entry
    return result


def prompt_logprobs(
    logits: torch.Tensor,  # [n, vocab], at n consecutive prompt positions
    next_token_ids: torch.Tensor,  # [n] int, the tokens that follow them
    num: int,
) -> list[SampledLogprobs]:
    """What `gather_logprobs` gives, for prompt tokens: row i's entry is that of the token at the next position."""
    entries = gather_logprobs(logits, next_token_ids, [num] * logits.shape[0])
    return [entry for entry in entries if entry is not None]


def _row_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num: list[int]) -> list[SampledLogprobs]:
    """`gather_logprobs` of rows that all ask."""
    own = token_ids.to(torch.int64)[:, None]
    top, top_ids = logits.topk(min(max(num), logits.shape[1]))
    ids = torch.cat([own, top_ids], dim=1)
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(1, ids)
    own_rank = (logits > logits.gather(1, own)).sum(dim=-1, keepdim=True)
    top_ranks = (top[:, None, :] > top[:, :, None]).sum(dim=-1)
    ranks = torch.cat([own_rank, top_ranks], dim=1) + 1
    rows = zip(num, ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [SampledLogprobs(i[: n + 1], p[: n + 1], r[: n + 1]) for n, i, p, r in rows]
