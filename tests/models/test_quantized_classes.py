"""Quantised models by their classes in transformers: MXFP4 and FP8 are dequantised at load, others refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import tiny_config
from helpers_quantized import write_quantized
from helpers_runner import random_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.models.registry import described
from pymllm_interp.models.weights.loading import WeightsError

PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2)]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def saved(family: str, folder: Path, **settings: Any) -> Path:
    torch.manual_seed(1)
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LM:
    return LM(folder, dtype="float32", device="cpu", kv_cache_tokens=512, **options)


def results_of(folder: Path) -> list[Any]:
    """The logits of each prompt, and its greedy tokens."""
    with load(folder) as lm:
        logits = [out.logits for out in lm.forward(PROMPTS)]
        made = [out.outputs[0].token_ids for out in lm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=5))]
    return [*logits, made]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert ours[-1] == theirs[-1]
    for one, two in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_experts_in_mxfp4_are_dequantised(tmp_path: Path) -> None:
    """gpt-oss: blocks of 16 bytes, two codes in each, the lower bits first; the exponents of the scales have bias 127."""
    base = saved("gpt_oss", tmp_path / "base", hidden_size=32, intermediate_size=64)
    tensors, draw = load_file(base / "model.safetensors"), torch.Generator().manual_seed(0)
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out]
            experts, width, rows = weight.shape
            blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=draw).to(torch.uint8)
            scales = torch.randint(119, 124, (experts, rows, width // 32), generator=draw).to(torch.uint8)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(3)
            values = values * torch.exp2(scales.float() - 127)[..., None]
            plain[name] = values.flatten(2).transpose(1, 2).contiguous()
    assert len(stored) > len(tensors)
    config = json.loads((base / "config.json").read_text())
    for own, found in ((base, plain), (tmp_path / "m", stored)):
        own.mkdir(exist_ok=True)
        save_file(found, own / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert_same(results_of(tmp_path / "m"), results_of(base))


def test_blocks_in_fp8_are_dequantised(tmp_path: Path) -> None:
    base = saved("arcee", tmp_path / "base", intermediate_size=64)
    folder = write_quantized(base, tmp_path / "m", "fp8-blocks", group=16, weight_block_size=[16, 16], rows=16)
    assert_same(results_of(folder), results_of(folder / "plain"))
    with load(folder) as lm:
        assert "fp8 weights are dequantised at load" in described(lm.hf_config)


def test_others_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_quantized(saved("arcee", tmp_path / "base"), tmp_path / "m", "awq")
    options: dict[str, Any]
    for path, options in ((folder, {}), (tmp_path / "base", {"quantize": "fp8"})):
        with pytest.raises(
            WeightsError, match=r"ArceeForCausalLM runs by its class in transformers, .*: use the unquantised"
        ):
            load(path, **options)
