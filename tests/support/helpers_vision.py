"""Tiny random vision-language models with their tokenizers, chat templates and image processors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AyaVisionProcessor,
    Gemma3Processor,
    Idefics3Processor,
    InternVLProcessor,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
    SmolVLMProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

QWEN = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
IDEFICS = ("<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<image>", *TILES)
WORDS: dict[str, tuple[str, ...]] = {
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "llava": ("<s>", "</s>", "<image>"),
    "llava_onevision": ("<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    "gemma3": ("<bos>", "<eos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "smolvlm": ("<|im_start|>", *IDEFICS),
    "idefics3": ("<|im_start|>", *IDEFICS),
    "internvl": ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "mistral3": ("<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "aya_vision": (
        "<BOS>",
        "<EOS>",
        "<image>",
        "<|IMG_PATCH|>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "TILE_GLOBAL",
        *(f"TILE_{i}" for i in range(1, 6)),
    ),
}
"""Family -> special tokens of its tokenizer, with ids from 260 on."""
CLASSES = ("internvl", "mistral3", "aya_vision")
"""Families of which the tower has no sites; the last one's language model runs by its class."""
FAMILIES = tuple(family for family in WORDS if family not in CLASSES)
IMAGE_TOKEN = {family: "<|image_pad|>" if words is QWEN else "<image>" for family, words in WORDS.items()} | {
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>",
    "mistral3": "[IMG]",
}
"""Family -> text of an image's place in a prompt."""
_CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
_QWEN_CHAT = _CHATML + (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAVA_CHAT = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_GEMMA_CHAT = (
    "{{ '<bos>' }}{% for m in messages %}{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<start_of_image>{% elif c['type'] == 'text' %}{{ c['text'] | trim }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}model\n{% endif %}"
)
_SMOL_CHAT = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}{{ ':' }}"
    "{% else %}{{ ': ' }}{% endif %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% elif c['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
