"""Passes with transformers' outputs beyond logits: attention weights, and the hidden states of all layers.

transformers' own attention forward runs on the native attention module: its projections and norms have the same names. It
reads and writes the request's KV through `PagedCache`; such a pass holds one request.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ...core.forward_batch import ForwardBatch, SiteOps
from ...core.model_spec import ModelSpec
from ...layers.edits.base import apply_inner, capture_inner
from ...layers.fused_qkv import FusedQKV
from ...mem_cache.memory_pool import read_rows
from .parts.cache_names import cache_parameter

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""Children of attentions that have a projection each for q, k and v."""


class TransformersForward:
    """The forward of a module's class in transformers, to be called on a native module.

    Args:
        family: the folder of transformers that has the class.

    Attributes:
        instrumented: the same forward with its operations served to hooks, once `.source` was used; else None.
    """

    def __init__(self, family: str, class_name: str) -> None:
        self.family, self.class_name = family, class_name
        self.instrumented: Callable[..., Any] | None = None

    @cached_property
    def original(self) -> Callable[..., Any]:
        """The class's ``forward(module, ...)``."""
        module = import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        return inspect.unwrap(getattr(module, self.class_name).forward)  # without translation of old parameter names

    @cached_property
    def cache_name(self) -> str:
        """The name by which it takes the cache."""
        return cache_parameter(inspect.signature(self.original).parameters)

    def __call__(self, module: Any, **kwargs: Any) -> Any:
        return (self.instrumented or self.original)(module, **kwargs)


