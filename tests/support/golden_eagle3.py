"""Logits of `speculators`' Eagle3 model, which tests/speculative/test_eagle3.py compares with.

Made with speculators 0.9.0 beside the development environment::

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    TORCHDYNAMO_DISABLE=1 python tests/support/golden_eagle3.py

Weights and inputs follow from seeds, so only the logits are kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).parents[1] / "golden" / "eagle3.json"
VOCAB, HIDDEN, DRAFT_VOCAB, LENGTH, STEPS, SEED = 97, 72, 60, 12, 3, 3
LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "llama": {"transformer_layer_config": {**LAYER, "model_type": "llama"}},
    "qwen3": {
        "transformer_layer_config": {**LAYER, "model_type": "qwen3"},
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "gpt-oss": {"transformer_layer_config": {**LAYER, "model_type": "llama"}, "norm_before_fc": True},
}
"""config.json of each head, beside what all have."""


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a head."""
    common = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    return {**common, **HEADS[name]}


def d2t() -> torch.Tensor:
    """[draft vocab] int64: draft token i is token i + d2t[i]."""
    return torch.arange(DRAFT_VOCAB) // 2


def inputs() -> tuple[torch.Tensor, list[int]]:
    """States of the model [LENGTH, 3 * HIDDEN], and the tokens behind each."""
    generator = torch.Generator().manual_seed(SEED)
    states = torch.randn(LENGTH, 3 * HIDDEN, generator=generator)
    return states, torch.randint(VOCAB, (LENGTH,), generator=generator).tolist()


def logits_of(name: str) -> list[list[list[float]]]:
    """[steps, LENGTH, DRAFT_VOCAB]: step i reads the head's own output of step i - 1, and the true token."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    from pymllm_interp.models.weights.loading import draw

    config = Eagle3SpeculatorConfig(**config_of(name))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).eval().float()
    for key, parameter in model.state_dict().items():
        if parameter.dtype == torch.float32:
            draw(parameter, key, SEED)
    model.d2t.copy_(d2t())
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: found.append(out[0]))
    states, tokens = inputs()
    with torch.no_grad():
        model(states[None], torch.tensor([tokens]), torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    return [out.double().round(decimals=7).tolist() for out in found]


if __name__ == "__main__":
    PATH.write_text(json.dumps({name: logits_of(name) for name in HEADS}) + "\n")
