"""Images: the vision tower once for many requests over one image, their decode steps, and prompts of one large image each.

    python benchmarks/images.py [--size tiny|7b] [--device cuda] [--dtype bfloat16] [--requests 64] [--side 1024] [--out FILE]
    python benchmarks/images.py --peer vllm --size 7b --out FILE     # the second part alone, in vLLM's environment

The model has the shape of Qwen2.5-VL-7B, or a tiny one, and random weights. Its folder, with a tokenizer of bytes and the image
processor's file, is made here. `shared`: requests over one image, and text of the same length. Milliseconds of a decode step are
the difference of a long and a short generation, over the tokens between them. `burst`: prompts of one picture each, as Pillow
images that no round has seen before: reading them on the host is part of the time. The prefix cache is off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig

WORDS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST_WORD = 256
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        {
            "depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64,
            "fullatt_block_indexes": [3],
        },
    ),
    "7b": (
        {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
}  # fmt: skip
"""Text and vision config of each size."""
SHORT = 8


def make_folder(folder: Path, size: str) -> Path:
    """config.json, a tokenizer of bytes and special tokens, and preprocessor_config.json."""
    text, vision = SIZES[size]
    ids = {word.strip("<|>"): FIRST_WORD + i for i, word in enumerate(WORDS)}
    config = Qwen2_5_VLConfig(
        text_config={**text, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None},
        vision_config={**vision, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], architectures=["Qwen2_5_VLForConditionalGeneration"], tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=WORDS[0], pad_token=WORDS[0]).save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14,
        "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def picture(side: int, seed: int) -> Image.Image:
    """A picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((side, side), Image.Resampling.BICUBIC)


def prompt_of(image: Image.Image, seed: int) -> dict[str, Any]:
    """A prompt of one image between some tokens, as ours and vLLM's."""
    start, end, pad = (FIRST_WORD + WORDS.index(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad"))
    text = np.random.default_rng(seed).integers(1, 250, 24).tolist()
    return {"prompt_token_ids": [*text[:8], start, pad, end, *text[8:]], "multi_modal_data": {"image": [image]}}


def burst(
    generate: Callable[[Sequence[Any], int], Sequence[Sequence[int]]], args: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of prompts of one new picture each.

    Args:
        generate: (prompts, tokens of each) -> token ids.
    """
    seconds = list[float]()
    for turn in range(args.rounds + 1):
        prompts = [prompt_of(picture(args.side, 1000 * turn + i), 1000 * turn + i) for i in range(args.requests)]
        started = time.perf_counter()
        found = generate(prompts, args.tokens)
        seconds.append(time.perf_counter() - started)
        assert [len(ids) for ids in found] == [args.tokens] * args.requests
    median = statistics.median(seconds[1:])  # the first one warms up
    return {
        "requests": args.requests, "side": args.side, "tokens": args.tokens, "seconds": median, "turns": seconds[1:],
        "tokens_per_second": args.requests * args.tokens / median,
    }  # fmt: skip


def shared(lm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Runs of the tower for requests over one image, and decode steps of image and of text requests, by turns."""
    vision = lm.runner.step_inputs.vision
    before = vision.cache.num_computed
    image = picture(args.side, 77)
    prompts = [prompt_of(image, i) for i in range(args.shared)]

    def seconds(given: Sequence[Any], tokens: int) -> float:
        started = time.perf_counter()
        _generate(lm, given, tokens)
        return time.perf_counter() - started

    length = len(lm.generate(prompts[:1], _greedy(1), progress=False)[0].prompt_token_ids)
    texts = [np.random.default_rng(i).integers(1, 250, length).tolist() for i in range(args.shared)]
    steps: dict[str, list[float]] = {"image": [], "text": []}
    for turn in range(args.rounds + 1):
        for kind, given in [("image", prompts), ("text", texts)][:: 1 if turn % 2 else -1]:
            taken = seconds(given, args.tokens) - seconds(given, SHORT)
            steps[kind].append(taken / (args.tokens - SHORT) * 1e3)
    median = {kind: statistics.median(turns[1:]) for kind, turns in steps.items()}
    return {
        "requests": args.shared, "prompt_tokens": length, "tower_runs": vision.cache.num_computed - before, "step_ms": median,
        "turns_ms": {kind: turns[1:] for kind, turns in steps.items()}, "ratio": median["image"] / median["text"],
    }  # fmt: skip


def _greedy(tokens: int) -> Any:
    from pymllm_interp import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _generate(lm: Any, prompts: Sequence[Any], tokens: int) -> list[Sequence[int]]:
    return [out.token_ids for out in lm.generate(list(prompts), _greedy(tokens), progress=False)]


def ours(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both parts."""
    from pymllm_interp import LM
    from pymllm_interp.bench import describe_machine

    with LM(
        folder, load_format="dummy", device=args.device, dtype=args.dtype, enable_prefix_caching=False,
        max_model_len=args.max_model_len,
    ) as lm:  # fmt: skip
        return {
            "engine": "pymllm-interp",
            "machine": describe_machine(),
            "shared": shared(lm, args),
            "burst": burst(lambda *given: _generate(lm, *given), args),
            "encoder_cache": lm.runner.step_inputs.vision.cache.stats(),
        }


def vllms(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The second part, by vLLM."""
    import vllm  # pyright: ignore[reportMissingImports]

    engine = vllm.LLM(
        str(folder), load_format="dummy", dtype=args.dtype, enable_prefix_caching=False, max_model_len=args.max_model_len,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )  # fmt: skip

    def generate(prompts: Sequence[Any], tokens: int) -> list[Sequence[int]]:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [out.outputs[0].token_ids for out in engine.generate(list(prompts), params, use_tqdm=False)]

    return {
        "engine": f"vllm {vllm.__version__}",
        "machine": {
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "burst": burst(generate, args),
    }


def main() -> None:
    """Measure, print and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=32)
    parser.add_argument("--side", type=int, default=1024, help="pixels of a picture's side")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), args.size)
        record = {"size": args.size, **(vllms if args.peer else ours)(Path(folder), args)}
    print(json.dumps(record, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if args.peer:
        os._exit(0)  # its processes take a minute to end


if __name__ == "__main__":
    main()
