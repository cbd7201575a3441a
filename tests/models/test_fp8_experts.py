"""Mixtures of experts with FP8 weights, natively: blocks and channels, the dequantised model's states, and bad checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import tiny_config
from helpers_families import points_of
from helpers_quantized import write_quantized
from helpers_runner import random_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.models.registry import described, is_native
from pymllm_interp.models.weights.loading import WeightsError

PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2)]
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 512, "max_running_requests": 4}
KEEP = ("mlp.gate.", "moe.gate.")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(family, form) -> a quantised checkpoint, with the dequantised one in its folder "plain"."""
    made: dict[tuple[str, str], Path] = {}

    def folder_of(family: str, form: str) -> Path:
        if (family, form) not in made:
            torch.manual_seed(1)
            root = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(root / "base")
            made[family, form] = write_quantized(root / "base", root / "m", form, keep=KEEP)
        return made[family, form]

    return folder_of


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_moe", "fp8-blocks"), ("qwen3_moe", "fp8-channel"), ("mixtral", "fp8-tensor"), ("glm4_moe", "fp8-blocks")],
)
def test_states_are_those_of_the_dequantised_model(family: str, form: str, checkpoint: Callable[..., Path]) -> None:
    folder, params, found = checkpoint(family, form), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), []
    for path in (folder, folder / "plain"):
        with LM(path, **SIZES) as lm:
            assert is_native(lm.hf_config, "auto")
            found.append(lm.generate(PROMPTS, params, capture=list(points_of(lm.model_spec))))
            experts = lm.runner.get_model().get_submodule("model.layers.1.mlp.experts")
            if path == folder:
                assert {name: weight.kind for name, weight in experts.quantized.items()} == {
                    "gate_up_proj": "fp8",
                    "down_proj": "fp8",
                }
                assert "quantised" in described(lm.hf_config)
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        for site, states in theirs.activations.items():
            torch.testing.assert_close(ours.activations[site], states, rtol=1e-5, atol=1e-5)


def test_random_weights_are_in_the_format_of_the_config(checkpoint: Callable[..., Path]) -> None:
    with LM(checkpoint("qwen3_moe", "fp8-blocks"), load_format="dummy", **SIZES) as lm:
        experts = lm.runner.get_model().get_submodule("model.layers.0.mlp.experts")
        assert experts.quantized["gate_up_proj"].kind == "fp8" and experts.quantized["down_proj"].group_size == 16
        assert 0.5 < experts.gate_up_proj.std() * 32**0.5 < 2
        assert lm.forward(PROMPTS[:1])[0].logits.isfinite().all()


@pytest.mark.parametrize("fault", ["no scale", "no weight", "misshapen", "one too many", "another form", "W4A16"])
def test_bad_checkpoints_are_refused_by_name(fault: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe", "w4a16" if fault == "W4A16" else "fp8-blocks")
    tensors = load_file(folder / "model.safetensors")
    name, match = "model.layers.1.mlp.experts.2.up_proj", r"layers\.1\.mlp\.experts\.2\.up_proj"
    if fault == "no scale":
        del tensors[f"{name}.weight_scale_inv"]
    elif fault == "no weight":
        del tensors[f"{name}.weight"]
    elif fault == "misshapen":
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:-1].clone()
    elif fault == "one too many":
        tensors[f"{name.replace('.2.', '.4.')}.weight"] = tensors[f"{name}.weight"].clone()
        match = r"experts\.4\.up_proj"
    elif fault == "another form":
        tensors[f"{name}.weight_scale_inv"] = torch.ones(1)
        match = r"experts\.gate_up_proj: the experts' weights are quantised differently"
    else:
        match = "experts are read in FP8 and MXFP4"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=match):
        LM(tmp_path, **SIZES)
