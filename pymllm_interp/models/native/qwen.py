"""Qwen2, with biases on q, k and v. Qwen3, with a norm on each head of q and k. The two inside Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ...layers.norm import RMSNorm, norm_heads
from ...layers.rope import MultimodalRotaryEmbedding
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


class Qwen3VLTextModel(Qwen3Model):
    layer_cls = Qwen3VLTextDecoderLayer

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        return MultimodalRotaryEmbedding(config, spec.head_dim, max_positions, spec.dtype, device)
