"""Bridges over one model's weights: ours, and TransformerLens' own as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pymllm_interp.lens import Bridge

FAMILIES = ["llama", "gpt2", "gemma2", "gpt_neox", "qwen3", "mistral"]
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 3, 2], [1, 2, 3, 4, 90, 91, 92]])
CLOSE = {"rtol": 1e-4, "atol": 5e-5}

Pair = tuple["Bridge", Any]


@contextmanager
def head_results(*bridges: Any) -> Iterator[None]:
    """Within, the bridges serve `hook_result`."""
    for bridge in bridges:
        bridge.set_use_attn_result(True)
    yield
    for bridge in bridges:
        bridge.set_use_attn_result(False)


def make_pair(family: str, lm_of: Callable[..., Any], model_folder: Callable[[str], Any]) -> Pair:
    """Our bridge, and TransformerLens' over transformers' model with the same weights."""
    from conftest import tiny_tokenizer
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    from pymllm_interp.lens import Bridge

    folder = model_folder(family)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    theirs = TransformerBridge.boot_transformers(
        str(folder), hf_model=hf, tokenizer=tiny_tokenizer(), dtype=torch.float32, device="cpu"
    )
    return Bridge(lm_of(family)), theirs
