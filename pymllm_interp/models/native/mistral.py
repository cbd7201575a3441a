"""Mistral: Llama without biases. Its sliding window comes from the model's spec."""

from __future__ import annotations

from transformers import PretrainedConfig

from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class MistralAttention(LlamaAttention):
    """Llama's attention without biases."""

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        return False, False


class MistralDecoderLayer(LlamaDecoderLayer):
    attention_cls = MistralAttention


class MistralModel(LlamaModel):
    layer_cls = MistralDecoderLayer


class MistralForCausalLM(LlamaForCausalLM):
    decoder_cls = MistralModel
