"""Prompts with images for the engine's tests: ids with placeholders, random features, and transformers' own call of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from helpers_vision import generated, token_id
from torch import Tensor
from transformers import PreTrainedModel

from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.core.image_input import ImageInput

Features = dict[str, Tensor]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pictures(NamedTuple):
    """A family's random features of an image, its ids in a prompt, and the id of placeholders."""

    features: Callable[[int], Features]
    """Seed -> features. Images of seeds that differ by a multiple of 3 have one size."""
    tokens: Callable[[Features], list[int]]
    pad: int


def _qwen(seed: int) -> Features:
    height, width = ((4, 6), (8, 4), (2, 2))[seed % 3]
    return {
        "pixel_values": noise(height * width, 3 * 2 * 4 * 4, seed=seed),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def _qwen_tokens(features: Features) -> list[int]:
    return [262, *[264] * (int(features["image_grid_thw"].prod()) // 4), 263]


PICTURES = {
    "qwen2_5_vl": Pictures(_qwen, _qwen_tokens, token_id("qwen2_5_vl", "<|image_pad|>")),
}


def prompt_of(family: str, *parts: Sequence[int] | int) -> RenderedPrompt:
    """A prompt of lists of token ids, and of images by their seeds."""
    pictures, ids, images = PICTURES[family], list[int](), list[ImageInput]()
    for part in parts:
        if isinstance(part, int):
            features = pictures.features(part)
            own = pictures.tokens(features)
            images.append(
                ImageInput.of([len(ids) + i for i, token in enumerate(own) if token == pictures.pad], features)
            )
            ids += own
        else:
            ids += part
    return RenderedPrompt(None, ids, None, tuple(images))


def random_prompt(family: str, seed: int, most: int = 3) -> RenderedPrompt:
    """Text and up to `most` images, of a few contents. transformers takes id 0 for padding."""
    chance = random.Random(seed)
    parts: list[Any] = [chance.choices(range(1, 250), k=chance.randrange(1, 9))]
    for _ in range(chance.randrange(most + 1)):
        parts += [chance.randrange(6), chance.choices(range(1, 250), k=chance.randrange(1, 6))]
    return prompt_of(family, *parts)


def inputs_of(family: str, prompt: RenderedPrompt) -> dict[str, Tensor]:
    """transformers' arguments of a prompt."""
    ids = torch.tensor([prompt.token_ids])
    inputs: dict[str, Tensor] = {"input_ids": ids}
    if family.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == PICTURES[family].pad).int()
    for image in prompt.images:
        for name, value in image.features.items():
            inputs[name] = torch.cat((inputs[name], value)) if name in inputs else value
    return inputs


def reference(family: str, model: PreTrainedModel, prompt: RenderedPrompt, **kwargs: Any) -> Any:
    """transformers' outputs for a prompt, without its memory of the last prompt's positions."""
    model.model.rope_deltas = None  # pyright: ignore
    with torch.no_grad():
        return model(**inputs_of(family, prompt), use_cache=False, **kwargs)


def continued(family: str, model: PreTrainedModel, prompt: RenderedPrompt, count: int) -> Sequence[int]:
    """transformers' greedy tokens."""
    model.model.rope_deltas = None  # pyright: ignore
    return generated(model, inputs_of(family, prompt), count)
