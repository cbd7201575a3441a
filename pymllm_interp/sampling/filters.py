"""min_p, top_k and top_p, over probabilities in fixed point.

A token's weight is ``floor(exp(score - max score) * 2**40)`` as int64. Integer sums are exact in any order. So a row's tokens do
not depend on the other rows, on the sort, or on the device's scan. The last bits of float sums would follow the launch shape. The
error of each weight is below 2**-40 of the most likely token's.

All filters keep ties: a token with the score of the last one kept is kept too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ONE = 2.0**40
"""The weight of a row's most likely token."""
PROBE = 1024
"""The number of largest scores that top_p sorts first on a CPU; rows that need more are sorted in full."""


def filter_width(top_ks: Sequence[int], top_ps: Sequence[float], vocab_size: int, device: torch.device) -> int:
    """The number of largest scores of each row that `filtered_weights` has to sort.

    That is the largest top_k. A row with only top_p has no bound. A CPU sorts `PROBE` scores first. CUDA sorts the whole row: to
    check that a part sufficed would wait for the device.
    """
    unbounded = min(PROBE, vocab_size) if device.type == "cpu" else vocab_size
    width = 1
    for top_k, top_p in zip(top_ks, top_ps, strict=True):
        if 0 < top_k < vocab_size:
            width = max(width, top_k)
        elif top_p < 1:
            width = max(width, unbounded)
    return width


def filtered_weights(
    scores: torch.Tensor,  # [rows, vocab] float32, each row's largest is 0
    top_ks: torch.Tensor | None = None,  # [rows] int; below 1, or vocab and above: off
    top_ps: torch.Tensor | None = None,  # [rows] float32; 1 and above: off
    min_ps: torch.Tensor | None = None,  # [rows] float32
    width: int | None = None,  # result of `filter_width`; None: the whole vocabulary
) -> torch.Tensor:
    """Each token's weight after min_p and top_k, then top_p over the tokens that are left; 0 for dropped tokens.
    Returns [rows, vocab] int64. A row with NaN scores gives weights without meaning, and no error."""
    probs = scores.exp()
    weights = (probs * ONE).to(torch.int64)
    if min_ps is not None:
        weights.masked_fill_(probs < min_ps[:, None], 0)
    if top_ks is not None or top_ps is not None:
        floor = _floor(scores, weights, top_ks, top_ps, width or scores.shape[1])
        weights.masked_fill_(scores < floor[:, None], 0)
    return weights


def kept_tokens(
    scores: torch.Tensor,  # scores and further arguments: see `filtered_weights`
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
    width: int | None = None,
) -> torch.Tensor:
    """The tokens that the filters of `filtered_weights` keep, however small their weight: [rows, vocab] bool."""
    probs = scores.exp()
    kept = torch.ones_like(scores, dtype=torch.bool) if min_ps is None else probs >= min_ps[:, None]
    if top_ks is not None or top_ps is not None:
        weights = (probs * ONE).to(torch.int64).masked_fill_(~kept, 0)
        kept &= scores >= _floor(scores, weights, top_ks, top_ps, width or scores.shape[1])[:, None]
    return kept


def _floor(
    scores: torch.Tensor,
    weights: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """The least score that top_k and top_p keep: [rows], -inf where both are off."""
    vocab = scores.shape[1]
    values, order = scores.sort(dim=-1, descending=True) if width >= vocab else scores.topk(width)
    floor = scores.new_full(scores.shape[:1], -torch.inf)
    if top_ks is not None:
        kth = _pick(values, top_ks - 1)
        floor = torch.where((top_ks > 0) & (top_ks < vocab), kth, floor)
        if top_ps is not None:
            weights = weights.masked_fill(scores < floor[:, None], 0)
    if top_ps is None:
        return floor
    mass = weights.gather(1, order).cumsum(dim=-1)
    total = weights.sum(dim=-1)
    need = torch.minimum((top_ps.to(torch.float64) * total).ceil().to(torch.int64), total)
    need = torch.where(top_ps < 1, need, 0)
    # Ties of the k-th score may lie past `width`. All places fall short then, and the last place holds that score anyway.
    nucleus = _pick(values, (mass < need[:, None]).sum(dim=-1))
    floor = torch.where(top_ps < 1, torch.maximum(floor, nucleus), floor)
    if width < vocab and scores.device.type == "cpu":
        short = mass[:, -1] < need
        if short.any():
            rest = (None if limit is None else limit[short] for limit in (top_ks, top_ps))
            floor[short] = _floor(scores[short], weights[short], *rest, width=vocab)
    return floor


def _pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``values[row, places[row]]``, with places moved into range: [rows]."""
    return values.gather(1, places.to(torch.int64).clamp(0, values.shape[1] - 1)[:, None]).squeeze(1)
