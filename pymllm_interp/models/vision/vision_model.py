"""Vision-language models: transformers' vision tower and projector, and a native language model.

The modules have the names of transformers' classes. Passes run the language model only. The runner computes the tower's states
of images before, as rows in place of embeddings (`ForwardBatch.input_embeds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...core.families import text_name
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ..native.decoder import Decoder, DecoderForCausalLM
from ..native.gemma import Gemma3ForCausalLM, Gemma3TextModel
from ..native.llama import LlamaForCausalLM, LlamaModel, MistralModel
from ..native.qwen import Qwen2_5_VLTextModel, Qwen2Model, Qwen3Model, Qwen3VLTextModel
from ..transformers.site_ends import install_part
from .tower import CheckpointNames, VisionTower, without_layers

TEXT_MODELS: dict[str, type[Decoder]] = {
    "gemma3_text": Gemma3TextModel,
    "llama": LlamaModel,
    "mistral": MistralModel,
    "qwen2": Qwen2Model,
    "qwen2_5_vl_text": Qwen2_5_VLTextModel,
    "qwen3": Qwen3Model,
    "qwen3_vl_text": Qwen3VLTextModel,
}
"""Model type of a text config -> its native decoder."""


class VisionLanguageModel(nn.Module):
    """`model` of a vision-language model: the modules of the tower, the projector, and the language model.

    Args:
        max_positions: positions of the longest sequence to serve.

    Attributes:
        tower: computes the states of images.
        checkpoint_names: renames a checkpoint's tensors.
    """

    def __init__(self, config: Any, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        served: Any = without_layers(config, spec.dtype, device)
        text: Any = TEXT_MODELS[config.text_config.model_type]
        self._text_name = text_name(config.model_type)
        self._modules.update(served.model._modules)
        self._parameters.update(served.model._parameters)
        self._modules[self._text_name] = text(config.text_config, spec, device, max_positions)
        paths = tuple(f"model.{name}." for name in served.model._modules if name != self._text_name)
        self.tower = VisionTower(served.model, spec.hidden_size, spec.dtype, device, paths)
        if spec.vision is not None:
            tower: Any = served.get_submodule(".".join(spec.vision.family.layers.split(".")[:2]))
            install_part(served, getattr(tower, "patch_embed", None) or tower.embeddings, spec.vision)
        self.checkpoint_names = CheckpointNames(served)

    @property
    def text(self) -> Any:
        """The language model."""
        return self._modules[self._text_name]

    @property
    def embed_tokens(self) -> nn.Module:
        """The token embedding."""
        return self.text.embed_tokens

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> BaseModelOutputWithPast:
        """input_ids and position_ids [1, tokens] -> hidden states [1, tokens, hidden] after the final norm."""
        positions = _rotated_by(position_ids, forward_batch)
        return self.text(input_ids=input_ids, position_ids=positions, forward_batch=forward_batch)

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """`Decoder.forward_fused` of the language model."""
        return self.text.forward_fused(input_ids, _rotated_by(position_ids, forward_batch), forward_batch)


def _rotated_by(position_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Positions that RoPE turns by: [3, tokens] in models with mrope."""
    return position_ids if batch.mrope_positions is None else batch.mrope_positions


class WithVision(DecoderForCausalLM):
    """The parts of a model with its head that do not depend on the language model."""

    decoder_cls: Any = VisionLanguageModel
    model: Any
    quantised_methods = frozenset()
    quantises = False

    @property
    def tower(self) -> VisionTower:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The vision tower."""
        return self.model.tower

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        text: Any = config.get_text_config()
        return text.model_type in TEXT_MODELS

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((self.model.checkpoint_names(name), tensor) for name, tensor in weights)


class VisionLanguageForCausalLM(WithVision, LlamaForCausalLM):
    """The model with its head."""


class Gemma3ForConditionalGeneration(WithVision, Gemma3ForCausalLM):
    """The model with Gemma 3's head."""
