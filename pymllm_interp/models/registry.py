"""The class that implements each architecture.

A new family needs its class here, and a row in `core.model_spec.FAMILIES`. `impl="transformers"` (any transformers decoder
over our KV pool) is not implemented yet and raises an error.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from ..core.model_spec import ModelSpec
from ..core.unsupported import MULTIMODAL, POOLING
from .base import CausalLM
from .llama import LlamaForCausalLM
from .mistral import MistralForCausalLM
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
