"""Tiny random encoder-decoder models, and transformers' results for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
)

VOCAB = 97
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bart": lambda: BartConfig(
        vocab_size=VOCAB, d_model=36, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=3,
        encoder_ffn_dim=40, decoder_ffn_dim=44, max_position_embeddings=64, forced_eos_token_id=None, init_std=0.3,
    ),
    "t5": lambda: T5Config(
        vocab_size=VOCAB, d_model=36, d_kv=8, d_ff=40, num_layers=3, num_decoder_layers=2, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0, initializer_factor=2.0,
    ),
    "t5_gated": lambda: T5Config(
        vocab_size=VOCAB, d_model=36, d_kv=12, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=3,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, initializer_factor=2.0,
    ),
}  # fmt: skip
PARTS = {
    "bart": ("model.encoder.layers", "model.decoder.layers", ("self_attn", "fc2"), ("self_attn", "fc2", "encoder_attn")),
    "t5": (
        "encoder.block", "decoder.block", ("layer.0.SelfAttention", "layer.1.DenseReluDense"),
        ("layer.0.SelfAttention", "layer.2.DenseReluDense", "layer.1.EncDecAttention"),
    ),
}  # fmt: skip
PARTS["t5_gated"] = PARTS["t5"]


def saved(kind: str, folder: Path) -> PreTrainedModel:
    """A model of a kind with random weights, saved in a folder."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[kind]()).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


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
        for prefix, layers in (("encoder.", encoder), ("", decoder)):
            found[f"{prefix}final_norm"] = f"{layers.rpartition('.')[0]}.final_layer_norm"
    return found


def inputs_of(source: list[int]) -> dict[str, torch.Tensor]:
    """transformers' arguments of an encoder's input."""
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
