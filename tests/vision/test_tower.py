"""The vision tower by itself: attention of packed patches, groups of images, and its peak of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_devices import DEVICES
from helpers_images import PICTURES, prompt_of
from torch.nn.functional import conv3d, scaled_dot_product_attention
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP, Qwen2_5_VLVisionAttention

from pymllm_interp import LM
from pymllm_interp.config import EngineTuning
from pymllm_interp.models.vision import packed
from pymllm_interp.models.vision import tower as tower_module
from pymllm_interp.models.vision.packed import PatchProjection, aligned_mlp, packed_attention, rotated_attention
from pymllm_interp.models.vision.tower import TowerOps, VisionTower

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Largest error of attention of values about 1, by dtype."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1], [64, 16, 64, 1], [37], [3] * 9 + [70, 2]])
def test_patches_attend_within_their_segment(device: str, dtype: torch.dtype, lengths: list[int]) -> None:
    made = torch.Generator().manual_seed(len(lengths))
    q, k, v = (torch.randn(1, 3, sum(lengths), 16, generator=made).to(device, dtype) for _ in range(3))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)  # as a part of a fused projection
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    found, _ = packed_attention(
        torch.nn.Module(), q, k, v, scaling=0.25, cu_seq_lens_q=bounds, max_length_q=max(lengths)
    )
    parts = [
        scaled_dot_product_attention(*own)
        for own in zip(*(x.double().split(lengths, 2) for x in (q, k, v)), strict=True)
    ]
    assert found.dtype is dtype
    torch.testing.assert_close(
        found.double(), torch.cat(parts, 2).transpose(1, 2), rtol=BOUND[dtype], atol=BOUND[dtype]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_patch_is_projected_as_by_the_convolution(device: str) -> None:
    projection = torch.nn.Conv3d(3, 20, (2, 4, 4), (2, 4, 4), bias=False, device=device)
    patches = torch.randn(7, 3, 2, 4, 4, device=device)
    wanted = conv3d(patches.double(), projection.weight.double(), stride=(2, 4, 4))
    projection.__class__ = PatchProjection
    torch.testing.assert_close(projection(patches).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [13, 36, 64])
def test_hidden_units_are_filled_up_with_zeros(device: str, dtype: torch.dtype, hidden: int) -> None:
    config = Qwen2_5_VLVisionConfig(hidden_size=24, intermediate_size=hidden, hidden_act="silu")
    mlp = Qwen2_5_VLMLP(config, bias=True).to(device, dtype).requires_grad_(False)
    states = torch.randn(5, 24, device=device, dtype=dtype)
    found, wanted = aligned_mlp(mlp, states), mlp.double()(states.double())
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), wanted, rtol=BOUND[dtype], atol=BOUND[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [20, 24])
def test_patches_are_rotated_as_in_transformers(device: str, dtype: torch.dtype, size: int) -> None:
    config = Qwen2_5_VLVisionConfig(hidden_size=3 * size, num_heads=3)
    config._attn_implementation = "eager"
    attention = Qwen2_5_VLVisionAttention(config).to(device, dtype).requires_grad_(False)
    states = torch.randn(70, 3 * size, device=device, dtype=dtype)
    angles = torch.rand(70, size // 2, device=device).repeat(1, 2) * 6
    bounds = torch.tensor([0, 9, 10, 70], device=device, dtype=torch.int32)
    with torch.no_grad():
        found = rotated_attention(attention, states, bounds, angles.cos(), angles.sin(), None)
        wanted = attention(states, bounds, position_embeddings=(angles.cos(), angles.sin()))
    assert found.dtype is dtype
    bound = 5 * BOUND[dtype]  # of two kernels of attention
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


@pytest.mark.gpu
def test_towers_on_cuda_take_the_kernels_but_under_hooks(
    vision_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    for name in ("aligned_mlp", "rms_norm", "rotated_attention"):
        real = getattr(packed, name)
        monkeypatch.setattr(
            packed, name, lambda *given, _name=name, _real=real: (calls.append(_name), _real(*given))[1]
        )
    with LM(vision_folder("qwen2_5_vl"), device="cuda", dtype="bfloat16", kv_cache_tokens=2048) as lm:
        calls.clear()
        prompt = prompt_of("qwen2_5_vl", [1], 0, [7])
        (plain,) = lm.forward([prompt], capture=["embed"])
        vision: Any = lm.hf_config
        depth = vision.vision_config.depth
        assert sorted(calls) == ["aligned_mlp"] * depth + ["rms_norm"] * 2 * depth + ["rotated_attention"] * depth
        calls.clear()
        (hooked,) = lm.forward([prompt], capture=["embed", "vision.mlp_out.*"])
        assert not calls
        torch.testing.assert_close(hooked.activations["embed"], plain.activations["embed"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_plans_of_the_host_are_those_of_transformers(
    family: str, device: str, vision_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions, windows and bounds of segments for grids of several sizes. On CUDA nothing waits for the device."""
    dtype = "float32" if device == "cpu" else "bfloat16"  # the dtypes with FlashAttention
    with LM(vision_folder(family), device=device, dtype=dtype, kv_cache_tokens=64) as lm:
        tower, plans, real = lm.runner.get_model().tower, list[dict[str, Any]](), packed.precomputed

        def spied(visual: Any, grid: torch.Tensor) -> dict[str, Any]:
            assert grid.device.type == "cpu"
            plans.append(real(visual, grid))
            return plans[-1]

        monkeypatch.setattr(tower_module, "precomputed", spied)
        images = prompt_of(family, 1, [1], 2, [2], 0, 4).images
        wanted = tower.encode_hooked(images, TowerOps(), None)
        assert not plans, "blocks see transformers' arguments"
        tower.encode(images, 1 << 20)  # the first call may compile
        mode = torch.cuda.get_sync_debug_mode() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            found = tower.encode(images, 1 << 20)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode(mode)
        bound = 0 if device == "cpu" else 5e-2
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=bound, atol=bound)
        assert {"position_ids", "cu_seqlens", "max_seqlen"} <= plans[-1].keys()
        assert ("window_index" in plans[-1]) == (family == "qwen2_5_vl") != ("interp_indices" in plans[-1])


