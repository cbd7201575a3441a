"""Attention that a family's modules compute themselves, over the KV pool: they get it through the cache that they update.

BLOOM, Falcon, MPT, XGLM and others call neither transformers' attention interface nor a replaceable method. Their modules get
the keys and values of all requests of the pass, one request after the other. A mask lets each query see only its own request.
A pass computes tokens x keys scores, over the keys of all its requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import eager_mask

from ...attention.attention_backend import RadixAttention
from ...core.forward_batch import ForwardBatch
from ...mem_cache.memory_pool import read_rows
from .attention_interface import pool_rows

CACHED = "pymllm_interp_cached"
"""The attention implementation that makes models ask `request_mask` for their masks. No such attention function exists."""


class _Current(local):
    cache: RequestsCache | None = None


_current = _Current()


@dataclass(frozen=True)
class CacheRows:
    """Index of each row's request, and the row's position: [rows] int64 each."""

    requests: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, lens: list[int], firsts: list[int], device: torch.device) -> CacheRows:
        """Requests of `lens` rows; their first rows have the positions `firsts`."""
        pairs = list(zip(lens, firsts, strict=True))
        rows = [torch.full((size,), i) for i, size in enumerate(lens)]
        positions = [torch.arange(first, first + size) for size, first in pairs]
        return cls(torch.cat(rows).to(device), torch.cat(positions).to(device))


class RequestsCache(Cache):
    """The keys and values that a pass's queries attend to, request by request. This one holds the pass's own, and no others.

    Args:
        queries, keys: rows of the pass, and rows returned by `update`.
    """

    def __init__(self, queries: CacheRows, keys: CacheRows) -> None:
        super().__init__(layers=[])
        self.queries, self.keys = queries, keys
        self.rule: Any = None  # of the last mask

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Keys and values of the pass, [1, kv_heads, tokens, head_dim] -> of all requests, [1, kv_heads, keys, head_dim]."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Keys from before the pass."""
        return len(self.keys.positions) - len(self.queries.positions)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return len(self.keys.positions), 0

    def padding_mask(self) -> torch.Tensor:
        """Value of `attention_mask` [1, keys]. BLOOM and Falcon take ALiBi's positions as its cumulative sum less 1.

        It starts over at each request. Only at position 0 is the factor of the positions not 1.
        """
        starts = self.keys.positions == 0
        lens = torch.bincount(self.keys.requests)
        mask = torch.ones_like(self.keys.positions)
        mask[starts] -= torch.cat((lens.new_zeros(1), lens[:-1]))
        return mask[None]

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Have models make their masks and biases for this cache."""
        before, _current.cache = _current.cache, self
        try:
            yield
        finally:
            _current.cache = before


class PoolCache(RequestsCache):
    """The keys and values of a pass's requests, over their pages.

    Args:
        layers: layers of the pool, by the layer index that modules update the cache with.
        windows: sliding windows by layer index, for a batch of one request. After the prompt, transformers' cache of such a
            layer ends there.
    """

    def __init__(
        self, batch: ForwardBatch, layers: dict[int, RadixAttention], windows: dict[int, int] | None = None
    ) -> None:
        device, groups = batch.input_ids.device, batch.batch_groups
        lens = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist()
        sizes = [size for _, size in groups]
        firsts = [length - size for length, size in zip(lens, sizes, strict=False)]
        queries = CacheRows.of(sizes, firsts, device)
        self._fresh = batch.fresh_kv_only or batch.token_to_kv_pool is None
        keys = queries if self._fresh else CacheRows.of(lens[: len(groups)], [0] * len(groups), device)
        super().__init__(queries, keys)
        self._batch, self._layers, self._windows = batch, layers, windows or {}
        if not self._fresh:
            assert batch.req_to_token_pool is not None, "prepare_forward_batch_* sets the pools"
            table = batch.req_to_token_pool.req_to_token
            self._slots = table[batch.req_pool_indices[keys.requests], keys.positions].to(torch.int64)

    @property
    def is_sliding(self) -> list[bool]:
        return [index in self._windows for index in range(max(self._layers) + 1)]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * (max(self._layers) + 1)

    @property
    def is_dummy(self) -> list[bool]:
        return self.is_linear

    def _first(self, layer_idx: int) -> int:
        """The first key of a layer."""
        return max(0, self.get_seq_length() - self._windows[layer_idx] + 1) if layer_idx in self._windows else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        first = self._first(layer_idx)
        return len(self.keys.positions) - first, first

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self._fresh:
            return key_states, value_states
        batch, pool, layer = self._batch, self._batch.token_to_kv_pool, self._layers[layer_idx]
        assert pool is not None, "prepare_forward_batch_* sets the pools"
        copies, states = layer.num_kv_heads // key_states.shape[1], (key_states, value_states)
        rows = (pool_rows(x, layer.head_dim).repeat_interleave(copies, 1) for x in states)
        pool.set_kv(layer.layer_id, batch.out_cache_loc, *rows)
        slots = self._slots[self._first(layer_idx) :]
        stored = zip(pool.get_kv(layer.layer_id), pool.scales(layer.layer_id), states, strict=True)
        key, value = (
            read_rows(rows, slots, x.dtype, scale)[:, ::copies, : x.shape[-1]].transpose(0, 1).unsqueeze(0)
            for rows, scale, x in stored
        )
        return key, value


def cache_windows(config: PretrainedConfig) -> dict[int, int]:
    """The sliding windows of transformers' cache by layer index, of the layers that have one."""
    layers: Any = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return {i: layer.sliding_window for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False)}


def request_mask(*, mask_function: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """Added to scores [1, 1, queries, keys]: 0 if a query sees a key, else the dtype's lowest number."""
    cache = _current.cache
    if cache is None:  # a block calls a model on other inputs
        return eager_mask(mask_function=mask_function, dtype=dtype, **kwargs)
    cache.rule = mask_function
    queries, keys = cache.queries, cache.keys
    zero = torch.zeros((), dtype=torch.int64, device=keys.positions.device)
    seen = mask_function(zero, zero, queries.positions[:, None], keys.positions[None])
    seen = seen & (queries.requests[:, None] == keys.requests)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


class _Alibi:
    """Replacement of MPT's `build_mpt_alibi_tensor`: the biases [heads, 1, keys] of the pass's keys."""

    def __init__(self, build: Any) -> None:
        self._build = build

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        biases, cache = self._build(*args, **kwargs), _current.cache
        if cache is None:
            return biases
        requests, positions = cache.keys.requests, cache.keys.positions
        last = torch.zeros_like(positions).scatter_reduce(0, requests, positions, "amax")[requests]
        return biases[..., biases.shape[-1] - 1 - last + positions]  # a request's last key has the last bias


def serve_biases(model: nn.Module) -> None:
    """Give the biases of the pass's keys to the modules that make them from the model's longest context."""
    for module in model.modules():
        if hasattr(module, "build_mpt_alibi_tensor"):
            module.build_mpt_alibi_tensor = _Alibi(module.build_mpt_alibi_tensor)  # pyright: ignore


AttentionMaskInterface.register(CACHED, request_mask)
