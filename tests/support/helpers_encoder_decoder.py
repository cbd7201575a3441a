"""Tiny random encoder-decoder models, and transformers' results for them."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    WhisperConfig,
    WhisperFeatureExtractor,
)

VOCAB = 97
RATE, POSITIONS = 16_000, 20
"""Samples a second that Whisper reads, and positions of the tiny model's encoder: 6,400 samples."""
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bart": lambda: BartConfig(
        vocab_size=VOCAB, d_model=36, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=3,
        encoder_ffn_dim=40, decoder_ffn_dim=44, max_position_embeddings=64, forced_eos_token_id=None, init_std=0.3,
    ),
    "t5": lambda: T5Config(
        vocab_size=VOCAB, d_model=36, d_kv=8, d_ff=40, num_layers=3, num_decoder_layers=2, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0, initializer_factor=2.0,
    ),
    "whisper": lambda: WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=36, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=3, encoder_ffn_dim=40, decoder_ffn_dim=44, max_source_positions=POSITIONS, max_target_positions=64,
        decoder_start_token_id=2, pad_token_id=1, bos_token_id=2, eos_token_id=3, suppress_tokens=None,
        begin_suppress_tokens=None, init_std=0.5,
    ),
    "t5_gated": lambda: T5Config(
        vocab_size=VOCAB, d_model=36, d_kv=12, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=3,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, initializer_factor=2.0,
    ),
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": 2, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1,
    "lang_to_id": {"<|en|>": 20, "<|de|>": 21}, "task_to_id": {"transcribe": 22, "translate": 23}, "is_multilingual": True,
    "no_timestamps_token_id": 24, "prev_sot_token_id": 25,
}  # fmt: skip
"""Values of a generation_config.json of Whisper's kind."""
PARTS = {
    "bart": ("model.encoder.layers", "model.decoder.layers", ("self_attn", "fc2"), ("self_attn", "fc2", "encoder_attn")),
    "t5": (
        "encoder.block", "decoder.block", ("layer.0.SelfAttention", "layer.1.DenseReluDense"),
        ("layer.0.SelfAttention", "layer.2.DenseReluDense", "layer.1.EncDecAttention"),
    ),
}  # fmt: skip
PARTS["t5_gated"], PARTS["whisper"] = PARTS["t5"], PARTS["bart"]


def saved(kind: str, folder: Path) -> PreTrainedModel:
    """A model of a kind with random weights, saved in a folder."""
    torch.manual_seed(0)
    auto = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    model = auto.from_config(CONFIGS[kind]()).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return auto.from_pretrained(folder).eval()


def audio(seed: int, samples: int) -> np.ndarray:
    """Samples [n] float32 of two tones and noise."""
    rng = np.random.default_rng(seed)
    times, tones = np.arange(samples) / RATE, rng.uniform(200, 4000, 2)
    found = 0.3 * np.sin(2 * np.pi * tones[:, None] * times).sum(0) + 0.05 * rng.standard_normal(samples)
    return found.astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE, width: int = 2) -> bytes:
    """A file of samples [n] or [n, channels]."""
    file, values = io.BytesIO(), np.atleast_2d(samples.T).T
    full = (values * (2 ** (8 * width - 1) - 1)).round().astype("<i4")
    data = (full + 128).astype(np.uint8) if width == 1 else full.view(np.uint8).reshape(*full.shape, 4)[..., :width]
    with wave.open(file, "wb") as opened:
        opened.setparams((values.shape[1], width, rate, 0, "NONE", ""))
        opened.writeframes(np.ascontiguousarray(data).tobytes())
    return file.getvalue()


def features_of(samples: np.ndarray) -> torch.Tensor:
    """transformers' features [1, mel bins, frames] of samples."""
    extractor = WhisperFeatureExtractor(feature_size=8)
    extractor.n_samples = 2 * POSITIONS * extractor.hop_length
    return extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features


def modules_of(kind: str, model: PreTrainedModel) -> dict[str, str]:
    """Site -> the module of transformers with its state as output."""
    encoder, decoder, of_encoder, of_decoder = PARTS[kind]
    found: dict[str, str] = {}
    for prefix, layers, parts in (("encoder.", encoder, of_encoder), ("", decoder, of_decoder)):
        for i in range(len(model.get_submodule(layers))):  # pyright: ignore[reportArgumentType]
            found[f"{prefix}resid_post.{i}"] = f"{layers}.{i}"
            for site, part in zip(("attn_out", "mlp_out", "cross_attn_out"), parts, strict=False):
                found[f"{prefix}{site}.{i}"] = f"{layers}.{i}.{part}"
    if kind != "bart":
        name = "layer_norm" if kind == "whisper" else "final_layer_norm"
        for prefix, layers in (("encoder.", encoder), ("", decoder)):
            found[f"{prefix}final_norm"] = f"{layers.rpartition('.')[0]}.{name}"
    return found


def inputs_of(source: Any) -> dict[str, torch.Tensor]:
    """transformers' arguments of an encoder's input: token ids, or a prompt with audio."""
    if isinstance(source, dict):
        return {"input_features": features_of(source["multi_modal_data"]["audio"][0])}
    return {"input_ids": torch.tensor([source])}


@torch.no_grad()
def states_of(
    kind: str, model: PreTrainedModel, source: Any, decoder_ids: list[int], edits: dict[str, Any] | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(site -> state [positions, width], logits [positions, vocab]) of one pass of transformers.

    Args:
        edits: site -> function of its state.
    """
    states: dict[str, torch.Tensor] = {}
    handles = []

    def hook(site: str) -> Callable[..., Any]:
        def run(module: Any, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if edits and site in edits:
                first = edits[site](first)
            states[site] = first[0].clone()
            return (first, *output[1:]) if isinstance(output, tuple) else first

        return run

    for site, path in modules_of(kind, model).items():
        handles.append(model.get_submodule(path).register_forward_hook(hook(site)))
    try:
        out: Any = model(**inputs_of(source), decoder_input_ids=torch.tensor([decoder_ids]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states, out.logits[0]


@torch.no_grad()
def greedy(model: PreTrainedModel, source: Any, decoder_ids: list[int], count: int) -> list[int]:
    """The tokens of transformers' greedy `generate`, without those of the prompt. It never ends early."""
    from transformers import GenerationMixin

    start = torch.tensor([decoder_ids])
    found: Any = GenerationMixin.generate(
        model, **inputs_of(source), decoder_input_ids=start, max_new_tokens=count, min_new_tokens=count, do_sample=False,
        num_beams=1, use_cache=False, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=decoder_ids[0],
    )  # fmt: skip
    return found[0, len(decoder_ids) :].tolist()
