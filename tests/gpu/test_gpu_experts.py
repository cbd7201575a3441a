"""gpt-oss and GLM-4.5 in bfloat16 on CUDA, with graphs and without, with quantised experts and dequantised ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_devices import ways
from helpers_families import points_of
from helpers_mxfp4 import in_mxfp4
from helpers_quantized import write_quantized
from helpers_runner import random_ids
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.core.model_spec import INNER_SITES
from pymllm_interp.layers.quantization.expert_tiles import ExpertTiles

pytestmark = pytest.mark.gpu
PROMPTS = [random_ids(3 + 11 * i % 70, vocab=512, seed=i) for i in range(33)]
LONG = [random_ids(400, vocab=512, seed=50)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, skip_reading_prefix_cache=True)
OPTIONS: dict[str, Any] = {
    "device": "cuda", "kv_cache_tokens": 16384, "max_running_requests": 40, "capture_ring_bytes": 64 << 20,
    "inner_sites": INNER_SITES,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, and the same with dequantised ones."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=512, hidden_size=192, intermediate_size=320, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, sliding_window=32, num_local_experts=6, num_experts_per_tok=3,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    root = tmp_path_factory.mktemp("gpt-oss")
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_(0, 2)
    model.save_pretrained(root / "base")
    return in_mxfp4(root / "base", root / "m", root / "plain")


@pytest.fixture(scope="module")
def trio(folders: tuple[Path, Path]) -> Iterator[tuple[LM, LM, LM]]:
    """In MXFP4, dequantised, and dequantised in float32."""
    stored, plain = folders
    made = [LM(path, **with_tuning(dtype="bfloat16", **OPTIONS)) for path in (stored, plain)]
    made.append(LM(plain, **with_tuning(dtype="float32", **OPTIONS)))
    yield made[0], made[1], made[2]
    for lm in made:
        lm.shutdown()


def angles(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """1 less the cosine, by row."""
    return 1 - torch.cosine_similarity(ours.double().flatten(1).cpu(), theirs.double().flatten(1).cpu(), dim=-1)


def near(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """As near to float32 as dequantised weights are, by the median: where routers disagree, rows are far off with either."""
    off, allowed = angles(ours, exact).median(), angles(plain, exact).median()
    assert off < 2 * allowed + 1e-5, f"{what}: {off}, and dequantised {allowed}"


def test_experts_stay_in_4_bits(trio: tuple[LM, LM, LM]) -> None:
    experts = trio[0].runner.get_model().get_submodule("model.layers.1.mlp.experts")
    assert {name: type(weight) for name, weight in experts.quantized.items()} == dict.fromkeys(
        experts.NAMES, ExpertTiles
    )
    plain = trio[1].runner.get_model().get_submodule("model.layers.1.mlp.experts")
    for name in experts.NAMES:
        assert torch.equal(getattr(experts, name), getattr(plain, name))


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS, LONG], ids=["one", "batch", "long"])
def test_every_site_is_as_with_dequantised_weights(trio: tuple[LM, LM, LM], prompts: list[list[int]]) -> None:
    points = list(points_of(trio[0].model_spec))
    for outs in zip(*(model.forward(prompts, capture=points) for model in trio), strict=True):
        near(*(out.logits for out in outs), "logits")
        for site in points:
            near(*(out.activations[site] for out in outs), site)


def test_every_site_is_transformers(trio: tuple[LM, LM, LM], folders: tuple[Path, Path]) -> None:
    """In float32, on both attention backends' paths: prompts, and decode steps."""
    lm = trio[2]
    model = (
        AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32, attn_implementation="eager").cuda().eval()
    )
    for prompt, out in zip(
        PROMPTS[:6], lm.generate(PROMPTS[:6], PARAMS, capture=["resid_post.*", "logits"]), strict=True
    ):
        ids = torch.tensor([prompt + out.token_ids[:-1]], device="cuda")
        with torch.no_grad():
            found = model(ids, output_hidden_states=True)
        for layer in (0, 1):
            torch.testing.assert_close(
                out.activations[f"resid_post.{layer}"].cuda(), found.hidden_states[layer + 1][0], rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize("stored", [True, False], ids=["mxfp4", "dequantised"])
def test_decode_steps_are_replayed_and_equal_eager_ones(folders: tuple[Path, Path], stored: bool) -> None:
    found = []
    for disabled in (False, True):
        with LM(
            folders[0 if stored else 1], **with_tuning(dtype="bfloat16", disable_cuda_graph=disabled, **OPTIONS)
        ) as lm:
            before = ways(lm)
            outs = lm.generate(PROMPTS[:8], PARAMS)
            ran = ways(lm) - before
            assert disabled or sum(n for way, n in ran.items() if str(way).startswith("replay")) >= 8, ran
            found.append([out.token_ids for out in outs])
    assert found[0] == found[1]


def test_gradients_are_those_of_dequantised_weights(trio: tuple[LM, LM, LM]) -> None:
    grads = []
    for lm in trio[:2]:
        with lm.trace(PROMPTS[3], grad=True):
            h = lm.model.layers[0].output
            h.requires_grad_(True)
            with lm.output.logits[0, -1].float().square().sum().backward():
                grads.append(h.grad.save())
    assert angles(grads[0][0], grads[1][0]).median() < 1e-3


def test_the_checkpoint_of_the_bench_is_read(tmp_path: Path) -> None:
    """Random weights in the format that config.json names."""
    config = json.loads((Path(__file__).parents[2] / "benchmarks/configs/gpt-oss-20b/config.json").read_text())
    config |= {
        "num_hidden_layers": 2,
        "layer_types": config["layer_types"][:2],
        "vocab_size": 512,
        "eos_token_id": None,
    }
    config |= {"bos_token_id": None, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LM(tmp_path, **with_tuning(load_format="dummy", dtype="bfloat16", **OPTIONS)) as lm:
        assert lm.runner.get_model().get_submodule("model.layers.0.mlp.experts").quantized
        (out,) = lm.generate(PROMPTS[:1], PARAMS, capture=["resid_post.1"])
        assert out.activations["resid_post.1"].isfinite().all()


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-4.5's architecture with experts in blocks of FP8; dequantised in its folder "plain"."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, moe_intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, n_routed_experts=8, num_experts_per_tok=3, use_qk_norm=True,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    root = tmp_path_factory.mktemp("glm")
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(root / "base")
    return write_quantized(
        root / "base", root / "m", "fp8-blocks", keep=("mlp.gate.",), group=128, rows=128, weight_block_size=[128, 128]
    )


def test_experts_in_fp8_are_as_dequantised_ones(in_fp8: Path) -> None:
    made = [LM(path, **with_tuning(dtype="bfloat16", **OPTIONS)) for path in (in_fp8, in_fp8 / "plain")]
    made.append(LM(in_fp8 / "plain", **with_tuning(dtype="float32", **OPTIONS)))
    assert made[0].runner.get_model().get_submodule("model.layers.1.mlp.experts").quantized
    for prompts in (PROMPTS[:1], PROMPTS, LONG):
        points = list(points_of(made[0].model_spec))
        for outs in zip(*(lm.forward(prompts, capture=points) for lm in made), strict=True):
            near(*(out.logits for out in outs), "logits")
            for site in points:
                near(*(out.activations[site] for out in outs), site)
    tokens = [out.token_ids for out in made[0].generate(PROMPTS[:8], PARAMS)]
    for lm in made:
        lm.shutdown()
    with LM(in_fp8, **with_tuning(dtype="bfloat16", disable_cuda_graph=True, **OPTIONS)) as lm:
        assert [out.token_ids for out in lm.generate(PROMPTS[:8], PARAMS)] == tokens
