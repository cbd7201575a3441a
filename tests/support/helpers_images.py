"""Prompts with images for the engine's tests: ids with placeholders, random features, and transformers' own call of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from helpers_vision import generated, vision_config
from torch import Tensor
from transformers import PreTrainedModel

from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.client.images.families import IMAGE_FAMILIES
from pymllm_interp.core.image_input import ImageInput

Features = dict[str, Tensor]
SERVED = ("qwen2_5_vl", "llava", "llava_onevision", "smolvlm", "idefics3", "gemma3", "qwen3_vl")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pictures(NamedTuple):
    """A family's random features of an image, and its ids in a prompt, with the id of placeholders."""

    features: Callable[[int, int], Features]
    """(seed, images of the prompt) -> features. Images of seeds that differ by a multiple of 3 have one size."""
    ids: Callable[[Features], list[int]]
    pad: int


def _qwen(seed: int, images: int) -> Features:
    height, width = ((4, 6), (8, 4), (2, 2))[seed % 3]
    return {
        "pixel_values": noise(height * width, 3 * 2 * 4 * 4, seed=seed),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def _onevision(seed: int, images: int) -> Features:
    size = ((16, 32), (30, 31), (20, 12))[seed % 3]
    tiles = (3, 5, 3)[seed % 3] if images == 1 else 1
    return {
        "pixel_values": noise(1, tiles, 3, 16, 16, seed=seed),
        "image_sizes": torch.tensor([size]),
        "batch_num_images": torch.tensor([images]),
    }


def _tiles(seed: int, images: int) -> Features:
    tiles = (1, 3, 5)[seed % 3]
    mask = torch.ones(1, tiles, 16, 16, dtype=torch.int64)
    mask[:, -1, :, 10:] = 0
    return {"pixel_values": noise(1, tiles, 3, 16, 16, seed=seed), "pixel_attention_mask": mask}


def _run(family: str, begin: int, end: int) -> Callable[[Features], list[int]]:
    """Ids of an image with all placeholders in a run."""

    def ids(features: Features) -> list[int]:
        config = vision_config(family)
        return [begin, *[config.image_token_id] * IMAGE_FAMILIES[family](config, None).tokens(features), end]

    return ids


def _square(seed: int, images: int) -> Features:
    return {"pixel_values": noise(1, 3, 24, 24, seed=seed)}


def _pictures(family: str) -> Pictures:
    pad = vision_config(family).image_token_id
    if family in ("smolvlm", "idefics3"):  # four placeholders of each tile, behind a token of its own
        return Pictures(
            _tiles, lambda features: [251, *[252, *[pad] * 4] * features["pixel_values"].shape[1], 253], pad
        )
    features = {"llava": _square, "llava_onevision": _onevision, "gemma3": _square}.get(family, _qwen)
    return Pictures(features, _run(family, 251, 252), pad)


PICTURES = {family: _pictures(family) for family in SERVED}


def prompt_of(family: str, *parts: Sequence[int] | int) -> RenderedPrompt:
    """A prompt of lists of token ids, and of images by their seeds."""
    pictures, ids, images = PICTURES[family], list[int](), list[ImageInput]()
    count = sum(isinstance(part, int) for part in parts)
    for part in parts:
        if isinstance(part, int):
            features = pictures.features(part, count)
            own = pictures.ids(features)
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
    if family == "gemma3":
        inputs["token_type_ids"] = (ids == PICTURES[family].pad).int()
    elif family.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == PICTURES[family].pad).int()
    for image in prompt.images:
        for name, value in image.features.items():
            dim = int(family in ("smolvlm", "idefics3"))  # tiles of a prompt's images
            inputs[name] = torch.cat((inputs[name], value), dim) if name in inputs else value
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
