"""Which class serves which architecture.

A family is added by naming its class here. `impl="transformers"` (any decoder of transformers, over the same KV pool) is
the seam for the rest: it is refused by name until it is there.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from ..core.unsupported import MULTIMODAL, POOLING
from .llama import LlamaForCausalLM, MistralForCausalLM
from .qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

NATIVE: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


class UnsupportedModelError(ValueError):
    """No implementation of the model's architecture."""


def architecture_of(config: PretrainedConfig) -> str:
    """The class name in the config, or the one that its model type has in transformers."""
    if config.architectures:
        return config.architectures[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)


RECURRENT = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h",
        "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2",
    }
)  # fmt: skip
"""Model types with recurrent layers (state-space models, linear attention)."""
NOT_GENERATIVE = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "EmbeddingModel",
    "BertModel", "RobertaModel",
)  # fmt: skip
"""Ends of the names of architectures that do not generate."""


def check_supported(config: PretrainedConfig) -> None:
    """Refuse kinds of models that are not served, before their config is read.

    Raises:
        UnsupportedModelError: an encoder-decoder, multimodal, recurrent or pooling model, by its name and kind.
    """
    architecture, kind = architecture_of(config), None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder model: cross-attention is not supported"
    elif any(getattr(config, part, None) is not None for part in ("vision_config", "audio_config")):
        kind = f"a multimodal model: {MULTIMODAL}"
    elif config.model_type in RECURRENT:
        kind = "a model with recurrent layers: state-space models and linear attention are not supported"
    elif architecture.endswith(NOT_GENERATIVE):
        kind = f"not a generative model: {POOLING}"
    if kind is not None:
        raise UnsupportedModelError(
            f"{architecture} is {kind}. Decoder-only families serve: {', '.join(sorted(NATIVE))}"
        )


def build_model(config: PretrainedConfig, impl: str, dtype: torch.dtype, device: str, max_positions: int) -> nn.Module:
    """An instance of the architecture's class, its weights not yet written.

    Raises:
        UnsupportedModelError: the architecture has no native class, or impl="transformers" is asked for.
    """
    architecture = architecture_of(config)
    if impl == "transformers":
        raise UnsupportedModelError(
            f"impl='transformers' ({architecture} through transformers' own class) is not supported yet; native "
            f"families: {', '.join(sorted(NATIVE))}"
        )
    if architecture not in NATIVE:
        raise UnsupportedModelError(
            f"{architecture} has no native implementation and impl='transformers' is not supported yet; native "
            f"families: {', '.join(sorted(NATIVE))}"
        )
    return NATIVE[architecture](config, dtype, device, max_positions)
