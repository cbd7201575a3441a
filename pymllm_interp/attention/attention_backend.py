"""The contract of an attention backend.

A backend plans once a pass (`init_forward_metadata`) and then serves every layer of it (`forward`), reading and writing
the paged KV pool that the batch points to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.forward_batch import ForwardBatch

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..core.forward_batch import ForwardBatch


class AttentionBackend(ABC):
    """Attention over paged KV. One conformance suite (tests/test_attention.py) holds for every implementation."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the pass: whatever all layers share goes into `forward_batch.attn_metadata`. No layer has run yet."""

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
        """Write `k` and `v` to the rows' slots, then attend causally to each request's positions so far.

        Returns:
            [tokens, heads * head_dim], in `q`'s dtype; fresh memory.
        """

    def can_replay(self, forward_batch: ForwardBatch, bs: int) -> bool:
        """Whether the decode pass that was captured for `bs` rows serves the lengths of this batch."""
        return True

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the static buffers that captured decode passes read their plan from."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a decode pass into the static buffers, for capture."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a decode pass into the static buffers, for replay."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    def forget_plan(self, forward_batch: ForwardBatch) -> None:  # noqa: B027
        """Drop what layers of a captured decode pass have computed for those after them: they are captured apart.

        Backends that compute nothing of the kind have nothing to drop.
        """


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
