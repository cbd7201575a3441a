"""Each field of a config that changes transformers' logits changes a native family's alike, or transformers' class runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from registry_configs import registry_config
from transformers import AutoModelForCausalLM, PretrainedConfig

from pymllm_interp import LM
from pymllm_interp.core.families import FAMILIES

PROMPT = [5, 17, 3, 80, 44, 9, 61, 2, 33, 12, 70, 8, 21, 90, 14]
ELSEWHERE = (
    "chunk_size_feed_forward", "initializer_range", "output_hidden_states", "output_attentions", "return_dict", "use_cache",
    "is_encoder_decoder", "is_decoder", "num_labels", "tie_word_embeddings", "add_cross_attention", "pretraining_tp",
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "n_embd",
    "n_layer", "n_head", "max_position_embeddings", "n_positions", "output_router_logits",
    "use_bidirectional_attention",  # makes an encoder, which has no logits
)  # fmt: skip
"""Fields of sizes and of outputs, and fields of which other tests have each value."""
ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")


def config_of(family: str) -> PretrainedConfig:
    return CONFIGS[family]() if family in CONFIGS else registry_config(family)


def another(name: str, value: Any) -> Any:
    """Another value of a field; None if the test knows none."""
    if name in ELSEWHERE:
        return None
    if name in ACTIVATIONS:
        return "relu"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 1.5 + 0.1 if isinstance(value, float) else None


def cases() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        if not family.endswith("vl_text"):
            fields = config_of(family).to_dict()
            yield from ((family, name) for name, value in fields.items() if another(name, value) is not None)


@pytest.mark.local
@pytest.mark.thin(6)
@pytest.mark.parametrize(("family", "field"), cases())
@torch.no_grad()
def test_a_field_means_what_it_means_in_transformers(family: str, field: str, tmp_path: Path) -> None:
    config = config_of(family)
    fields = {name: value for name, value in config.to_dict().items() if name != "transformers_version"}
    fields[field] = another(field, fields[field])
    try:
        random_model(type(config)(**fields)).save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
        expected = model(torch.tensor([PROMPT])).logits[0]
    except Exception as error:
        pytest.skip(f"transformers takes no other value: {error}")
    tiny_tokenizer().save_pretrained(tmp_path)
    with LM(tmp_path, dtype="float32", device="cpu", kv_cache_tokens=256) as lm:
        torch.testing.assert_close(lm.forward([PROMPT])[0].logits, expected, atol=2e-3, rtol=1e-3)
