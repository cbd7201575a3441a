"""The grouped product with quantised weights against the same product with dequantised ones: compiled on CUDA, else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.kernels.products import quantized_experts as kernels
from pymllm_interp.kernels.products.moe import sort_by_expert
from pymllm_interp.kernels.products.quantized_blocks import EXPERT_PAIR, has_expert_kernel
from pymllm_interp.layers.moe import CLAMP_ALPHA, CLAMP_LIMIT, clamped_swiglu
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
    return (
        QuantizedWeight("fp4", codes, scales, None, 32, torch.float32).paired(EXPERT_PAIR).in_words(experts).to(DEVICE)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("kind", "gate", "width", "channels", "group"),
    [
        ("fp4", "clamped", 192, 70, 32), ("fp4", "", 64, 96, 32), ("fp8", "silu", 256, 70, 128), ("fp8", "", 96, 64, 32),
        ("fp8", "", 128, 40, 128),
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
    by_expert = sort_by_expert(ids, experts, kernels.TILINGS)
    found = kernels.expert_product(
        x, kind, weight.codes, weight.scales, group, experts, by_expert, ids.numel(), gate, scores, bias,
        (CLAMP_ALPHA, CLAMP_LIMIT),
    )  # fmt: skip
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


def test_codes_of_all_values_are_exact() -> None:
    """Each code times each scale, by a product with the identity."""
    exponents = torch.tensor([100, 126, 127, 128, 135] if DEVICE == "cuda" else [118, 126, 127, 128, 135])
    codes = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 32)
    weights = [
        QuantizedWeight("fp4", codes, torch.full((256, 2), int(e)).to(torch.uint8), None, 32, torch.float32)
        for e in exponents
    ]
    codes, scales = (
        torch.cat([getattr(weight.paired(EXPERT_PAIR).in_words(1), part) for weight in weights])
        for part in ("codes", "scales")
    )
    dtype = DTYPES[-1]
    x = torch.eye(64, device=DEVICE, dtype=dtype)
    for expert, weight in enumerate(weights):
        by_expert = sort_by_expert(torch.full((64, 1), expert, device=DEVICE), len(weights), kernels.TILINGS)
        found = kernels.expert_product(
            x, "fp4", codes.to(DEVICE), scales.to(DEVICE), 32, len(weights), by_expert, 64, ""
        )  # fmt: skip
        assert torch.equal(found.T.float().cpu(), weight.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("kind", "width", "group", "fits"),
    [("fp4", 2880, 32, True), ("fp4", 96, 32, False), ("fp8", 2048, 128, True), ("fp8", 200, 128, False)],
)  # fmt: skip
def test_shapes_without_a_kernel_are_known(kind: str, width: int, group: int, fits: bool) -> None:
    assert has_expert_kernel(kind, width, group) == fits
