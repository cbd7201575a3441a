"""Attention of transformers' own modules over the paged KV pool, through transformers' attention interface.

A model with `PAGED` as the attention implementation of its config calls `paged_attention` in place of its own kernels. The pass,
and with it the pages of each request, is the thread's current pass (core/current_pass.py). Each attention module has `paged_calls`:
the parameters of its calls in one pass, which `models.probe` reads off a first pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from ...attention.attention_backend import RadixAttention
from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...utils.kv_rows import read_rows
from .attention_method import eager_method_of

PAGED = "pymllm_interp_paged"
"""The name of `paged_attention` in transformers. It has no mask function, so that models make no masks."""


class PagedCall(NamedTuple):
    """One call of the attention function in a pass."""

    layer: RadixAttention
    eager: bool
    """Whether the family's own eager attention computes it, request by request."""
    chunk: int | None = None
    """A query sees the keys of its chunk of positions; None: the layer's sliding window, or all."""
    copies: int = 1
    """The pool has each of the call's key and value heads so many times."""


@dataclass
class PagedCalls:
    """The calls of one attention module in a pass, in order."""

    calls: list[PagedCall]
    index: int = 0

    def next(self) -> PagedCall:
        """The call that is made now."""
        call = self.calls[self.index]
        self.index = (self.index + 1) % len(self.calls)
        return call


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write key and value to the pages of the pass's requests, and attend to the pages.

    Args:
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim]; the head size of values may differ.
        kwargs: of the family's call: `scaling`, `softcap`, `s_aux` and others.

    Returns:
        ([1, tokens, heads, head_dim of values], weights). The weights are [1, heads, tokens, keys] in passes with eager attention
        of one request, else None.
    """
    batch = current_batch()
    if batch is None:  # a block calls the module on states of its own
        size = query.shape[2]
        return _eager(module, query, key, value, causal_mask(size, size, None, query), **kwargs)
    call, width = module.paged_calls.next(), value.shape[-1]
    q, k, v = (pool_rows(x, call.layer.head_dim) for x in (query, key, value))
    if call.copies > 1:
        k, v = (x.repeat_interleave(call.copies, 1) for x in (k, v))
    wants_weights = batch.transformers_pass is not None and batch.transformers_pass.eager
    if call.eager or wants_weights:
        out, weights = _by_request(module, call, q, k, v, (query.shape[-1], width), batch, kwargs)
        return out, weights if wants_weights else None
    out = call.layer(q, k, v, batch).view(1, q.shape[0], -1, call.layer.head_dim)
    return out[..., :width], None


def pool_rows(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[1, heads, tokens, size] -> [tokens, heads, head_dim], padded with zeros, which change no score."""
    x = x[0].transpose(0, 1)
    return (x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))).contiguous()


def _by_request(
    module: Any,
    call: PagedCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: tuple[int, int],
    batch: ForwardBatch,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The family's own eager attention, for one request after the other.

    Args:
        q, k, v: [tokens, heads, head_dim], padded to the head size of the pool.
        sizes: the head sizes of q and k, and of v.
    """
    layer, pool, table = call.layer, batch.token_to_kv_pool, batch.req_to_token_pool
    if not batch.fresh_kv_only:
        assert pool is not None, "prepare_forward_batch_* sets the pools"
        pool.set_kv(layer.layer_id, batch.out_cache_loc[: len(k)], k, v)
    lens = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist()
    outs, weights = [], None
    for i, (start, size) in enumerate(batch.batch_groups):
        if batch.fresh_kv_only or pool is None or table is None:
            keys, values = k[start : start + size], v[start : start + size]
        else:
            slots = table.req_to_token[batch.req_pool_indices[i], : lens[i]].to(torch.int64)
            stored = zip(pool.get_kv(layer.layer_id), pool.scales(layer.layer_id), strict=True)
            keys, values = (read_rows(x, slots, q.dtype, scale) for x, scale in stored)
        queries = q[start : start + size]
        keys, values = keys[:, :: call.copies], values[:, :: call.copies]
        mask = causal_mask(size, len(keys), layer.sliding_window, q, call.chunk)
        cuts = None if batch.attention_cuts is None else batch.attention_cuts.of_request(i)
        if cuts is not None:
            cut = cuts.hidden(layer.layer_id, layer.num_heads, layer.sliding_window, q.device)
            if cut is not None:
                mask = mask.masked_fill(cut[..., -mask.shape[-1] :], torch.finfo(mask.dtype).min)
        parts = (_heads(x, width) for x, width in zip((queries, keys, values), (sizes[0], *sizes), strict=True))
        out, weights = _eager(module, *parts, mask, **kwargs)
        if cuts is not None:
            cuts.keep_pattern(layer.layer_id, weights)
        outs.append(out)
    out = torch.cat(outs, 1)
    padding = q.shape[0] - out.shape[1]
    out = F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out
    return out, weights if len(outs) == 1 else None


def _heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, size]."""
    return x[..., :size].transpose(0, 1).unsqueeze(0)


def causal_mask(
    queries: int, keys: int, window: int | None, like: torch.Tensor, chunk: int | None = None
) -> torch.Tensor:
    """Added to scores [1, 1, queries, keys]: 0, or the lowest number of the dtype. The queries are the last positions."""
    query, key = torch.arange(keys - queries, keys, device=like.device)[:, None], torch.arange(keys, device=like.device)
    hidden = query < key
    if window is not None:
        hidden |= query - key >= window
    if chunk is not None:
        hidden |= query // chunk != key // chunk
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)[None, None]


def eager_attention_of(module: nn.Module) -> Callable[..., Any] | None:
    """`eager_attention_forward` of the file that defines the module's class, or the class's method."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return own or eager_method_of(module)


def _eager(module: nn.Module, *tensors: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    eager = eager_attention_of(module)
    if eager is None:
        raise NotImplementedError(f"{type(module).__name__} has no eager attention in transformers")
    return eager(module, *tensors, **{**kwargs, "dropout": 0.0})


AttentionInterface.register(PAGED, paged_attention)
