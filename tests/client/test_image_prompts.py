"""Prompts with images, read as transformers' processors read them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_vision import (
    FAMILIES,
    IMAGE_TOKEN,
    encoded,
    picture,
    placed,
    reference_processor,
    save_vision_model,
)
from PIL import Image
from transformers import AutoConfig, PreTrainedTokenizerFast, ProcessorMixin

from pymllm_interp.client.calls.requests import read_each
from pymllm_interp.client.chat import RenderedPrompt, render
from pymllm_interp.client.images.reader import ImageReader
from pymllm_interp.client.prompt_batch import prompts_of, split
from pymllm_interp.client.prompts import as_prompts, checked
from pymllm_interp.core.image_input import ImageInput
from pymllm_interp.core.limits import EngineLimits
from pymllm_interp.utils.arguments import PromptError

NAMES = {
    "qwen2_5_vl": ("pixel_values", "image_grid_thw"), "qwen3_vl": ("pixel_values", "image_grid_thw"), "llava": ("pixel_values",),
    "llava_onevision": ("pixel_values", "image_sizes"), "gemma3": ("pixel_values",),
    "smolvlm": ("pixel_values", "pixel_attention_mask"), "idefics3": ("pixel_values", "pixel_attention_mask"),
}  # fmt: skip
SIZES = [(40, 28), (20, 60), (16, 16), (31, 17)]


class Model:
    """A family's folder, with the reader of its prompts and transformers' processor."""

    def __init__(self, family: str, folder: Path, cache_bytes: int = 1 << 24) -> None:
        self.family, self.folder = family, folder
        self.config = AutoConfig.from_pretrained(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.images = ImageReader(self.config, self.tokenizer, folder, 8, cache_bytes)
        limits = EngineLimits(300, 512, 512, 512, 8)
        self.facts: Any = SimpleNamespace(images=self.images, limits=limits, name=family, architecture=family)

    @property
    def reference(self) -> Any:
        return reference_processor(self.family, self.folder)

    def read(self, prompt: Any) -> RenderedPrompt:
        (one,) = as_prompts(prompt)
        return checked(self.tokenizer, one, self.facts, "the prompt")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {family: Model(family, save_vision_model(family, tmp_path_factory.mktemp(family))) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    return [picture(*SIZES[(seed + i) % len(SIZES)], seed=seed + i) for i in range(count)]


def check_equal(found: RenderedPrompt, expected: Any, model: Model, count: int) -> None:
    """The token ids and the features of all images, put together, are those of transformers' processor."""
    assert found.token_ids == expected["input_ids"][0].tolist()
    images: Sequence[ImageInput] = found.images
    assert len(images) == count
    places = torch.cat([image.positions for image in images])
    placeholder = model.images.family.placeholder
    assert places.tolist() == [i for i, token in enumerate(found.token_ids) if token == placeholder]
    for name in NAMES[model.family]:
        own = [image.features[name] for image in images]
        joined = torch.cat(own, 1 if model.family in ("smolvlm", "idefics3") else 0)
        assert torch.equal(joined, expected[name]), name
    for image in images:
        assert image.content == ImageInput.of([], image.features).content


@pytest.mark.parametrize("count", [1, 2, 3])
def test_texts_with_images_are_read_as_transformers_reads_them(model: Model, count: int) -> None:
    images = pictures(count, seed=count)
    parts = [part for i, image in enumerate(images) for part in (f"\npart {i}\n", image, "\n\n")]
    text, _ = placed(model.family, *parts, "what?")
    found = model.read({"prompt": text, "multi_modal_data": {"image": images}})
    check_equal(found, model.reference(text=[text], images=[images], return_tensors="pt"), model, count)
    assert found.text == text


