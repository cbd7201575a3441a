"""A layer's door to the attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..core.forward_batch import ForwardBatch


@dataclass(frozen=True)
class RadixAttention:
    """What a backend must know of one attention layer.

    Not a `torch.nn.Module`: a model's module tree has the names of its `transformers` class, and this one has none there.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` before it; None sees all."""
    logit_cap: float | None = None
    """Scores become ``cap * tanh(scores / cap)`` before the softmax."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim]."""
        assert forward_batch.attn_backend is not None, "prepare_forward_batch_* sets the attention backend"
        return forward_batch.attn_backend.forward(q, k, v, self, forward_batch)

    def of_written(self, q: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """The same, where the pass's k and v are in the pool already."""
        backend, pool = forward_batch.attn_backend, forward_batch.token_to_kv_pool
        assert backend is not None and pool is not None, "prepare_forward_batch_* sets the backend and the pools"
        return backend.forward(q, *pool.get_kv(self.layer_id), self, forward_batch, save_kv_cache=False)
