"""Specs of the encoders and decoders of T5, BART and Whisper, from a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from ....core.families import ENCODER_DECODERS, SOURCE_ENCODERS
from ....core.model_spec import ModelSpec
from ..structure import UNBOUNDED_CONTEXT

UNBOUNDED_SOURCE = 4096
"""Positions of the longest encoder input if the config states none (relative positions)."""


def encoder_spec(config: PretrainedConfig, dtype: torch.dtype) -> ModelSpec:
    """Spec of a model's encoder, from its config."""
    text: Any = config
    heads = getattr(text, "encoder_attention_heads", None) or text.num_heads
    limit = getattr(text, "max_source_positions", None) or getattr(text, "max_position_embeddings", None)
    layers = getattr(text, "encoder_layers", None) or text.num_layers
    return ModelSpec(
        family=SOURCE_ENCODERS[text.model_type],
        num_hidden_layers=layers,
        hidden_size=text.d_model,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=getattr(text, "d_kv", None) or text.d_model // heads,
        intermediate_size=getattr(text, "encoder_ffn_dim", None) or text.d_ff,
        vocab_size=text.vocab_size,
        context_len=limit or UNBOUNDED_SOURCE,
        sliding_windows=(None,) * layers,
        rope_depends_on_length=False,
        dtype=dtype,
        cuts_edges=False,
    )


def decoder_spec(config: PretrainedConfig, dtype: torch.dtype) -> ModelSpec:
    """Spec of an encoder-decoder model before it is built, from its config."""
    text: Any = config
    encoder = encoder_spec(config, dtype)
    layers = getattr(text, "decoder_layers", None) or text.num_decoder_layers
    heads = getattr(text, "decoder_attention_heads", None) or text.num_heads
    limit = getattr(text, "max_target_positions", None) or getattr(text, "max_position_embeddings", None)
    return replace(
        encoder,
        family=ENCODER_DECODERS[text.model_type],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=getattr(text, "d_kv", None) or text.d_model // heads,
        intermediate_size=getattr(text, "decoder_ffn_dim", None) or text.d_ff,
        context_len=limit or UNBOUNDED_CONTEXT,
        sliding_windows=(None,) * layers,
        source=encoder,
    )
