"""Which class serves which architecture.

A family is added by naming its class here. `impl="transformers"` (any decoder of transformers, over the same KV pool) is
the seam for the rest: it is refused by name until it is there.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

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
