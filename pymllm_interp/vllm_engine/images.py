"""`VllmImages`: the images of prompts as vLLM's inputs, as this package's reader has read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchFeature

from ..core.image_input import ImageInput
from ..utils.arguments import PromptError

IMAGE = "image"
"""vLLM's name of the modality."""
IDEFICS = ("idefics3", "smolvlm")
"""Model types with tiles of images. vLLM has one class for both."""


class VllmImages:
    """Makes vLLM's prompts with images. vLLM does not process them again.

    Args:
        model_config: vLLM's, of a model with images.
    """

    def __init__(self, model_config: Any) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY  # pyright: ignore[reportMissingImports]

        self._config, self._dtype = model_config.hf_config, model_config.dtype
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(model_config)

    @classmethod
    def of(cls, model_config: Any) -> VllmImages | None:
        """Maker of prompts for a model with this config. None: it takes text only."""
        return None if getattr(model_config, "multimodal_config", None) is None else cls(model_config)

    def prompt_of(self, ids: list[int], images: Sequence[ImageInput]) -> dict[str, Any]:
        """vLLM's prompt of token ids with placeholders.

        Args:
            images: `Request.scoped_images`, by which requests share states of the tower.
        """
        return {
            "type": "multimodal", "prompt_token_ids": ids, "mm_kwargs": {IMAGE: [self._item(image) for image in images]},
            "mm_hashes": {IMAGE: [image.content.hex() for image in images]},
            "mm_placeholders": {IMAGE: [_place(image) for image in images]},
        }  # fmt: skip

    def check(self, images: Sequence[ImageInput], what: str) -> None:
        """Refuse features that vLLM would not read as they are meant. Raises PromptError."""
        for i, image in enumerate(images if self._config.model_type in IDEFICS else ()):
            mask, pixels = image.features.get("pixel_attention_mask"), image.features["pixel_values"]
            if mask is not None and not mask.all():
                raise PromptError(f"{what}: image {i} has masked pixels, which vLLM attends to: use LM(model)")
            if (pixels.to(self._dtype) == 0).flatten(2).all(-1).any():
                raise PromptError(f"{what}: image {i} has a tile of zeros, which vLLM takes for padding: use LM(model)")

    def _item(self, image: ImageInput) -> Any:
        """The features of an image, with vLLM's description of how they are batched."""
        from vllm.multimodal.inputs import MultiModalKwargsItems  # pyright: ignore[reportMissingImports]

        inputs = BatchFeature(self._named(dict(image.features)))
        fields = self._processor._get_mm_fields_config(inputs, {})
        return MultiModalKwargsItems.from_hf_inputs(inputs, fields)[IMAGE][0]

    def _named(self, features: dict[str, Any]) -> dict[str, Any]:
        """The features with the names and shapes of vLLM's processor."""
        family = self._config.model_type
        if family == "internvl":
            features["image_num_patches"] = torch.tensor([len(features["pixel_values"])])
            features["image_token_id"] = torch.tensor(self._config.image_token_id)
        elif family in IDEFICS:
            features = {name: tiles[0] for name, tiles in features.items()}
            pixels = features["pixel_values"]
            features["num_patches"] = torch.tensor([len(pixels)])
            features.setdefault("pixel_attention_mask", torch.ones(len(pixels), *pixels.shape[2:], dtype=torch.int64))
        return features


def _place(image: ImageInput) -> Any:
    """vLLM's range of an image's placeholders, with a mask where other tokens are between them."""
    from vllm.multimodal.inputs import PlaceholderRange  # pyright: ignore[reportMissingImports]

    first, length = int(image.positions[0]), int(image.positions[-1] - image.positions[0]) + 1
    if length == image.num_tokens:
        return PlaceholderRange(first, length)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[image.positions - first] = True
    return PlaceholderRange(first, length, mask)
