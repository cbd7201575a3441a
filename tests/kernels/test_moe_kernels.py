"""Triton kernels for mixtures of experts against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.kernels.products import moe as kernels
from pymllm_interp.layers.moe import (
    CLAMP_ALPHA,
    CLAMP_LIMIT,
    ClampedExperts,
    Experts,
    LogitRouter,
    SigmoidRouter,
    TopKRouter,
    clamped_swiglu,
    multiplied,
    one_by_one,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's matrix products take no bfloat16
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def made(experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> Experts:
    found = Experts(0, experts, hidden, intermediate, "silu", dtype, DEVICE)
    found.gate_up_proj.copy_(numbers(experts, 2 * intermediate, hidden, seed=1) * hidden**-0.5)
    found.down_proj.copy_(numbers(experts, hidden, intermediate, seed=2) * intermediate**-0.5)
    return found


def alone(experts: Experts, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """In float32."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for row, (own, weights) in enumerate(zip(ids.tolist(), scores.float(), strict=True)):
        for expert, weight in zip(own, weights, strict=True):
            gate, up = (experts.gate_up_proj[expert].float() @ x[row].float()).chunk(2)
            out[row] += weight * (experts.down_proj[expert].float() @ (torch.nn.functional.silu(gate) * up))
    return out


def run(module: Experts | ClampedExperts, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """By the kernels."""
    clamped = isinstance(module, ClampedExperts)
    weights = module._weights if clamped else (module.gate_up_proj, module.down_proj)
    biases, clamp = (module._biases, (CLAMP_ALPHA, CLAMP_LIMIT)) if clamped else (None, None)
    return multiplied(x, ids, scores, weights, module.num_experts, biases, clamp)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 2), (3, 60, 6), (17, 128, 8), (2, 5, 5)])
def test_the_router_chooses_what_torch_chooses(tokens, experts, top_k, normalise):
    router = TopKRouter(0, experts, 8, top_k, normalise, torch.float32, torch.float32, DEVICE)
    logits = numbers(tokens, experts, seed=3) * 3
    with torch.enable_grad():  # in plain torch
        expected = router.choose(logits)
    scores, ids = kernels.route(logits, top_k, normalise, torch.float32)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(scores, expected[0])


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 2), (17, 32, 4), (2, 5, 5)])
def test_the_router_of_logits_chooses_what_torch_chooses(tokens, experts, top_k):
    """Also where one logit outweighs the others, or is lowest of all."""
    router = LogitRouter(0, experts, 8, top_k, torch.float32, DEVICE)
    logits = numbers(tokens, experts, seed=3) * 3
    logits[0, 1], logits[-1, 0] = 1e4, float("-inf")
    expected = router.chosen(logits)
    scores, ids = kernels.route(logits, top_k, True, torch.float32, "chosen")
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(scores, expected[0])


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 2), (17, 128, 8)])
def test_the_router_of_sigmoids_chooses_what_torch_chooses(tokens, experts, top_k):
    router = SigmoidRouter(0, experts, 8, top_k, True, torch.float32, DEVICE, 1, 1, 2.5)
    router.e_score_correction_bias.copy_(numbers(experts, seed=2))
    logits = numbers(tokens, experts, seed=3) * 3
    logits[0, 1], logits[-1, 0] = 1e4, float("-inf")
    expected = router.chosen(logits)
    scores, ids = kernels.route(logits, top_k, True, torch.float32, "sigmoid", router.e_score_correction_bias, 2.5)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(scores, expected[0])


def test_a_row_without_numbers_spoils_no_other_row():
    logits = numbers(3, 6, seed=4)
    logits[1, 2] = float("nan")
    scores, ids = kernels.route(logits.to(DEVICE), 2, True, torch.float32)
    assert scores[1].isnan().all() and ((ids >= 0) & (ids < 6)).all()
    alone = kernels.route(logits[[0, 2]].to(DEVICE), 2, True, torch.float32)
    assert torch.equal(scores[[0, 2]], alone[0]) and torch.equal(ids[[0, 2]], alone[1])


