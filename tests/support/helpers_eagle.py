"""EAGLE-3 checkpoints for tests, and what a head says, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from golden_eagle3 import DRAFT_VOCAB, HIDDEN, LAYER, VOCAB, config_of, d2t
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.models.native.eagle import Eagle3Head, EagleOptions
from pymllm_interp.models.weights.loading import draw


def weights_of(name: str, seed: int, own_embedding: bool = True) -> dict[str, torch.Tensor]:
    """Seeded weights, by the names of `speculators`."""
    given = config_of(name)
    flags = {
        flag: given.get(flag, False) for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    config = AutoConfig.for_model(**given["transformer_layer_config"])
    options = EagleOptions(DRAFT_VOCAB, (0, 1, 2), **flags)
    embedding = None if own_embedding else torch.zeros(VOCAB, HIDDEN)
    head = Eagle3Head(config, options, ModelSpec.of(config, torch.float32), "cpu", 128, embedding)
    found = {key: value.clone() for key, value in head.state_dict().items()}
    for key, value in found.items():
        if value.is_floating_point():
            draw(value, key, seed)
    return {**found, "d2t": d2t(), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}


def checkpoint(folder: Path, name: str = "llama", seed: int = 3, form: str = "speculators") -> dict[str, torch.Tensor]:
    """Write a checkpoint in the form of `speculators`, or of SafeAILab, without an embedding. Returns its weights."""
    folder.mkdir(exist_ok=True, parents=True)
    weights = weights_of(name, seed, form == "speculators")
    if form == "speculators":
        (folder / "config.json").write_text(json.dumps(config_of(name)))
        save_file(weights, folder / "model.safetensors")
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}
        (folder / "config.json").write_text(json.dumps({**LAYER, **config}))
        torch.save(
            {key.replace("layers.0.", "midlayer."): value for key, value in weights.items()},
            folder / "pytorch_model.bin",
        )
    return weights


def drafts_of(weights: dict[str, torch.Tensor], states: torch.Tensor, tokens: list[int], count: int) -> list[int]:
    """Greedy drafts of a llama head, in plain torch: no cache, no batch.

    Args:
        states: [n, 3 * hidden] of the model's positions.
        tokens: n, behind each of them.
    """
    config = AutoConfig.for_model(**LAYER, model_type="llama")
    rotary = LlamaRotaryEmbedding(config)
    projected, n = F.linear(states, weights["fc.weight"]), len(tokens)
    tokens, drafts = list(tokens), []
    for _ in range(count):
        out, logits = _layer(weights, projected, torch.tensor(tokens), rotary, config)
        token = int(logits[-1].argmax())
        drafts.append(token + int(weights["d2t"][token]))
        tokens.append(drafts[-1])
        projected = torch.cat((projected[:n], projected[n:], out[-1:]))
    return drafts


def _layer(
    weights: dict[str, torch.Tensor], states: torch.Tensor, ids: torch.Tensor, rotary: Any, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    def of(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"layers.0.{name}.weight"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[f"{name}.weight"], config.rms_norm_eps)

    x = torch.cat(
        (norm("layers.0.input_layernorm", weights["embed_tokens.weight"][ids]), norm("layers.0.hidden_norm", states)),
        -1,
    )
    q, k, v = (of(f"self_attn.{kind}_proj", x).view(1, len(ids), -1, 8).transpose(1, 2) for kind in "qkv")
    q, k = apply_rotary_pos_emb(q, k, *rotary(x[None], torch.arange(len(ids))[None]))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    h = states + of("self_attn.o_proj", attended[0].transpose(0, 1).reshape(len(ids), -1))
    y = norm("layers.0.post_attention_layernorm", h)
    h = h + of("mlp.down_proj", F.silu(of("mlp.gate_proj", y)) * of("mlp.up_proj", y))
    return h, F.linear(norm("norm", h), weights["lm_head.weight"])