@pytest.mark.few("family", "gemma3", "qwen3_vl")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", PICTURES)
def test_a_burst_of_images_is_computed_in_parts(
    family: str, device: str, vision_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call of the tower has more tokens than the bound, or than one image; the values are those of one call for all."""
    calls, states_of = list[list[int]](), VisionTower._states

    def counted(self: VisionTower, images: Any, *rest: Any) -> list[torch.Tensor]:
        calls.append([image.num_tokens for image in images])
        return states_of(self, images, *rest)

    prompts = [prompt_of(family, [i + 1], i % 9, [7]) for i in range(24)]
    found = list[list[torch.Tensor]]()
    for most in (None, 8):
        tuning = EngineTuning(max_num_encoder_tokens=most)
        with LM(
            vision_folder(family), device=device, dtype="float32", kv_cache_tokens=2048, tuning=tuning
        ) as lm, monkeypatch.context() as patch:  # fmt: skip
            patch.setattr(VisionTower, "_states", counted)
            found.append([out.activations["embed"] for out in lm.forward(prompts, capture=["embed"])])
            vision = lm.runner.step_inputs.vision
            assert vision is not None and vision.cache.num_computed == 9, "images that return are computed once"
            sizes, calls = calls, []
    assert len(sizes) > 1 and all(len(call) == 1 or sum(call) <= 8 for call in sizes) and sum(map(len, sizes)) == 9
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-5, atol=4e-6)


@pytest.mark.few("family", "gemma3", "qwen3_vl")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", PICTURES)
def test_a_profile_run_has_the_most_tokens(family: str, device: str, vision_folder: Callable[[str], Path]) -> None:
    """The images that it makes up are read by each family, and are as many as one call may have."""
    with LM(vision_folder(family), device=device, dtype="float32", kv_cache_tokens=64) as lm:
        tower = lm.runner.get_model().tower
        one = tower.profile_run(1)
        assert one >= 1
        for tokens in (one, 5 * one, 2500):
            assert tokens - one < tower.profile_run(tokens) <= tokens
        assert tower.row_bytes == 4 * lm.hidden_size * (1 + tower.num_deepstack)