def test_conversations_are_read_as_transformers_reads_them(model: Model) -> None:
    first, second = pictures(2)
    messages = [
        {"role": "user", "content": [{"type": "image", "image": first}, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a square"}]},
        {"role": "user", "content": [{"type": "text", "text": "and this?"}, {"type": "image", "image": second}]},
    ]
    processor = model.reference
    text = ProcessorMixin.apply_chat_template(processor, messages, add_generation_prompt=True, tokenize=False)
    expected = processor(text=[text], images=[[first, second]], add_special_tokens=False, return_tensors="pt")
    check_equal(model.read(messages), expected, model, 2)
    plain = [{"role": "user", "content": "hello"}]
    asked = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    expected = ProcessorMixin.apply_chat_template(processor, asked, add_generation_prompt=True, tokenize=False)
    assert render(model.tokenizer, plain).text == render(model.tokenizer, asked).text == expected


def test_openai_parts_are_data_urls(model: Model) -> None:
    image = pictures(1)[0]
    url = f"data:image/png;base64,{b64encode(encoded(image)).decode()}"
    direct = model.read([{"role": "user", "content": [{"type": "image", "image": image}]}])
    for part in (
        {"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "image", "url": url},
        {"type": "image", "base64": url.partition(",")[2]},
    ):  # fmt: skip
        found = model.read([{"role": "user", "content": [part]}])
        assert found.token_ids == direct.token_ids
        assert [one.content for one in found.images] == [one.content for one in direct.images]


def test_token_ids_with_a_place_for_each_image_are_expanded(model: Model) -> None:
    images, token = pictures(2), IMAGE_TOKEN[model.family]
    if token not in model.tokenizer.get_vocab():
        pytest.fail(token)
    text = f"a{token}b{token}c"
    expected = model.read({"prompt": text, "multi_modal_data": {"image": images}})
    ids = model.tokenizer(text)["input_ids"]
    for given in (ids, expected.token_ids):
        found = model.read({"prompt_token_ids": given, "multi_modal_data": {"image": images}})
        assert found.token_ids == expected.token_ids
        assert [one.positions.tolist() for one in found.images] == [one.positions.tolist() for one in expected.images]


def test_outputs_of_transformers_processors_are_prompts_as_they_are(model: Model) -> None:
    processor = model.reference
    images = pictures(3)
    texts = [placed(model.family, "x ", images[0], " y")[0], placed(model.family, images[1], "and", images[2])[0]]
    groups = [images[:1], images[1:]]
    each = [processor(text=[text], images=[own], return_tensors="pt") for text, own in zip(texts, groups, strict=True)]
    for outputs, own in zip(each, groups, strict=True):
        check_equal(model.read(dict(outputs)), outputs, model, len(own))
        batch, rest = prompts_of((), {**outputs, "max_new_tokens": 3}, "the prompt")
        assert rest.keys() - {"mm_token_type_ids", "token_type_ids"} == {"max_new_tokens"}
        check_equal(checked(model.tokenizer, batch.prompts[0], model.facts, "it"), outputs, model, len(own))
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    together = processor(text=texts, images=groups, padding=True, return_tensors="pt")
    found = [checked(model.tokenizer, one, model.facts, "it") for one in split(dict(together), "them").prompts]
    for one, outputs, own in zip(found, each, groups, strict=True):
        check_equal(one, outputs, model, len(own))


def test_prompts_of_a_call_are_read_beside_each_other(model: Model) -> None:
    """Each is what it is alone, images that two prompts share are read once, and the first error in the call's order is raised."""
    images, names = pictures(6), [f"prompt {i}" for i in range(9)]
    asked: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": own}}
        for text, own in (placed(model.family, f"{i} ", images[i % 6], " what?") for i in range(8))
    ]
    asked.append("text alone")
    alone = [model.read(prompt) for prompt in asked]
    reader = ImageReader(model.config, model.tokenizer, model.folder, 8, 1 << 26)
    facts: Any = SimpleNamespace(images=reader, limits=model.facts.limits)

    def read(prompt: Any, what: str) -> RenderedPrompt:
        return checked(model.tokenizer, prompt, facts, what)

    for found, one in zip(read_each(read, asked, names), alone, strict=True):
        assert found.token_ids == one.token_ids
        assert [image.content for image in found.images or ()] == [image.content for image in one.images or ()]
    assert (reader.cache.hits, reader.cache.misses) == (2, 6)
    for i in (3, 5):
        asked[i] = {**asked[i], "multi_modal_data": {"image": encoded(images[i])[:-40]}}
    with pytest.raises(PromptError, match="image 0 of prompt 3"):
        list(read_each(read, asked, names))


def test_features_have_the_dtype_of_the_tower(model: Model) -> None:
    """They are rounded once, on the host, and outputs of processors like pictures."""
    reader = ImageReader(model.config, model.tokenizer, model.folder, 8, 0, torch.bfloat16)
    facts: Any = SimpleNamespace(images=reader, limits=model.facts.limits)
    text, images = placed(model.family, "a ", *pictures(1))
    prompt = {"prompt": text, "multi_modal_data": {"image": images}}
    read = model.read(prompt)
    (whole,), (found,) = read.images, checked(model.tokenizer, prompt, facts, "it").images
    outputs = {"prompt_token_ids": read.token_ids, "multi_modal_data": {"image": [dict(whole.features)]}}
    (again,) = checked(model.tokenizer, outputs, facts, "it").images
    for name, tensor in whole.features.items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found.features[name], wanted) and torch.equal(again.features[name], wanted)
    assert found.content == again.content != whole.content
