"""Attention patterns of some rows. They are computed again from the rotated queries and the keys: kernels never have them as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..kernels.cpu.cpu_dispatch import cpu_kernels_for
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


KEY_MULTIPLE = 64
"""Patterns are computed over a multiple of this many keys. Keys behind the last one have a weight of zero."""


def attend_visible(
    q: torch.Tensor,  # [queries, heads, head_dim]
    k: torch.Tensor,  # [keys, kv_heads, head_dim]
    v: torch.Tensor,  # [keys, kv_heads, head_dim]
    visible: torch.Tensor,  # [queries, keys] bool
    layer: RadixAttention,
) -> torch.Tensor:
    """Attention of each query to the keys that it sees, in their order: [queries, heads, head_dim].

    NaN for a query that sees none, without sinks.
    """
    lens = visible.sum(1, dtype=torch.int32)
    slots = torch.sort(visible.to(torch.int8), dim=1, descending=True, stable=True).indices.to(torch.int32)
    rows = torch.arange(len(q), device=q.device)
    if q.is_cuda:
        from ..kernels.fixed_attention import attention

        z = torch.empty_like(q, memory_format=torch.contiguous_format)
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        shared = layer.scaling, sms, layer.logit_cap, layer.sinks
        attention(q.contiguous(), (k, v), None, rows, lens, slots.contiguous(), z, *shared)
    else:
        kernels, sinks = cpu_kernels_for(q, k, v), None if layer.sinks is None else layer.sinks.float()
        assert kernels is not None, "runner/invariant.py has checked the model"
        z = kernels.decode_attention(
            q.contiguous(), k, v, slots.contiguous(), rows, lens, layer.scaling, None, layer.logit_cap, sinks
        ).view_as(q)
    return z if layer.sinks is not None else z.masked_fill((lens == 0)[:, None, None], torch.nan)


def pattern_by_row(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, heads: torch.Tensor, layer: RadixAttention
) -> torch.Tensor:
    """`pattern_of`, computed for one query at a time, over a number of keys that its position decides."""
    queries, length = len(q), len(k)
    hidden = hidden.expand(len(heads), -1, -1)
    found = q.new_zeros(len(heads), queries, length, dtype=torch.float32)
    last = (~hidden).any(0).long().mul(torch.arange(1, length + 1, device=q.device)).amax(1).tolist()
    for row, stop in enumerate(last):
        padded = -(-stop // KEY_MULTIPLE) * KEY_MULTIPLE
        keys = F.pad(k[:stop], (0, 0, 0, 0, 0, padded - stop))
        mask = F.pad(hidden[:, row : row + 1, :stop], (0, padded - stop), value=True)
        found[:, row : row + 1, :stop] = pattern_of(q[row : row + 1].contiguous(), keys, mask, heads, layer)[..., :stop]
    return found
