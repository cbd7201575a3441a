"""The contract of an attention backend.

A backend plans each pass once (`init_forward_metadata`) and then computes every layer's attention (`forward`) over the
batch's paged KV pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..core.forward_batch import ForwardBatch


class AttentionBackend(ABC):
    """Attention over paged KV. tests/attention/test_attention.py is the conformance suite for every implementation."""

    by_row = False
    """Whether each query is computed by itself (batch-invariant mode)."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the pass, before its first layer: set `forward_batch.attn_metadata` to the data that all layers share."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,  # [tokens, heads, head_dim]
        k: torch.Tensor,  # [tokens, kv_heads, head_dim]
        v: torch.Tensor,  # [tokens, kv_heads, head_dim]
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Write `k` and `v` to the KV slots of the rows, then compute causal attention over each request's positions.

        The tensors have the rows of requests, without padding.

        Returns:
            [tokens, heads * head_dim] in the dtype of `q`, in fresh memory.
        """

    def attend_in_place(
        self, q: torch.Tensor, out: torch.Tensor, forward_batch: ForwardBatch
    ) -> Callable[[RadixAttention], None]:
        """A function that computes a layer's attention from `q` to `out`, both [tokens, heads, head_dim] and at fixed addresses.

        K and V of the pass are in the pool already.
        """
        backend, pool = self, forward_batch.token_to_kv_pool
        assert pool is not None, "prepare_forward_batch_* sets the pools"

        def attend(layer: RadixAttention) -> None:
            k, v = pool.get_kv(layer.layer_id)
            out.copy_(backend.forward(q, k, v, layer, forward_batch, save_kv_cache=False).view_as(out))

        return attend

    def can_replay(self, forward_batch: ForwardBatch, bs: int) -> bool:
        """Whether the decode pass captured for `bs` rows supports the lengths of this batch."""
        return True

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the static buffers for the plans of captured decode passes."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a decode pass into the static buffers, for capture."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a decode pass into the static buffers, for replay."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    def forget_plan(self, forward_batch: ForwardBatch) -> None:  # noqa: B027
        """Drop data that one layer of a captured decode pass computed for later layers.

        Graph segments are captured separately, so each computes the data again. The default backend has none.
        """


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The softmax of scores [..., keys] with ``exp(sinks)`` in its sum. Sinks broadcast to [..., 1]."""
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class RadixAttention:
    """The parameters of one attention layer, for a backend.

    Not a `torch.nn.Module`, because the module tree has the names of the transformers class.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    """A token attends to itself and to `sliding_window - 1` tokens before; None: to all."""
    logit_cap: float | None = None
    """Scores become ``cap * tanh(scores / cap)`` before the softmax."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """[heads]: each head's softmax has ``exp(sink)`` in its sum, beside the keys (Xiao et al., 2023; gpt-oss). None: no sinks."""

    def softmax(self, scores: torch.Tensor, heads: torch.Tensor | None = None) -> torch.Tensor:
        """The weights of the keys.

        Args:
            scores: [heads, queries, keys].
            heads: [heads] int64, the query heads of `scores`; None: all.
        """
        if self.sinks is None:
            return scores.softmax(-1)
        return softmax_with_sinks(scores, (self.sinks if heads is None else self.sinks[heads]).view(-1, 1, 1))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim]."""
        assert forward_batch.attn_backend is not None, "prepare_forward_batch_* sets the attention backend"
        rows, requests = q.shape[0], forward_batch.num_request_tokens
        q, k, v = q[:requests], k[:requests], v[:requests]
        out = forward_batch.attn_backend.forward(q, k, v, self, forward_batch)
        if forward_batch.attention_cuts is not None:
            if not forward_batch.fresh_kv_only:
                assert forward_batch.token_to_kv_pool is not None, "prepare_forward_batch_* sets the pools"
                k, v = forward_batch.token_to_kv_pool.get_kv(self.layer_id)
            out = forward_batch.attention_cuts.apply(out, q, k, v, self, forward_batch)
        return out if requests == rows else F.pad(out, (0, 0, 0, rows - requests))

    def of_written(self, q: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attention of q [tokens, heads, head_dim], with the pass's k and v already in the pool: [tokens, heads * head_dim]."""
        backend, pool = forward_batch.attn_backend, forward_batch.token_to_kv_pool
        assert backend is not None and pool is not None, "prepare_forward_batch_* sets the backend and the pools"
        rows, requests = q.shape[0], forward_batch.num_request_tokens
        q, (k, v) = q[:requests], pool.get_kv(self.layer_id)
        out = backend.forward(q, k, v, self, forward_batch, save_kv_cache=False)
        if forward_batch.attention_cuts is not None:
            out = forward_batch.attention_cuts.apply(out, q, k, v, self, forward_batch)
        return out if requests == rows else F.pad(out, (0, 0, 0, rows - requests))
