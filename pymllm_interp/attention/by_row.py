"""Attention over given keys, and patterns, with the bits of a row independent of the other rows (batch-invariant mode)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kernels.cpu.cpu_dispatch import cpu_kernels_for
from .attention_backend import RadixAttention
from .patterns import pattern_of

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
