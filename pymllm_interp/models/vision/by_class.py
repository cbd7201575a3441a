"""Vision-language models with a language model that is not native: transformers' class runs over the KV pool.

Its forward gets no images: their states are placed behind its embedding (`ForwardBatch.input_embeds`), as for native ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ...core.current_pass import current_pass
from ...core.families import text_name
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import LOGITS, ModelSpec
from ...layers.edits.base import apply_inner
from ..transformers.transformers_model import TransformersModel
from .tower import VisionTower


class TextView(nn.Module):
    """A model without its tower and projector, as a causal language model.

    Args:
        whole: transformers' model.
        name: child of its decoder that is the language model.
    """

    base_model: Any

    def __init__(self, whole: PreTrainedModel, name: str) -> None:
        super().__init__()
        self._modules, self._whole = whole._modules, [whole]
        vars(self)["base_model"], self.config = whole.base_model, whole.config.get_text_config()
        others = [child for own, child in whole.base_model.named_children() if own != name]
        self._others = {module for child in others for module in child.modules()}

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        return super().named_modules({*(memo or ()), *self._others}, prefix, remove_duplicate)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self._whole[0].get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head."""
        return self._whole[0].get_output_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> Any:
        """The whole model's forward without images."""
        whole: Any = self._whole[0]
        return whole(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache, logits_to_keep=logits_to_keep,
        )  # fmt: skip


class VisionByClass(TransformersModel):
    """A vision-language model by its class in transformers.

    Attributes:
        tower: computes the states of images.
    """

    def __init__(self, served: PreTrainedModel, declared: ModelSpec) -> None:
        name = text_name(served.config.model_type)
        super().__init__(TextView(served, name), declared)  # pyright: ignore[reportArgumentType]
        self.config, like = served.config, next(served.parameters())
        paths = tuple(f"model.{own}." for own, _ in served.base_model.named_children() if own != name)
        for module in served.modules():
            if isinstance(module, PreTrainedModel):
                maybe_install_capturing_hooks(module)  # later on, torch's hooks are refused
        self.tower = VisionTower(served.base_model, self.spec.hidden_size, like.dtype, str(like.device), paths)

    def head_fused(self, h: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        rows = forward_batch.logits_indices
        with current_pass(forward_batch):
            logits = self.logits_of(h if rows is None else h[:, rows])
            return apply_inner(logits, forward_batch.site_ops, 0, LOGITS)
