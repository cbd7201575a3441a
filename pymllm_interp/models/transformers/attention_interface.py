"""Attention of transformers' own modules over the paged KV pool, through transformers' attention interface.

A model with `PAGED` as the attention implementation of its config calls `paged_attention` in place of its own kernels. The
pass, with the pages of each request, is the thread's current pass (core/current_pass.py). Each attention module has
`paged_calls`: the parameters of its calls in one pass, which `models.probe` reads off a first pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ...attention.attention_backend import RadixAttention
from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...mem_cache.memory_pool import read_rows
from .attention_method import eager_method_of
from .encoder_decoder.cross_attention import attend_across, cross_layer_of

PAGED = "pymllm_interp_paged"
"""The name of `paged_attention` in transformers. It has no mask function, so that models make no masks."""
PAGED_INDEXED = "pymllm_interp_paged_indexed"
"""Its name in models with indexers, which ask for a mask. A pass gives them one without information."""
MAX_GATHERED = 1 << 26
"""Most values of K that are gathered at once, for rows that attend to selected keys."""


class PagedCall(NamedTuple):
    """One call of the attention function in a pass."""

    layer: RadixAttention
    eager: bool
    """Whether the family's own eager attention computes it, request by request."""
    chunk: int | None = None
    """A query sees the keys of its chunk of positions; None: the layer's sliding window, or all."""
    copies: int = 1
    """Repetitions of each of the call's key and value heads in the pool."""
    both_ways: bool = False
    """Whether a query sees later keys of its request, too. The layer's sliding window then counts on each side."""


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
        kwargs: further arguments of the family's call: `scaling`, `softcap`, `s_aux` and others. `indices` [1, tokens,
            selected] are the positions of the keys that a query attends to; invalid positions are ignored.
            `position_bias` (`position_rules.RelativeBias`) is added to scores.

    Returns:
        ([1, tokens, heads, head_dim of values], weights). The weights are [1, heads, tokens, keys] in passes with eager attention
        of one request, else None.
    """
    batch, indices, bias = current_batch(), kwargs.pop("indices", None), kwargs.get("position_bias")
    if batch is None:  # a block calls the module on other states
        if cross_layer_of(module) is not None:
            return _eager(module, query, key, value, None, **kwargs)
        size = query.shape[2]
        mask = causal_mask(size, size, None, query)
        if indices is not None:
            mask = hide(mask, unselected(indices, size).unsqueeze(1))
        return _eager(module, query, key, value, mask, **kwargs)
    if cross_layer_of(module) is not None:
        return attend_across(module, query, kwargs.get("scaling"), batch), None
    call, width = module.paged_calls.next(), value.shape[-1]
    if call.both_ways:
        return _both_ways(module, call, query, key, value, batch, kwargs)
    q, k, v = (pool_rows(x, call.layer.head_dim) for x in (query, key, value))
    if call.copies > 1:
        k, v = (x.repeat_interleave(call.copies, 1) for x in (k, v))
    wants_weights = batch.transformers_pass is not None and batch.transformers_pass.eager
    if (indices is not None or bias is not None) and _are_single_rows(batch) and not wants_weights:
        return _by_row(module, call, q, k, v, (query.shape[-1], width), batch, kwargs, indices), None
    if call.eager or wants_weights:
        out, weights = _by_request(module, call, q, k, v, (query.shape[-1], width), batch, kwargs, indices)
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
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The family's own eager attention, for one request after the other.

    Args:
        q, k, v: [tokens, heads, head_dim], padded to the head size of the pool.
        sizes: the head sizes of q and k, and of v.
        indices: see `paged_attention`.
    """
    layer, pool, table = call.layer, batch.token_to_kv_pool, batch.req_to_token_pool
    if not batch.fresh_kv_only:
        assert pool is not None, "prepare_forward_batch_* sets the pools"
        pool.set_kv(layer.layer_id, batch.out_cache_loc[: len(k)], k, v)
    lens = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist()
    outs, weights, bias = [], None, kwargs.get("position_bias")
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
        if indices is not None:
            mask = hide(mask, unselected(indices[:, start : start + size], len(keys)).unsqueeze(1))
        cuts = None if batch.attention_cuts is None else batch.attention_cuts.of_request(i)
        if cuts is not None:
            cut = cuts.hidden(layer.layer_id, layer.num_heads, layer.sliding_window, q.device)
            if cut is not None:
                mask = hide(mask, cut[..., -mask.shape[-1] :])
        parts = (_heads(x, width) for x, width in zip((queries, keys, values), (sizes[0], *sizes), strict=True))
        own = kwargs if bias is None else kwargs | {"position_bias": _bias_of(bias, start, size, len(keys))}
        out, weights = _eager(module, *parts, mask, **own)
        if cuts is not None:
            cuts.keep_pattern(layer.layer_id, weights)
        outs.append(out)
    out = torch.cat(outs, 1)
    return _padded(out, q.shape[0]), weights if len(outs) == 1 else None


