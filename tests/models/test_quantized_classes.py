"""Quantised models by their classes in transformers: MXFP4 and FP8 are dequantised at load, others refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import tiny_config
from helpers_mxfp4 import in_mxfp4
from helpers_quantized import write_quantized
from helpers_runner import random_ids
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.models.registry import described
from pymllm_interp.models.weights.loading import WeightsError

PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2)]


def saved(family: str, folder: Path, **settings: Any) -> Path:
    torch.manual_seed(1)
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LM:
    return LM(folder, dtype="float32", device="cpu", kv_cache_tokens=512, **options)


def results_of(folder: Path, **options: Any) -> list[Any]:
    """The logits of each prompt, and its greedy tokens."""
    with load(folder, **options) as lm:
        logits = [out.logits for out in lm.forward(PROMPTS)]
        made = [out.outputs[0].token_ids for out in lm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=5))]
    return [*logits, made]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert ours[-1] == theirs[-1]
    for one, two in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_experts_in_mxfp4_are_dequantised(tmp_path: Path) -> None:
    base = saved("gpt_oss", tmp_path / "base", hidden_size=32, intermediate_size=64)
    stored, plain = in_mxfp4(base, tmp_path / "m", tmp_path / "plain")
    assert_same(results_of(stored, impl="transformers"), results_of(plain, impl="transformers"))


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
