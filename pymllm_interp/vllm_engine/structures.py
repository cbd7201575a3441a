"""Norms of a vLLM model, at which hooks read and change the residual stream.

A decoder layer of vLLM hands each of its norms a pair: the last block's output, and the stream. `structure_of` finds the
two norms of each layer that take such a pair, and the norm after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..models.registry import architecture_of, is_native

INPUT_NORM = "input_layernorm"
LAYERS = {
    "LlamaDecoderLayer": "post_attention_layernorm",
    "Llama4DecoderLayer": "post_attention_layernorm",
    "MistralDecoderLayer": "post_attention_layernorm",
    "MixtralDecoderLayer": "post_attention_layernorm",
    "Qwen2DecoderLayer": "post_attention_layernorm",
    "Qwen2MoeDecoderLayer": "post_attention_layernorm",
    "Qwen3DecoderLayer": "post_attention_layernorm",
    "Qwen3MoeDecoderLayer": "post_attention_layernorm",
    "GemmaDecoderLayer": "post_attention_layernorm",
    "Glm4DecoderLayer": "post_attention_layernorm",
    "Glm4MoeDecoderLayer": "post_attention_layernorm",
    "DeepseekV2DecoderLayer": "post_attention_layernorm",
    "OlmoeDecoderLayer": "post_attention_layernorm",
    "TransformerBlock": "post_attention_layernorm",
    "Ernie4_5_MoeDecoderLayer": "post_attention_layernorm",
    "ExaoneMoeDecoderLayer": "post_attention_layernorm",
    "MiniMaxM2DecoderLayer": "post_attention_layernorm",
    "BailingMoeBlock": "post_attention_layernorm",
    "NemotronDecoderLayer": "post_attention_layernorm",
    "Gemma2DecoderLayer": "pre_feedforward_layernorm",
    "Gemma3DecoderLayer": "pre_feedforward_layernorm",
    "Rnj1DecoderLayer": "pre_feedforward_layernorm",
}
"""Decoder layers of vLLM that call their two norms with a pair -> the norm in front of the MLP."""
WITH_BLOCKS = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "olmoe"}
)
"""Model types with modules for blocks: this package has them, and knows their parts in vLLM."""
SITES = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm", "logits")
"""Kinds of sites that such a model serves."""


@dataclass(frozen=True)
class Structure:
    """The norms of a model, by layer.

    Attributes:
        layers: (norm in front of attention, norm in front of the MLP) of each layer.
        last: the norm behind the last layer.
    """

    layers: list[tuple[nn.Module, nn.Module]]
    last: nn.Module

    @property
    def taps(self) -> int:
        """Calls of the op in one pass: two a layer, and two at the last norm."""
        return 2 * len(self.layers) + 2


def structure_of(model: Any) -> Structure:
    """The norms of a model of vLLM.

    Raises:
        NotImplementedError: layers of a class that is not in `LAYERS`, or ones on another pipeline rank. The message names it.
    """
    inner = _with_layers(model)
    if inner is None:
        raise NotImplementedError(
            f"vLLM's {type(model).__name__} has no list of decoder layers with a norm behind it, so its stream has no sites "
            "here: use LM(model), whose engine is our own"
        )
    found: list[tuple[nn.Module, nn.Module]] = []
    for i, layer in enumerate(inner.layers):
        name = type(layer).__name__
        if name == "PPMissingLayer":
            raise NotImplementedError(
                f"layer {i} is on another pipeline rank: pipeline_parallel_size is 1 here; raise tensor_parallel_size"
            )
        if name not in LAYERS:
            raise NotImplementedError(
                f"vLLM's {name} is not known to hand its norms a pair of delta and stream; layers that are: "
                f"{', '.join(LAYERS)}. Use LM(model), whose engine is our own"
            )
        found.append((getattr(layer, INPUT_NORM), getattr(layer, LAYERS[name])))
    return Structure(found, inner.norm)


def _with_layers(model: Any) -> Any:
    """The module that has `layers` and `norm`: the model's decoder."""
    for _ in range(4):
        if isinstance(getattr(model, "layers", None), nn.ModuleList) and isinstance(
            getattr(model, "norm", None), nn.Module
        ):
            return model
        model = getattr(model, "model", None) or getattr(model, "language_model", None)
        if model is None:
            return None
    return None


def why_without_blocks(config: PretrainedConfig) -> str | None:
    """Reason that no block runs in the passes of a model, or None."""
    if config.model_type in WITH_BLOCKS and is_native(config, "auto"):
        return None
    return (
        f"with engine='vllm' no block runs in the passes of {architecture_of(config)}: those of {', '.join(sorted(WITH_BLOCKS))} "
        "have them. Declare it (interventions=, capture=), or use LM(model), whose engine is our own"
    )
