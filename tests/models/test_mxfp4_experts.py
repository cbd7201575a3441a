"""gpt-oss natively with experts in MXFP4: the dequantised model's states, reads, refused writes, and bad checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import tiny_config
from helpers_families import points_of
from helpers_mxfp4 import in_mxfp4
from helpers_runner import random_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pymllm_interp import LM, SamplingParams
from pymllm_interp.layers.quantization.expert_tiles import ExpertTiles
from pymllm_interp.layers.quantization.experts import QuantizableExperts
from pymllm_interp.layers.quantization.weight import QuantizedWeight
from pymllm_interp.models.registry import described
from pymllm_interp.models.weights.loading import WeightsError

PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2)]
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 512, "max_running_requests": 4}
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """In MXFP4, and dequantised."""
    torch.manual_seed(1)
    config, root = tiny_config("gpt_oss"), tmp_path_factory.mktemp("gpt-oss")
    config.hidden_size, config.intermediate_size = 96, 64
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "base")
    return in_mxfp4(root / "base", root / "m", root / "plain")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_those_of_the_dequantised_model(folders: tuple[Path, Path], dtype: str) -> None:
    params, found = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), []
    for folder in folders:
        with LM(folder, impl="native", **SIZES | {"dtype": dtype}) as lm:
            found.append(lm.generate(PROMPTS, params, capture=list(points_of(lm.model_spec))))
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        for site, states in theirs.activations.items():
            torch.testing.assert_close(ours.activations[site], states, rtol=1e-5, atol=1e-5)


def test_weights_are_read_as_transformers_dequantises_them_and_refuse_writes(folders: tuple[Path, Path]) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    with LM(folders[0], **SIZES) as lm:
        experts = lm.runner.get_model().get_submodule(EXPERTS)
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (tensors[f"{EXPERTS}.{name}_{part}"] for part in ("blocks", "scales"))
            expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert torch.equal(getattr(experts, name), expected)
            assert experts.quantized[name].codes.numel() == blocks.numel()
        before = lm.runner.model_state.fingerprint()
        for write in (
            lambda: experts.gate_up_proj.zero_(),
            lambda: setattr(experts, "down_proj", torch.nn.Parameter(torch.zeros(4, 64, 96))),
        ):
            with pytest.raises(NotImplementedError, match=r"mlp\.experts\.\w+_proj` is quantised"):
                write()
        experts.down_proj_scales.add_(1)
        assert lm.runner.model_state.fingerprint() != before
        assert "experts are quantised (mxfp4)" in described(lm.hf_config)


def test_random_weights_are_in_the_format_of_the_config(folders: tuple[Path, Path]) -> None:
    with LM(folders[0], load_format="dummy", **SIZES) as lm:
        experts = lm.runner.get_model().get_submodule(EXPERTS)
        weight = experts.gate_up_proj
        assert set(experts.quantized) == {"gate_up_proj", "down_proj"} and weight.shape == (4, 96, 128)
        assert 0.5 < weight.std() * 96**0.5 < 2
        assert lm.forward(PROMPTS[:1])[0].logits.isfinite().all()
        assert lm.runner.get_model().get_submodule("model.layers.0.self_attn.q_proj").quantized is None


@pytest.mark.parametrize("fault", ["no scales", "no weight", "misshapen", "NaN", "signed", "no config", "codes only"])
def test_bad_checkpoints_are_refused_by_name(folders: tuple[Path, Path], fault: str, tmp_path: Path) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    config = json.loads((folders[0] / "config.json").read_text())
    name, match = f"{EXPERTS}.gate_up_proj", r"layers\.1\.mlp\.experts\.gate_up_proj"
    if fault in ("no scales", "no weight"):
        del tensors[f"{name}_scales"]
    if fault == "no weight":
        del tensors[f"{name}_blocks"]
    elif fault == "misshapen":
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:, :-1].clone()
    elif fault == "NaN":
        tensors[f"{name}_scales"][0, 0, 0] = 255
    elif fault == "signed":
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"].to(torch.int8)
    elif fault == "no config":
        del config["quantization_config"]
        match = "config.json has no quantization_config"
    elif fault == "codes only":
        codes = tensors.pop(f"{name}_blocks")
        del tensors[f"{name}_scales"]
        tensors[name] = codes.flatten(2).transpose(1, 2).contiguous()
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=match):
        LM(tmp_path, **SIZES)


def test_layers_that_are_not_quantised_stay_so(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors, plain = (load_file(folder / "model.safetensors") for folder in folders)
    for part in ("blocks", "scales"):
        del tensors[f"{EXPERTS}.down_proj_{part}"]
    tensors[f"{EXPERTS}.down_proj"] = plain[f"{EXPERTS}.down_proj"]
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with LM(tmp_path, **SIZES) as lm, LM(folders[1], **SIZES) as other:
        assert set(lm.runner.get_model().get_submodule(EXPERTS).quantized) == {"gate_up_proj"}
        torch.testing.assert_close(
            lm.forward(PROMPTS)[0].logits, other.forward(PROMPTS)[0].logits, rtol=1e-5, atol=1e-5
        )


def test_scales_that_no_tile_holds_name_their_weight(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU stores experts, whose tiles hold scales within 2^127 of each other."""

    def as_tiles(self: QuantizableExperts, name: str, weight: QuantizedWeight, device: str) -> bool:
        return bool(ExpertTiles.of(weight, self.num_experts, name == "gate_up_proj", self.interleaved))

    monkeypatch.setattr(QuantizableExperts, "set_quantized", as_tiles)
    tensors = load_file(folders[0] / "model.safetensors")
    scales = tensors[f"{EXPERTS}.down_proj_scales"]
    scales.view(-1)[0], scales.view(-1)[1] = 0, 254
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        WeightsError, match=rf"{EXPERTS}.down_proj is quantised: scales of experts are 2\^-127 to 2\^127"
    ):
        LM(tmp_path, **SIZES)


def test_what_cannot_be_quantised_at_load_says_so(folders: tuple[Path, Path]) -> None:
    with pytest.raises(WeightsError, match="GptOssForCausalLM has experts or states, and is not quantised"):
        LM(folders[1], quantize="fp8", **SIZES)
