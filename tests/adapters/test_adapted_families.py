"""LoRA adapters of families that run by their classes in transformers, beside PEFT's formula in the same classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import SETTINGS, tiny_config
from helpers_adapters import adapted, change_tensors, linear_modules, write_adapter
from helpers_runner import random_ids
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.models.adapters.peft_config import AdapterError

PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2), random_ids(11, seed=3)]
REFUSED = {"falcon": "FalconLinear", "falcon-alibi": "FalconLinear", "gpt2": "Conv1D", "llama4_text": "Llama4Router"}
"""Families with linear modules of classes of their own, which an adapter cannot target."""


def saved(family: str, folder: Path) -> Any:
    """A random model of a family, saved in a folder."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> LM:
    return LM(folder, dtype="float32", device="cpu", impl="transformers", kv_cache_tokens=512)


@pytest.mark.few("family", "gpt2", "llama4_text")
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_other_classes_are_refused_by_name(family: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", saved(family, tmp_path / "model"), rank=3)
    with load(tmp_path / "model") as lm:
        with pytest.raises(AdapterError, match=f"it is a {REFUSED[family]}, and adapters change linear layers"):
            lm.adapters.load("a", tmp_path / "a")
        assert not lm.adapters and lm.generate([PROMPTS[0]], SamplingParams(max_tokens=1))


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", saved("mixtral", tmp_path / "model"), targets=["q_proj"], rank=3)
    change_tensors(
        folder, lambda found: {n.replace("self_attn.q_proj", "mlp.experts.0.w1"): t for n, t in found.items()}
    )
    with load(tmp_path / "model") as lm, pytest.raises(AdapterError, match="it belongs to experts"):
        lm.adapters.load("a", folder)


@pytest.mark.few(
    "family", "bloom", "cohere2", "deepseek_v3", "gemma3_text", "gpt_bigcode", "gpt_neox", "gptj", "mixtral", "mpt", "opt", "phi3",
    "qwen2_moe",
)  # fmt: skip
@pytest.mark.parametrize("family", sorted(SETTINGS.keys() - REFUSED.keys()))
def test_logits_are_those_of_peft(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path / "model")
    names = [name for name in linear_modules(model) if "experts" not in name.split(".")]
    write_adapter(tmp_path / "a", model, targets=names, rank=3, scale=0.05)
    with load(tmp_path / "model") as lm:
        lm.adapters.load("a", tmp_path / "a")
        outs = lm.forward(PROMPTS, lora=["a", None, "a"])
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        tokens = lm.generate(PROMPTS, params, lora=["a", None, "a"])
        changed = adapted(model, tmp_path / "a")
        for ids, out, made, own in zip(PROMPTS, outs, tokens, (changed, model, changed), strict=True):
            with torch.no_grad():
                logits = own(torch.tensor([ids]), use_cache=False).logits[0]
                again = own(torch.tensor([ids + made.outputs[0].token_ids[:-1]]), use_cache=False).logits[0]
            size = max(1.0, float(logits.abs().max()))
            assert float((out.logits - logits).abs().max()) <= 1e-5 * size
            assert again[len(ids) - 1 :].argmax(-1).tolist() == made.outputs[0].token_ids
