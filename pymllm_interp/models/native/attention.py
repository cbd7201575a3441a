"""Attention of native decoders over the paged KV cache; families differ in their projections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from ...attention.attention_backend import RadixAttention
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec, attention_add, delta_site
from ...layers.edits.base import apply_inner
from ...layers.rope import apply_rope, heads_of, rope_and_write, rotation_of
from ..base import ProjectedBranch
from ..transformers.transformers_pass import set_transformers_forward


class Attention(ProjectedBranch):
    """Multi-head or grouped-query attention (Ainslie et al., 2023).

    Attributes:
        by_head: whether the projection has q, k and v of each head next to each other.
        scaling: scale of the scores.
        halved_rotation: see `rotation_of`.
    """

    inner_kind, by_head, halved_rotation = "z", False, False

    def __init__(
        self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, scaling: float, logit_cap: float | None = None
    ) -> None:
        super().__init__(layer_idx)
        self.head_dim, self.scaling = spec.head_dim, scaling
        self.num_heads, self.num_kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.output_site = delta_site(attention_add(layer_idx))
        set_transformers_forward(self, config, spec)
        window = spec.sliding_windows[layer_idx]
        self.attn = RadixAttention(
            spec.kv_layer(layer_idx), self.num_heads, self.num_kv_heads, self.head_dim, scaling, window, logit_cap
        )

    @abstractmethod
    def projected(self, x: torch.Tensor, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        """q, k and v [tokens, heads, head_dim] of x [1, tokens, hidden], before RoPE, captured."""

    @abstractmethod
    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`projected` without a call to a module: [tokens, heads + 2 * kv_heads, head_dim], in the order of `by_head`."""

    def last(self, z: torch.Tensor) -> torch.Tensor:
        """The modules after the heads: z [1, tokens, heads * head_dim] -> [1, tokens, hidden]."""
        return getattr(self, self.last_projection)(z)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        forward_batch: ForwardBatch,
        position_embeddings: tuple[torch.Tensor, ...] = (),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([1, tokens, hidden], None), or with transformers' eager attention its weights [1, heads, queries, keys]."""
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        if transformers_pass is not None and transformers_pass.eager:
            kwargs |= {"position_embeddings": position_embeddings} if position_embeddings else {}
            out, weights = transformers_pass.attend(self, hidden_states=hidden_states, **kwargs)
            if forward_batch.attention_cuts is not None:
                forward_batch.attention_cuts.keep_pattern(self.layer_idx, weights)
            return self.after_ops(out, forward_batch), weights
        rotation = rotation_of(forward_batch, *position_embeddings, halved=self.halved_rotation)
        turn = dict(zip(("cos", "sin"), rotation, strict=False))
        out = self.run_segments(forward_batch, x=hidden_states, **turn)
        if out is None:
            z = self.heads_output(hidden_states, rotation, forward_batch)
            out = self.last(apply_inner(z, site_ops, self.layer_idx, "z"))
        return self.after_ops(out, forward_batch), None

    def heads_output(self, x: torch.Tensor, rotation: Sequence[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        """z [1, tokens, heads * head_dim] of x [1, tokens, hidden], module by module, before its ops."""
        return self.attend(*self.projected(x, batch), rotation=rotation, batch=batch)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Sequence[torch.Tensor], batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of q, k and v [tokens, heads, head_dim], before RoPE: [1, tokens, heads * head_dim]."""
        if rotation:
            q, k = apply_rope(q, *rotation), apply_rope(k, *rotation)
        return self.attn(q, k, v, batch).unsqueeze(0)

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden], and the cosines and signed sines of a `rotation`, if any."""
        x, *rotation = inputs
        z = self.attend_fused(self.projected_fused(x, batch), rotation, batch)
        return apply_inner(z, batch.site_ops, self.layer_idx, "z")

    def attend_fused(self, qkv: torch.Tensor, rotation: Sequence[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        """Attention over the result of `projected_fused`."""
        if batch.fresh_kv_only or batch.token_to_kv_pool is None:  # k and v do not go to the pool
            return self.attend(*heads_of(qkv, self.num_kv_heads, self.by_head), rotation=rotation, batch=batch)
        return self.attn.of_written(self._write(qkv, rotation, batch), batch).unsqueeze(0)

    def write_kv(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Write k and v to the pool. `inputs` are the inputs of `inner_fused`. Returns the rotated q [tokens, heads, head_dim]."""
        x, *rotation = inputs
        return self._write(self.projected_fused(x, batch), rotation, batch)

    def _write(self, qkv: torch.Tensor, rotation: Sequence[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        pool, (cos, sin), layer = batch.token_to_kv_pool, rotation or (None, None), self.attn.layer_id
        assert pool is not None, "prepare_forward_batch_* sets the pools"
        return rope_and_write(qkv, cos, sin, pool, layer, batch.out_cache_loc, batch.query_buffer, self.by_head)