@pytest.mark.parametrize("kind", ["random", "one has all", "some have none"])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_each_entry_is_in_one_tile_of_its_expert(tokens, kind):
    experts, top_k = 7, 3
    ids = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(tokens)]
    )
    if kind == "one has all":
        ids[:] = 6
    elif kind == "some have none":
        ids = ids % 2 * 5
    found = kernels.sort_by_expert(ids.to(DEVICE), experts)
    tiles = found.order.view(-1, found.tiling.entries).tolist()
    seen = []
    for owner, tile in zip(found.owners.tolist(), tiles, strict=True):
        if owner >= 0:
            own = [entry for entry in tile if entry < ids.numel()]
            assert own and all(ids.flatten()[entry] == owner for entry in own)
            assert all(entry == ids.numel() for entry in tile[len(own) :])
            seen += own
    assert sorted(seen) == list(range(ids.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "intermediate"), [(1, 4, 2, 32, 24), (7, 5, 3, 72, 56), (70, 3, 1, 40, 33)]
)
def test_experts_are_those_of_torch(tokens, experts, top_k, hidden, intermediate, dtype):
    module = made(experts, hidden, intermediate, dtype)
    x, logits = numbers(tokens, hidden, seed=5, dtype=dtype), numbers(tokens, experts, seed=6)
    scores, ids = (value.to(DEVICE) for value in torch.topk(logits.softmax(-1), top_k))
    expected = alone(module, x, ids, scores.to(dtype))
    found = run(module, x, ids, scores.to(dtype))
    plain = one_by_one(x, ids, scores.to(dtype), module._gemms, gated_of)
    for ours in (found, plain):
        error = (ours.float() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype is torch.float32 else 2e-2), error


def gated_of(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def clamped(experts: int, hidden: int, intermediate: int, dtype: torch.dtype, spread: float = 1.0) -> ClampedExperts:
    """Inputs of its gates are beyond the clamp, too."""
    found = ClampedExperts(0, experts, hidden, intermediate, dtype, DEVICE)
    for seed, parameter in enumerate(found.parameters()):
        size = spread * parameter.shape[1] ** -0.5 if parameter.ndim == 3 else spread
        parameter.copy_(numbers(*parameter.shape, seed=seed) * size)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "intermediate"), [(1, 4, 2, 32, 24), (7, 5, 3, 72, 56), (70, 3, 1, 40, 33)]
)
def test_clamped_experts_with_biases_are_those_of_torch(tokens, experts, top_k, hidden, intermediate, dtype):
    module = clamped(experts, hidden, intermediate, dtype, spread=3.0)
    x, logits = numbers(tokens, hidden, seed=5, dtype=dtype), numbers(tokens, experts, seed=6)
    scores, ids = (value.to(DEVICE) for value in torch.topk(logits.softmax(-1), top_k))
    expected = torch.zeros(tokens, hidden, device=DEVICE)
    weights = {name: parameter.float() for name, parameter in module.named_parameters()}
    for row, (own, of_row) in enumerate(zip(ids.tolist(), scores.to(dtype).float(), strict=True)):
        for expert, weight in zip(own, of_row, strict=True):
            inner = clamped_swiglu(
                x[row].float() @ weights["gate_up_proj"][expert] + weights["gate_up_proj_bias"][expert]
            )
            expected[row] += weight * (inner @ weights["down_proj"][expert] + weights["down_proj_bias"][expert])
    for ours in (
        run(module, x, ids, scores.to(dtype)),
        one_by_one(x, ids, scores.to(dtype), module._gemms, clamped_swiglu),
    ):
        error = (ours.float() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype is torch.float32 else 2e-2), error


def test_a_rows_bits_depend_on_no_other_row_of_the_same_tiling():
    module = made(4, 48, 24, HALF)
    x, logits = numbers(12, 48, seed=7, dtype=HALF), numbers(12, 4, seed=8)
    scores, ids = (value.to(DEVICE) for value in torch.topk(logits.softmax(-1), 2))
    scores = scores.to(HALF)
    whole = run(module, x, ids, scores)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    turned = run(module, x[order], ids[order], scores[order])
    assert torch.equal(turned, whole[order])
    few = run(module, x[:3].contiguous(), ids[:3], scores[:3])
    assert torch.equal(few, whole[:3])


def test_no_rows_give_no_rows():
    module = made(3, 16, 8, torch.float32)
    none = torch.empty(0, 2, device=DEVICE)
    assert module.fused(none.new_empty(0, 16), none.long(), none).shape == (0, 16)
    found = run(module, none.new_empty(0, 16), none.long(), none)
    assert found.shape == (0, 16)
