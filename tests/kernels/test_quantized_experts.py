"""The grouped product with quantised weights against the same product with dequantised ones: compiled on CUDA, else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.kernels.products import fp4_experts, quantized_experts
from pymllm_interp.kernels.products.moe import sort_by_expert
from pymllm_interp.kernels.products.quantized_blocks import has_expert_kernel
from pymllm_interp.layers.moe import CLAMP_ALPHA, CLAMP_LIMIT, clamped_swiglu
from pymllm_interp.layers.quantization.expert_tiles import ExpertTiles
from pymllm_interp.layers.quantization.weight import QuantizedWeight, quantized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
"""The interpreter's matrix products take no bfloat16."""
TOKENS = (1, 9, 70, 300) if DEVICE == "cuda" else (1, 9, 70)
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def weight_of(kind: str, experts: int, rows: int, width: int, group: int) -> QuantizedWeight:
    rows *= experts
    draw = torch.Generator().manual_seed(rows + width)
    if kind == "fp8":
        return quantized(torch.randn(rows, width, generator=draw) / width**0.5, "fp8", group).to(DEVICE)
    codes = torch.randint(0, 256, (rows, width // 2), generator=draw).to(torch.uint8)
    scales = torch.randint(119, 125, (rows, width // 32), generator=draw).to(torch.uint8)
    return QuantizedWeight("fp4", codes, scales, None, 32, torch.float32).to(DEVICE)


def product_of(x, weight: QuantizedWeight, experts: int, ids, gate: str, scores=None, bias=None) -> torch.Tensor:
    shared = gate, scores, bias, (CLAMP_ALPHA, CLAMP_LIMIT)
    if weight.kind == "fp8":
        by_expert = sort_by_expert(ids, experts, quantized_experts.TILINGS)
        codes = weight.codes, weight.scales, weight.group_size
        return quantized_experts.expert_product(x, *codes, experts, by_expert, ids.numel(), *shared)
    by_expert = sort_by_expert(ids, experts, fp4_experts.TILINGS)
    tiles = ExpertTiles.of(weight, experts, bool(gate), gate == "clamped")
    stored = tiles.words, tiles.scales, tiles.shift, tiles.rows
    return fp4_experts.expert_product(x, *stored, by_expert, ids.numel(), *shared)


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("kind", "gate", "width", "channels", "group"),
    [
        ("fp4", "clamped", 192, 70, 32), ("fp4", "", 320, 96, 32), ("fp4", "silu", 160, 200, 32),
        ("fp8", "silu", 256, 70, 128), ("fp8", "", 96, 64, 32), ("fp8", "", 128, 40, 128),
    ],
)  # fmt: skip
def test_a_product_is_that_of_the_dequantised_weight(kind, gate, width, channels, group, tokens, dtype) -> None:
    experts, top_k = 5, 2
    weight = weight_of(kind, experts, channels * (2 if gate else 1), width, group)
    assert has_expert_kernel(kind, width, group)
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=draw).to(DEVICE, dtype)
    ids = torch.rand(tokens, experts, generator=draw).topk(top_k).indices.to(DEVICE)
    bias = (
        torch.randn(experts, len(weight.codes) // experts, generator=draw).to(DEVICE, dtype) if kind == "fp4" else None
    )
    scores = None if gate else torch.rand(tokens, top_k, generator=draw).to(DEVICE, dtype)
    found = product_of(x, weight, experts, ids, gate, scores, bias)
    rows = weight.dequantize(torch.float32).double().view(experts, -1, width)
    expected = torch.einsum("ti,teoi->teo", x.double(), rows[ids])
    if bias is not None:
        expected += bias.double()[ids]
    if gate == "clamped":
        expected = clamped_swiglu(expected)
    elif gate:
        gates, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gates) * up
    if scores is not None:
        expected *= scores.double()[..., None]
    assert found.dtype is dtype and found.shape == (2 * tokens, channels)
    error = (found.double() - expected.flatten(0, 1)).abs().max() / expected.abs().max()
    assert error < 4 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("exponents", [(119, 126, 127, 128), (128, 132, 120, 140)], ids=str)
def test_codes_of_all_values_are_exact(exponents: tuple[int, ...]) -> None:
    """Each code times each scale, by a product with the identity. Scales above 2 are multiplied afterwards."""
    codes = torch.arange(256).to(torch.uint8)[:, None].repeat(len(exponents), 64)
    scales = torch.tensor(exponents).repeat_interleave(256)[:, None].repeat(1, 4)
    scales[::3, 1] -= 2
    weight = QuantizedWeight("fp4", codes, scales.to(torch.uint8), None, 32, torch.float32).to(DEVICE)
    x = torch.eye(128, device=DEVICE, dtype=DTYPES[-1])
    rows = weight.dequantize(torch.float32).view(len(exponents), 256, 128)
    for expert in range(len(exponents)):
        found = product_of(x, weight, len(exponents), torch.full((128, 1), expert, device=DEVICE), "")
        assert torch.equal(found.T.float(), rows[expert])


@pytest.mark.parametrize(("gated", "interleaved"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("width", [32, 160, 256])
def test_tiles_hold_the_weight(width: int, gated: bool, interleaved: bool) -> None:
    weight = weight_of("fp4", 3, 140, width, 32)
    tiles = ExpertTiles.of(weight, 3, gated, interleaved)
    assert tiles.words.is_contiguous() and tiles.scales.is_contiguous()
    assert tiles.shape == weight.shape and torch.equal(tiles.dequantize(), weight.dequantize())
    assert torch.equal(tiles.expert(1).codes, weight.codes[140:280])


def test_scales_too_far_apart_are_refused() -> None:
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    for pair in ((0, 254), (120, 255)):
        scales = torch.tensor([pair, pair], dtype=torch.uint8)
        with pytest.raises(ValueError, match="use another checkpoint"):
            ExpertTiles.of(QuantizedWeight("fp4", codes, scales, None, 32, torch.float32), 1, False, False)


@pytest.mark.parametrize(
    ("kind", "width", "group", "fits"),
    [("fp4", 2880, 32, True), ("fp4", 96, 32, True), ("fp4", 48, 32, False), ("fp8", 2048, 128, True), ("fp8", 200, 128, False)],
)  # fmt: skip
def test_shapes_without_a_kernel_are_known(kind: str, width: int, group: int, fits: bool) -> None:
    assert has_expert_kernel(kind, width, group) == fits