def _both_ways(
    module: Any, call: PagedCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: ForwardBatch,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention of whole requests to their own rows, one after the other. Arguments and result: see `paged_attention`."""
    outs, weights, reach = [], None, call.layer.sliding_window
    eager = (batch.transformers_pass is not None and batch.transformers_pass.eager) or call.layer.logit_cap is not None
    for start, size in batch.batch_groups:
        q, k, v = (x[:, :, start : start + size] for x in (query, key, value))
        mask = None
        if reach is not None:
            at = torch.arange(size, device=q.device)
            mask = hide(q.new_zeros(size, size), (at[:, None] - at).abs() > reach)[None, None]
        if eager:
            out, weights = _eager(module, q, k, v, mask, **kwargs)
        else:
            grouped = k.shape[1] != q.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=call.layer.scaling, enable_gqa=grouped).transpose(
                1, 2
            )
        outs.append(out)
    return _padded(torch.cat(outs, 1), query.shape[2]), weights if len(outs) == 1 else None


def _are_single_rows(batch: ForwardBatch) -> bool:
    """Whether each request has one row, and continues from the pool, without cut edges."""
    has_pool = not batch.fresh_kv_only and batch.token_to_kv_pool is not None
    return batch.forward_mode.is_decode() and has_pool and batch.attention_cuts is None


def _by_row(
    module: Any,
    call: PagedCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: tuple[int, int],
    batch: ForwardBatch,
    kwargs: dict[str, Any],
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """The family's own eager attention of a decode pass, for many requests at once, over the keys that they select.

    Args: see `_by_request`.
    """
    layer, pool, table = call.layer, batch.token_to_kv_pool, batch.req_to_token_pool
    assert pool is not None and table is not None, "prepare_forward_batch_* sets the pools"
    pool.set_kv(layer.layer_id, batch.out_cache_loc[: len(k)], k, v)
    count, lens = batch.batch_size, batch.seq_lens[:, None]
    longest = int((batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).max())
    rows, at = table.req_to_token[batch.req_pool_indices], None if indices is None else indices[0, :count].long()
    if at is None or longest <= at.shape[1]:
        keys = torch.arange(longest, device=q.device)
        later = keys >= lens  # the table says nothing there
        slots = rows[:, :longest].where(~later, rows[:, :1])
        hidden = later if at is None else later | unselected(at, longest)
        if layer.sliding_window is not None:
            hidden = hidden | (lens - 1 - keys >= layer.sliding_window)
    else:
        at = at.sort(-1).values  # a key counts once, however often it is selected
        hidden = (at < 0) | (at >= lens)
        hidden[:, 1:] |= at[:, 1:] == at[:, :-1]
        slots = rows.gather(1, at.masked_fill(hidden, 0))
    bias = kwargs.get("position_bias")
    if bias is not None:
        bias = _bias_of(bias, 0, count, longest, lens[:, 0]).transpose(0, 2)
    outs, together = [], max(1, MAX_GATHERED // (slots.shape[1] * layer.num_kv_heads * layer.head_dim))
    for start in range(0, count, together):
        at = slots[start : start + together].long()
        stored = zip(pool.get_kv(layer.layer_id), pool.scales(layer.layer_id), sizes, strict=True)
        keys, values = (
            read_rows(x, at.flatten(), q.dtype, scale)[:, :: call.copies, :size].unflatten(0, at.shape).transpose(1, 2)
            for x, scale, size in stored
        )
        queries = q[start : start + len(at), :, None, : sizes[0]]
        mask = hide(q.new_zeros(at.shape), hidden[start : start + len(at)])[:, None, None]
        own = kwargs if bias is None else kwargs | {"position_bias": bias[start : start + len(queries)]}
        outs.append(_eager(module, queries, keys, values, mask, **own)[0])
    return _padded(torch.cat(outs).transpose(0, 1), q.shape[0])


def _bias_of(bias: torch.Tensor, start: int, size: int, keys: int, lens: torch.Tensor | None = None) -> torch.Tensor:
    """The bias [1, heads, queries, keys] of `size` queries, from row `start` on.

    Args:
        bias: bias of one request, or [1, 1, heads, tokens, extent] by distance, the largest first.
        keys: number of keys of the request; its queries are the last positions.
        lens: the length of each query's request, where each is of another request; `keys` is the largest.
    """
    if bias.ndim == 4:
        return bias[:, :, start : start + size]
    by_distance, extent = bias[0, :, :, start : start + size], bias.shape[-1]
    queries = torch.arange(keys - size, keys, device=bias.device) if lens is None else lens - 1
    back = queries[:, None] - torch.arange(keys, device=bias.device)
    at = (extent - 1 - back).clamp(0, extent - 1).expand(*by_distance.shape[:2], -1, -1)
    return by_distance.gather(-1, at).masked_fill((back < 0) | (back >= extent), 0.0)


def _padded(out: torch.Tensor, rows: int) -> torch.Tensor:
    """[1, requests' rows, heads, size] with zeros up to `rows`."""
    padding = rows - out.shape[1]
    return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


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
    return hide(torch.zeros(hidden.shape, dtype=like.dtype, device=like.device), hidden)[None, None]


def hide(mask: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """`mask` with the lowest number of its dtype where keys are `hidden`."""
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def unselected(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """The keys [..., queries, keys] bool that are not among `indices` [..., queries, selected], which may be any numbers."""
    at = indices.long()  # traces edit them
    at = at.masked_fill((at < 0) | (at >= keys), keys)
    hidden = torch.ones(*at.shape[:-1], keys + 1, dtype=torch.bool, device=at.device)
    return hidden.scatter_(-1, at, False)[..., :keys]


def eager_attention_of(module: nn.Module) -> Callable[..., Any] | None:
    """`eager_attention_forward` of the file that defines the module's class, or the class's method."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return own or eager_method_of(module)


def _eager(module: nn.Module, *tensors: torch.Tensor | None, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    eager = eager_attention_of(module)
    if eager is None:
        raise NotImplementedError(f"{type(module).__name__} has no eager attention in transformers")
    return eager(module, *tensors, **{**kwargs, "dropout": 0.0})


AttentionInterface.register(PAGED, paged_attention)
AttentionInterface.register(PAGED_INDEXED, paged_attention)
AttentionMaskInterface.register(PAGED_INDEXED, eager_mask)  # of a call by a block