CHATS = {
    "qwen2_5_vl": _QWEN_CHAT, "qwen3_vl": _QWEN_CHAT, "llava": _LLAVA_CHAT, "llava_onevision": _LLAVA_CHAT, "gemma3": _GEMMA_CHAT,
    "smolvlm": _SMOL_CHAT, "idefics3": _SMOL_CHAT, "mistral3": _LLAVA_CHAT.replace("<image>", "[IMG]"),
    "internvl": _LLAVA_CHAT.replace("<image>", "<IMG_CONTEXT>"), "aya_vision": _LLAVA_CHAT,
}  # fmt: skip
PROCESSORS: dict[str, type[ProcessorMixin]] = {
    "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor, "llava": LlavaProcessor,
    "llava_onevision": LlavaOnevisionProcessor, "gemma3": Gemma3Processor, "smolvlm": SmolVLMProcessor,
    "idefics3": Idefics3Processor, "internvl": InternVLProcessor,
    "aya_vision": AyaVisionProcessor,
}  # fmt: skip
_MEANS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024}, **_MEANS,
}  # fmt: skip
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _QWEN_IMAGES,
    "qwen3_vl": _QWEN_IMAGES,
    "llava": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24},
    },
    "llava_onevision": {
        "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 16, "width": 16}, **_MEANS,
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32], [16, 48]],
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}, **_MEANS},
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16},
        **_MEANS,
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16},
        **_MEANS,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "max_patches": 4, **_MEANS,
    },
    "aya_vision": {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "max_patches": 4, **_MEANS,
    },
    "mistral3": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 40}, "patch_size": 4, **_MEANS},
}  # fmt: skip
_VOCAB = 300
_TEXT: dict[str, Any] = {
    "vocab_size": _VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_QWEN_TOWER = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_IDEFICS = {"vision_config": {**_TOWER, "image_size": 16, "patch_size": 4}, "scale_factor": 2}


def token_id(family: str, word: str) -> int:
    """Id of a special token."""
    return 260 + WORDS[family].index(word)


def vision_config(family: str, **text: Any) -> PretrainedConfig:
    """A tiny config; keywords change its text config."""
    own: dict[str, Any] = {**_TEXT, **text}
    ids = {"image_token_id": token_id(family, "<|image_pad|>" if WORDS[family] is QWEN else IMAGE_TOKEN[family])}
    if WORDS[family] is QWEN:
        ids |= {
            "video_token_id": token_id(family, "<|video_pad|>"),
            "vision_start_token_id": token_id(family, "<|vision_start|>"),
            "vision_end_token_id": token_id(family, "<|vision_end|>"),
        }
    parts: dict[str, dict[str, Any]] = {
        "qwen2_5_vl": {
            "text_config": {**own, **_MROPE},
            "vision_config": {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        "qwen3_vl": {
            "text_config": {**own, **_MROPE},
            "vision_config": {**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
        "llava": {
            "text_config": {"model_type": "llama", **own},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model", "image_size": 24, "patch_size": 6, "projection_dim": 32},
            "image_seq_length": 16,
        },
        "llava_onevision": {
            "text_config": {**own, "model_type": "qwen2"},
            "vision_config": {**_SIGLIP, "image_size": 16, "patch_size": 4},
            "image_grid_pinpoints": PREPROCESSORS["llava_onevision"]["image_grid_pinpoints"],
            "video_token_index": token_id("llava_onevision", "<video>"),
        },
        "gemma3": {
            "text_config": {
                **own, "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"][: own["num_hidden_layers"]],
            },
            "vision_config": {**_SIGLIP, "image_size": 24, "patch_size": 6},
            "mm_tokens_per_image": 4,
            "boi_token_index": token_id("gemma3", "<start_of_image>"),
            "eoi_token_index": token_id("gemma3", "<end_of_image>"),
        },
        "smolvlm": {**_IDEFICS, "text_config": {**own, "model_type": "llama"}},
        "idefics3": {**_IDEFICS, "text_config": {**own, "model_type": "llama"}},
        "internvl": {
            "text_config": {**own, "model_type": "qwen2"},
            "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        },
        "aya_vision": {
            "text_config": {**own, "model_type": "cohere2", "sliding_window": 16, "tie_word_embeddings": False},
            "vision_config": {**_SIGLIP, "image_size": 16, "patch_size": 4},
            "tie_word_embeddings": False,
        },
        "mistral3": {
            "text_config": {**own, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 48, "patch_size": 4, "head_dim": 8},
            "tie_word_embeddings": False,
        },
    }  # fmt: skip
    if family == "gemma3":
        ids = {"image_token_index": token_id("gemma3", "<image_soft_token>")}
    elif family == "aya_vision":
        ids = {"image_token_index": token_id(family, "<|IMG_PATCH|>")}
    elif family.startswith("llava") or family == "mistral3":
        ids = {"image_token_index": ids["image_token_id"]}
    config = AutoConfig.for_model(family, **parts[family], **ids)
    config.architectures = [type(AutoModelForImageTextToText.from_config(config)).__name__]
    return config


def vision_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """transformers' own class with seeded random weights, float32, in eval mode; every parameter is random."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.dim() == 1:  # a norm's; Gemma's text norms are stored less 1
                parameter.normal_(0 if config.model_type == "gemma3" and "vision" not in name else 1, 0.1)
            elif parameter.any():
                parameter.mul_(3)  # of 0.02, with which images would hardly matter
            else:  # Gemma's projector
                parameter.normal_(0, 0.1)
    return model


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, "\\n\\n", three unused ids, and the family's special tokens from 260 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = next(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n"))
    vocab = {piece: i for i, piece in enumerate([*alphabet, newline * 2, "unused1", "unused2", "unused3"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS[family]])
    named = {"image_token": IMAGE_TOKEN[family]}
    if family == "internvl":
        named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                 "video_token": "<video>"}  # fmt: skip
    if family == "gemma3":
        named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=WORDS[family][1], chat_template=CHATS[family], extra_special_tokens=named
    )


def save_vision_model(family: str, folder: Path, seed: int = 0, **text: Any) -> Path:
    """A random model of the family with its tokenizer and image processor, in `folder`."""
    vision_model(vision_config(family, **text), seed).save_pretrained(folder)
    vision_tokenizer(family).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[family]))
    return folder


def picture(width: int = 40, height: int = 28, seed: int = 0) -> Image.Image:
    """A random RGB picture of large blocks, which resizing does not make grey."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, format: str = "PNG", **how: Any) -> bytes:
    """The picture's file."""
    buffer = BytesIO()
    image.save(buffer, format, **how)
    return buffer.getvalue()


def placed(family: str, *parts: str | Image.Image) -> tuple[str, list[Image.Image]]:
    """The text of a prompt with an image's token in the place of each image, and the images."""
    token = IMAGE_TOKEN[family] if WORDS[family] is not QWEN else "<|vision_start|><|image_pad|><|vision_end|>"
    images = [part for part in parts if not isinstance(part, str)]
    return "".join(part if isinstance(part, str) else token for part in parts), images


def generated(model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int) -> Sequence[int]:
    """transformers' greedy tokens behind a processor's outputs."""
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


class PixtralReference:
    """transformers' PixtralProcessor, which needs torchvision itself: the text of images by its rule, and its features.

    Args:
        images: image processor.
        tokenizer: tokenizer with the tokens of images.
    """

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self._images, self._tokenizer = images, tokenizer

    def __call__(
        self, text: str, images: Sequence[Image.Image] | None = None, return_tensors: str = "pt"
    ) -> dict[str, Any]:
        found = dict(self._images(list(images), patch_size=8, return_tensors=return_tensors)) if images else {}
        for height, width in found["image_sizes"].tolist() if images else ():
            rows = (["<row>"] * (width // 8) + ["[IMG_BREAK]"]) * (height // 8)
            text = text.replace("[IMG]", "".join([*rows[:-1], "[IMG_END]"]), 1)
        return found | dict(self._tokenizer(text.replace("<row>", "[IMG]"), return_tensors=return_tensors))


PROCESSOR_SIZES: dict[str, dict[str, Any]] = {
    "llava": {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_onevision": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    "gemma3": {"image_seq_length": 4},
    "smolvlm": {"image_seq_len": 4},
    "idefics3": {"image_seq_len": 4},
    "internvl": {"image_seq_length": 4},
    "mistral3": {"patch_size": 4, "spatial_merge_size": 2},
    "aya_vision": {"patch_size": 4, "downsample_factor": 2, "img_size": 16},
}
"""Arguments of transformers' processors."""


def reference_processor(family: str, folder: Path) -> ProcessorMixin:
    """transformers' own processor of the folder, also where torchvision or num2words, which only videos need, are missing."""
    images, tokenizer = AutoImageProcessor.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    if family == "mistral3":
        return PixtralReference(images, tokenizer)  # pyright: ignore[reportReturnType]
    cls = PROCESSORS[family]
    tokenizer.pad_token = tokenizer.eos_token if family == "aya_vision" else None
    videos = {} if "video_processor" not in cls.get_attributes() else {"video_processor": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "check_argument_for_proper_class", lambda self, name, argument: type(argument))
        patch.setattr(processing_smolvlm, "num2words", str)
        return cls(
            images, tokenizer, **videos, chat_template=tokenizer.chat_template, **PROCESSOR_SIZES.get(family, {})
        )