@cache
def layer_cache_name() -> str:
    """The name by which the decoder layers of the installed transformers take the cache."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return cache_parameter(inspect.signature(LlamaDecoderLayer.forward).parameters)


def set_transformers_forward(attention: Any, config: PretrainedConfig, spec: ModelSpec) -> None:
    """Set the attribute `transformers_forward` of an attention, and further attributes that this forward reads."""
    family = type(config).__module__.rpartition(".configuration_")[2]
    attention.transformers_forward = TransformersForward(family, type(attention).__name__)
    attention.config = copy.copy(config)
    attention.config._attn_implementation = "eager"
    attention.attention_dropout = 0.0
    attention.num_key_value_groups = spec.num_attention_heads // spec.num_key_value_heads
    attention.sliding_window = spec.sliding_windows[attention.layer_idx]


class TransformersPass:
    """One pass. `LlamaModel` and its layers call it where `ForwardBatch.transformers_pass` is set.

    Args:
        batch: batch of one request, with `eager`.
        eager: run transformers' own attention, with eager attention, in place of the attention backend.
        attentions, states: collect attention weights, or hidden states.

    Attributes:
        attentions: [1, heads, queries, keys] of each layer so far, if they are collected.
        hidden_states: [1, tokens, hidden] at the input of each layer so far, if collected; last, after the final norm.
    """

    def __init__(
        self, batch: ForwardBatch, spec: ModelSpec, *, eager: bool, attentions: bool = False, states: bool = False
    ) -> None:
        self.eager = eager
        self.attentions: list[torch.Tensor] | None = [] if attentions else None
        self.hidden_states: list[torch.Tensor] | None = [] if states else None
        self._batch, self._spec = batch, spec
        self._masks: dict[int | None, torch.Tensor] = {}

    @cached_property
    def _cache(self) -> PagedCache:
        return PagedCache(self._batch, self._spec)

    def layer_inputs(self, layer: int, hidden: torch.Tensor) -> dict[str, Any]:
        """Further arguments of a decoder layer, as transformers' model passes them. Collects its input `hidden`."""
        self.collect_input(hidden)
        if not self.eager:
            return {}
        window = self._spec.sliding_windows[layer]
        if window not in self._masks:
            self._masks[window] = self._mask(window, hidden.dtype)
        mask, cuts = self._masks[window], self._batch.attention_cuts
        if cuts is not None:
            if (opened := cuts.opened(mask.device)) is not None:
                mask = mask.masked_fill(opened[:, -mask.shape[-1] :], 0)
            cut = cuts.hidden(layer, self._spec.num_attention_heads, window, mask.device)
            if cut is not None:
                mask = mask.masked_fill(cut[..., -mask.shape[-1] :], torch.finfo(mask.dtype).min)
        return {"attention_mask": mask, layer_cache_name(): self._cache}

    def collect_input(self, hidden: torch.Tensor) -> None:
        """Collect the input of a layer."""
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)

    def collect_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Put outputs of the first layers in place of the inputs of the next, as transformers collects them."""
        if self.hidden_states is not None:
            self.hidden_states[1 : len(outputs) + 1] = outputs[: len(self.hidden_states) - 1]

    def attend(self, attention: nn.Module, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' forward of an attention: ([1, tokens, hidden], weights [1, heads, queries, keys])."""
        site_ops = self._batch.site_ops
        module = attention if site_ops is None else _WithSites(attention, site_ops)
        forward: Any = attention.transformers_forward
        if layer_cache_name() in kwargs:
            kwargs[forward.cache_name] = kwargs.pop(layer_cache_name())
        return forward(module, **kwargs)

    def end_attention(self, weights: torch.Tensor | None) -> None:
        """Collect a layer's attention weights, after the edits of hooks."""
        if self.attentions is not None and weights is not None:
            self.attentions.append(weights)

    def end_layers(self, hidden: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        """Collect the hidden states after the final norm. Returns the `collected` outputs."""
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)
        return self.collected()

    def collected(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """`attentions` and `hidden_states` of the model's output, if requested."""
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        if self.hidden_states is not None:
            found["hidden_states"] = tuple(self.hidden_states)
        if self.attentions is not None:
            found["attentions"] = tuple(self.attentions)
        return found

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Added to scores [1, 1, queries, keys], as transformers makes it: 0, or the lowest number of `dtype`."""
        queries = self._batch.positions
        assert queries is not None
        keys = self._cache.key_positions(window)
        back = queries.unsqueeze(1) - keys
        hidden = back < 0 if window is None else (back < 0) | (back >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


class PagedCache:
    """The cache that transformers' attention updates, over the request's pages. Without a pool, or in a pass with gradients,
    the prefix is empty. Then the pass has only its own K and V.
    """

    def __init__(self, batch: ForwardBatch, spec: ModelSpec) -> None:
        assert batch.batch_size == 1, "transformers' own attention runs for one request at a time"
        lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        self._batch, self._spec, self._length = batch, spec, int(lens[0])
        self._prefix = self._length - batch.num_tokens

    def key_positions(self, window: int | None) -> torch.Tensor:
        """Positions [keys] of the rows that `update` returns for a layer with this sliding window."""
        return torch.arange(self._first(window), self._length, device=self._batch.input_ids.device)

    def _first(self, window: int | None) -> int:
        return 0 if window is None else max(0, self._prefix - window + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the pass to the request's slots.

        Args:
            key_states, value_states: [1, kv_heads, tokens, head_dim].

        Returns:
            K and V of the positions that the pass may attend to, [1, kv_heads, keys, head_dim]. Like transformers' cache, all
            positions of the prompt's pass, and afterwards no more than the sliding window.
        """
        batch = self._batch
        if batch.fresh_kv_only:
            return key_states, value_states
        pool = batch.token_to_kv_pool
        assert pool is not None, "prepare_forward_batch_* sets the pools"
        fresh, layer = (key_states, value_states), self._spec.kv_layer(layer_idx)
        pool.set_kv(layer, batch.out_cache_loc, *(x[0].transpose(0, 1) for x in fresh))
        if not self._prefix:
            return fresh
        slots = self._prefix_slots(self._spec.sliding_windows[layer_idx])
        stored = zip(pool.get_kv(layer), pool.scales(layer), fresh, strict=True)
        key, value = (
            torch.cat((read_rows(old, slots, new.dtype, scale).transpose(0, 1).unsqueeze(0), new), 2)
            for old, scale, new in stored
        )
        return key, value

    def _prefix_slots(self, window: int | None) -> torch.Tensor:
        table = self._batch.req_to_token_pool
        assert table is not None, "prepare_forward_batch_* sets the pools"
        row = table.req_to_token.index_select(0, self._batch.req_pool_indices)[0]
        return row[self._first(window) : self._prefix].to(torch.int64)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of positions before the pass."""
        return self._prefix


class _WithSites:
    """An attention as transformers' forward sees it, with the ops and captures of the sites q, k, v and z."""

    def __init__(self, attention: nn.Module, site_ops: SiteOps) -> None:
        self._attention, self._site_ops = attention, site_ops

    def __getattr__(self, name: str) -> Any:
        attention: Any = self._attention
        found = getattr(attention, name)
        if name == attention.last_projection:
            return lambda z: found(apply_inner(z, self._site_ops, attention.layer_idx, "z"))
        if isinstance(found, FusedQKV):
            return lambda x: found.capture(found(x), self._site_ops)
        return partial(self._captured, found, name[0]) if name in PROJECTIONS else found

    def _captured(self, projection: nn.Module, kind: str, x: torch.Tensor) -> torch.Tensor:
        projected = projection(x)
        capture_inner(projected, self._site_ops, self._attention.layer_idx, kind)  # pyright: ignore[reportArgumentType]
        return projected
