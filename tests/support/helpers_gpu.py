"""Models that are large enough for FlashInfer's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 384, "intermediate_size": 320, "num_hidden_layers": 3, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.05,
}  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, num_attention_heads=6, num_key_value_heads=2, head_dim=64),
    "qwen3": lambda: Qwen3Config(**COMMON, num_attention_heads=4, num_key_value_heads=1, head_dim=128),
}
