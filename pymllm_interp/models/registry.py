"""The class that implements each architecture.

A new family needs its class here, and a row in `core.model_spec.FAMILIES`. `impl="transformers"` (any transformers decoder
over our KV pool) is not implemented yet and raises an error.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from ..core.model_spec import ModelSpec
from .base import CausalLM
from .llama import LlamaForCausalLM, MistralForCausalLM
from .qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

NATIVE: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


class UnsupportedModelError(ValueError):
    """The model's architecture has no implementation."""


def architecture_of(config: PretrainedConfig) -> str:
    """The class name in the config, or else the class of its model type in transformers."""
    if config.architectures:
        return config.architectures[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)


def model_class(config: PretrainedConfig, impl: str) -> type[LlamaForCausalLM]:
    """The class that implements the config's architecture.

    Raises:
        UnsupportedModelError: the architecture has no native class, or `impl` is "transformers".
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
    return NATIVE[architecture]


def build_model(config: PretrainedConfig, impl: str, spec: ModelSpec, device: str, max_positions: int) -> CausalLM:
    """An instance of the architecture's class with uninitialised weights.

    Args:
        max_positions: positions of the longest sequence to serve.

    Raises:
        UnsupportedModelError: see `model_class`.
    """
    return model_class(config, impl)(config, spec, device, max_positions)
