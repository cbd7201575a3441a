"""Qwen2, with biases on q, k and v. Qwen3, with a norm on each head of q and k. The two inside Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ...layers.edits.base import residual_sum
from ...layers.norm import RMSNorm, norm_heads
from ...layers.rope import MultimodalRotaryEmbedding
from ..base import Rotations
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class Qwen2Attention(LlamaAttention):
    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        return True, False


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_cls = Qwen2Attention


class Qwen2Model(LlamaModel):
    layer_cls = Qwen2DecoderLayer


class Qwen2ForCausalLM(LlamaForCausalLM):
    decoder_cls = Qwen2Model


class Qwen3Attention(LlamaAttention):
    norm_cls = RMSNorm

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.q_norm = self.norm_cls(self.head_dim, config.rms_norm_eps, spec.dtype, device)
        self.k_norm = self.norm_cls(self.head_dim, config.rms_norm_eps, spec.dtype, device)

    def normed(self, projected: torch.Tensor, norm: str) -> torch.Tensor:
        heads = projected.reshape(1, projected.shape[1], -1, self.head_dim)
        return getattr(self, norm)(heads)[0]

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q_norm, k_norm, qkv = self.q_norm, self.k_norm, super().projected_fused(x, batch)
        return norm_heads(qkv, q_norm.weight, k_norm.weight, self.num_kv_heads, q_norm.eps, q_norm.kind)


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_cls = Qwen3Attention


class Qwen3Model(LlamaModel):
    layer_cls = Qwen3DecoderLayer


class Qwen3ForCausalLM(LlamaForCausalLM):
    decoder_cls = Qwen3Model


class Qwen2_5_VLAttention(Qwen2Attention):
    """Qwen2's attention, under the name that has transformers' eager attention."""


class Qwen2_5_VLDecoderLayer(Qwen2DecoderLayer):
    attention_cls = Qwen2_5_VLAttention


class Qwen2_5_VLTextModel(Qwen2Model):
    layer_cls = Qwen2_5_VLDecoderLayer

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        return MultimodalRotaryEmbedding(config, spec.head_dim, max_positions, spec.dtype, device)


class Qwen3VLTextAttention(Qwen3Attention):
    """Qwen3's attention, under the name that has transformers' eager attention."""


class Qwen3VLTextDecoderLayer(Qwen3DecoderLayer):
    attention_cls = Qwen3VLTextAttention

    def forward_fused(
        self, h: torch.Tensor, delta: torch.Tensor | None, rotation: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> tuple[torch.Tensor, Any]:
        h, out = super().forward_fused(h, delta, rotation, batch)
        deep = batch.deepstack
        if deep is None or self.layer_idx >= deep.num_layers(h.shape[-1]):
            return h, out
        return deep.added(residual_sum(h, out, batch.site_ops, self._mlp_add), self.layer_idx), None


class Qwen3VLTextModel(Qwen3Model):
    """Qwen3's decoder. States of images are added behind the outputs of its first layers, which sites and modules show without."""

    layer_cls = Qwen3VLTextDecoderLayer

    def through_layers(
        self, h: torch.Tensor, position_embeddings: Rotations, position_ids: torch.Tensor, batch: ForwardBatch,
        span: tuple[int, int | None] = (0, None),
    ) -> torch.Tensor:  # fmt: skip
        inputs, deep = (position_embeddings, position_ids, batch), batch.deepstack
        if deep is None:
            return super().through_layers(h, *inputs)
        batch.deepstack, count, outputs = None, deep.num_layers(h.shape[-1]), list[torch.Tensor]()
        try:
            for i in range(count):
                outputs.append(super().through_layers(h, *inputs, (i, i + 1)))
                h = deep.added(outputs[-1], i)
            h = super().through_layers(h, *inputs, (count, None))
            if batch.transformers_pass is not None:
                batch.transformers_pass.collect_outputs(outputs)
            return h
        finally:
            batch.deepstack = deep

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        return MultimodalRotaryEmbedding(config, spec.head_dim, max_positions, spec.dtype, device)
