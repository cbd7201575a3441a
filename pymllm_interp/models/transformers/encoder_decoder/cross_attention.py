"""Attention of decoder layers to the encoder's output, over the pool of cross keys and values.

A cross-attention module finds keys and values in its cache (`CrossCache`), as in transformers after the first token. Its
projections of the encoder's output run once, after the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from ....core.current_pass import current_batch
from ....core.forward_batch import ForwardBatch
from ....core.pass_parts import CrossRows
from ....mem_cache.memory_pool import read_rows

MAX_GATHERED = 1 << 26
"""Most values of K that are gathered at once."""


class CrossLayer(NamedTuple):
    """A cross-attention module's layer of the pool, and its heads."""

    layer: int
    num_heads: int
    head_dim: int


def cross_layer_of(module: nn.Module) -> CrossLayer | None:
    """The layer of a cross-attention module; None of any other module."""
    return vars(module).get("cross_layer")


def attend_across(module: Any, query: torch.Tensor, scaling: float | None, batch: ForwardBatch) -> torch.Tensor:
    """Attention of a pass's rows to the encoder outputs of their requests. Requests with one row are one batch.

    Args:
        query: [1, heads, tokens, head_dim].
        scaling: factor of scores.

    Returns:
        [1, tokens, heads, head_dim]. Rows without a request are zeros, and all rows of a pass without requests.
    """
    cross, layer = batch.cross, module.cross_layer.layer
    out = query.new_zeros(1, query.shape[2], *query.shape[1::2])
    if cross is None:
        return out
    single: list[tuple[int, int]] = []
    parts: list[tuple[slice, torch.Tensor]] = []
    for request, (start, size) in enumerate(batch.batch_groups):
        if size == 1 and cross.fresh is None:
            single.append((request, start))
            continue
        keys, values = own_keys(cross, layer, request, query.dtype)
        rows = slice(start, start + size)
        parts.append((rows, F.scaled_dot_product_attention(query[:, :, rows], keys, values, scale=scaling)))
    if torch.is_grad_enabled() and parts:
        return _padded(torch.cat([found for _, found in parts], 2).transpose(1, 2), out.shape[1])
    for rows, found in parts:
        out[:, rows] = found.transpose(1, 2)
    longest = max((cross.lens[request] for request, _ in single), default=0)
    together = max(1, MAX_GATHERED // max(longest * query.shape[1] * query.shape[3], 1))
    for first in range(0, len(single), together):
        requests, rows = (list(numbers) for numbers in zip(*single[first : first + together], strict=True))
        out[0, rows] = _of_rows(cross, layer, query[0, :, rows].transpose(0, 1), requests, scaling)
    return out


def own_keys(cross: CrossRows, layer: int, request: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, heads, positions, head_dim] of one request of a pass."""
    if cross.fresh is not None:
        found = cross.fresh[request][layer]
    else:
        slots = cross.pool.table[cross.rows[request], : cross.lens[request]].long()
        found = (read_rows(x, slots, dtype) for x in cross.pool.kv.get_kv(layer))
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in found)
    return keys, values


def _of_rows(
    cross: CrossRows, layer: int, query: torch.Tensor, requests: list[int], scaling: float | None
) -> torch.Tensor:
    """Attention of one row of each of some requests: [requests, heads, head_dim]."""
    slots, mask = _slots_of(cross, tuple(requests), query.device)
    keys, values = (
        read_rows(x, slots.flatten(), query.dtype).unflatten(0, slots.shape).transpose(1, 2)
        for x in cross.pool.kv.get_kv(layer)
    )
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, mask, scale=scaling)[:, :, 0]


def _slots_of(
    cross: CrossRows, requests: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(slots [requests, positions], mask [requests, 1, 1, positions] or None). All layers of a pass read the same ones."""
    if requests not in cross.known:
        lens = [cross.lens[request] for request in requests]
        longest, mask = max(lens), None
        if min(lens) < longest:
            mask = (torch.arange(longest, device=device) < torch.tensor(lens, device=device)[:, None])[:, None, None]
        cross.known[requests] = cross.pool.table[cross.rows[list(requests)], :longest].long(), mask
    return cross.known[requests]


def _padded(out: torch.Tensor, rows: int) -> torch.Tensor:
    return F.pad(out, (0, 0, 0, 0, 0, rows - out.shape[1]))


# -- the cache ---------------------------------------------------------------------------


class CrossCache(EncoderDecoderCache):
    """The cache that a decoder gets: its cross-attention modules find their keys and values there.

    Args:
        own: cache of self-attention; None: modules write the pool's pages themselves.
    """

    def __init__(self, own: Any, layers: list[CrossLayer], like: torch.Tensor) -> None:
        self.self_attention_cache = _Pages() if own is None else own
        self.cross_attention_cache: Any = _Stored(layers, like)
        self.is_updated: Any = _Always()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.self_attention_cache.get_seq_length()


class _Always(Mapping[int, bool]):
    """Every layer has its keys and values."""

    def __getitem__(self, layer: int) -> bool:
        return True

    def __setitem__(self, layer: int, value: bool) -> None:
        """Some modules say so of their layer."""

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def get(self, key: int, default: Any = None) -> bool:
        return True


class _Pages:
    """Self-attention's cache of a pass over pages: the attention function writes them."""

    is_sliding = is_linear = is_dummy = (False,)  # of its layers, as makers of masks read them

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions come from the pass (models/transformers/position_rules.py)."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The pass's own rows."""
        return query_length, 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> Any:
        """The keys and values of the pass."""
        return key_states, value_states


class _Stored:
    """The cross keys and values by layer, in transformers' form."""

    def __init__(self, layers: list[CrossLayer], like: torch.Tensor) -> None:
        self.layers = [_StoredLayer(layer, like) for layer in layers]


class _StoredLayer:
    """Keys and values of one layer. They are zeros of one position, except in a pass with eager attention."""

    def __init__(self, layer: CrossLayer, like: torch.Tensor) -> None:
        self._layer, self._like = layer, like

    @property
    def keys(self) -> torch.Tensor:
        return self._states()[0]

    @property
    def values(self) -> torch.Tensor:
        return self._states()[1]

    def _states(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, (layer, heads, size) = current_batch(), self._layer
        outputs = None if batch is None else batch.transformers_pass
        if batch is not None and batch.cross is not None and outputs is not None and outputs.eager:
            return own_keys(batch.cross, layer, 0, self._like.dtype)
        empty = self._like.new_zeros(1, heads, 1, size)
        return empty, empty
