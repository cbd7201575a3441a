"""Attention patterns of some rows. They are computed again from the rotated queries and the keys: kernels never have them as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from .attention_backend import RadixAttention

MAX_SCORES = 1 << 26
"""Most scores, and most values of K, that are computed with at once."""


PatternFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, RadixAttention], torch.Tensor]
"""`pattern_of`, or a function with its arguments."""


class PatternRead(NamedTuple):
    """The rows of a request for which a layer's attention pattern is captured, in a pass."""

    rows: np.ndarray
    """[rows] int64, counted from the request's first row."""
    heads: tuple[int, ...] | None
    """Query heads; None: all."""
    keep: Callable[[torch.Tensor], None]
    """Receives [heads, rows, keys] float32, on the device: weights of the keys up to the request's last row."""


def hidden_keys(positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """[queries, keys] bool: keys after each query's position [queries], and those before its sliding window."""
    back = positions[:, None] - torch.arange(length, device=positions.device)
    return (back < 0) if window is None else (back < 0) | (back >= window)


def pattern_of(
    q: torch.Tensor,  # [queries, heads, head_dim], rotated
    k: torch.Tensor,  # [keys, kv_heads, head_dim], rotated
    hidden: torch.Tensor,  # [heads or 1, queries, keys] bool: edges with a weight of 0
    heads: torch.Tensor,  # [heads] int64, query heads
    layer: RadixAttention,
) -> torch.Tensor:
    """The weights [heads, queries, keys] in float32, as eager attention computes them."""
    hidden = hidden.expand(len(heads), -1, -1)
    found = []
    at_once = max(1, MAX_SCORES // (k.shape[0] * layer.head_dim))
    for part, masks in zip(heads.split(at_once), hidden.split(at_once), strict=True):
        keys = k[:, part // (layer.num_heads // layer.num_kv_heads)].float().permute(1, 2, 0)
        queries = q[:, part].float().transpose(0, 1)
        step = max(1, MAX_SCORES // (len(part) * k.shape[0]))
        rows = []
        for some, mask in zip(queries.split(step, 1), masks.split(step, 1), strict=True):
            scores = some @ keys * layer.scaling
            if layer.logit_cap is not None:
                scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
            rows.append(layer.softmax(scores.masked_fill(mask, float("-inf")), part))
        found.append(torch.cat(rows, 1))
    return torch.cat(found)
