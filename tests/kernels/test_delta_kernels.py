"""Triton kernels for the gated delta rule against plain torch: by the slots of the requests, in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.core.norm_kind import RMS_OFFSET
from pymllm_interp.kernels import triton_delta as kernels
from pymllm_interp.layers import delta
from pymllm_interp.layers.delta import DeltaSizes, DeltaStates, DeltaWeights, GatedRMSNorm
from pymllm_interp.layers.norm import rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SIZES = [DeltaSizes(2, 4, 8, 8), DeltaSizes(2, 2, 16, 40), DeltaSizes(1, 3, 24, 72)]
"""A power of two, more than one block of columns, and neither; on CUDA Qwen3.5's, too."""
if DEVICE == "cuda":
    SIZES.append(DeltaSizes(16, 32, 128, 128))
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}
TAPS, SLOTS = 4, 7


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weights_of(sizes: DeltaSizes) -> DeltaWeights:
    return DeltaWeights(
        numbers(sizes.channels, 1, TAPS, seed=1), numbers(sizes.heads, seed=2), numbers(sizes.heads, seed=3)
    )


def states_of(sizes: DeltaSizes) -> DeltaStates:
    return DeltaStates(
        numbers(SLOTS, TAPS - 1, sizes.channels, seed=4), numbers(SLOTS, sizes.heads, sizes.key_dim, sizes.dim, seed=5)
    )


def rows_of(sizes: DeltaSizes, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, b and a as slices of one product, as the fused pass has them."""
    widths = [sizes.channels, sizes.values, sizes.heads, sizes.heads]
    x, _, b, a = numbers(rows, sum(widths), seed=6).split(widths, dim=-1)
    return x, b, a


@pytest.mark.parametrize("sizes", SIZES)
def test_a_step_by_slot_is_torchs(sizes: DeltaSizes) -> None:
    """Slots in any order, with padding behind; other slots keep their bits."""
    weights, ours, expected = weights_of(sizes), states_of(sizes), states_of(sizes)
    x, b, a = rows_of(sizes, 5)
    slots = torch.tensor([5, 2, 6, 0, 0], device=DEVICE)
    with torch.enable_grad():  # plain torch
        wanted = delta._steps(x, b, a, weights, sizes, expected, slots)
    mixed = kernels.conv_step(x, ours.conv, weights.conv, slots)
    out = kernels.delta_step(mixed, b, a, weights.decay, weights.bias, ours.recurrent, slots)
    torch.testing.assert_close(out[:3], wanted[:3], **CLOSE)
    for own, other, before in zip(ours, expected, states_of(sizes), strict=True):
        torch.testing.assert_close(own[[2, 5, 6]], other[[2, 5, 6]], **CLOSE)
        assert torch.equal(own[[1, 3, 4]], before[[1, 3, 4]]) and not torch.equal(own[2], before[2])


def test_a_step_of_states_in_half_precision_is_rounded_once() -> None:
    sizes = SIZES[0]
    weights, states = weights_of(sizes), states_of(sizes)
    x, b, a = rows_of(sizes, 2)
    slots, stored = torch.tensor([1, 4], device=DEVICE), states.recurrent.bfloat16()
    mixed = kernels.conv_step(x, states.conv, weights.conv, slots)
    exact = stored.float()
    wanted = kernels.delta_step(mixed, b, a, weights.decay, weights.bias, exact, slots)
    out = kernels.delta_step(mixed, b, a, weights.decay, weights.bias, stored, slots)
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(stored[slots].float(), exact[slots], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("lengths", [[1], [2, 1, 3], [40, 5, 1, 17]])
@pytest.mark.parametrize("keys", [0, SIZES[1].keys])
def test_the_convolution_of_prompts_is_torchs(lengths: list[int], keys: int) -> None:
    """Shorter and longer than the convolution; some continue, and the slots of others are NaN."""
    sizes = SIZES[1]
    weight, ours = weights_of(sizes).conv, states_of(sizes)
    x, _, _ = rows_of(sizes, sum(lengths))
    has_state = [i % 2 == 1 for i in range(len(lengths))]
    slots = torch.tensor([3, 1, 6, 2][: len(lengths)], device=DEVICE)
    for slot, continues in zip(slots.tolist(), has_state, strict=True):
        if not continues:
            ours.conv[slot] = float("nan")
    expected = DeltaStates(*(state.clone() for state in ours))
    rows = delta.prompt_rows(lengths, has_state, slots)
    with torch.enable_grad():  # plain torch
        wanted = delta._convolve(x, weight, expected, rows, keys)
    given = rows.starts, rows.slots, rows.continued, rows.firsts, rows.sources
    out = kernels.conv_prompts(x, ours.conv, weight, *given, keys)
    for own, other in zip(out, wanted, strict=True):
        torch.testing.assert_close(own, other, **CLOSE)
        assert own.is_contiguous() and own.isfinite().all()
    assert torch.equal(ours.conv, expected.conv)


def test_the_norm_with_a_gate_is_torchs() -> None:
    norm = GatedRMSNorm(40, 1e-6, torch.float32, DEVICE)
    norm.weight.copy_(numbers(40, seed=7))
    x, gate = numbers(3, 5, 40, seed=8), numbers(3, 300, seed=9)[:, 20:220].unflatten(-1, (5, 40))
    with torch.enable_grad():  # plain torch
        wanted = norm.normalize(x, gate)
    torch.testing.assert_close(kernels.gated_norm(x, gate, norm.weight, 1e-6), wanted, **CLOSE)


def test_heads_with_gates_are_split_and_normalised() -> None:
    heads, kv_heads, size = 3, 2, 24
    product = numbers(4, (2 * heads + 2 * kv_heads) * size, seed=1)
    q_weight, k_weight = numbers(size, seed=2), numbers(size, seed=3)
    parts = product.unflatten(-1, (-1, size))
    q, k, v = parts[:, : 2 * heads : 2], parts[:, 2 * heads : 2 * heads + kv_heads], parts[:, -kv_heads:]
    out = kernels.split_gated(product, q_weight, k_weight, heads, kv_heads, 1e-6, RMS_OFFSET)
    with torch.enable_grad():  # plain torch
        wanted = torch.cat((*(rms_norm(x, w, 1e-6, RMS_OFFSET) for x, w in ((q, q_weight), (k, k_weight))), v), 1)
    torch.testing.assert_close(out, wanted, **CLOSE)
    z, gate = numbers(4, heads * size, seed=4), parts[:, 1 : 2 * heads : 2]
    torch.testing.assert_close(kernels.open_gate(z, gate), z * torch.sigmoid(gate).flatten(1), **CLOSE)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_the_rule_in_chunks_is_the_rule_token_by_token(tokens: int) -> None:
    """From a state, and from none."""
    heads, key_dim, dim = 3, 8, 5
    q, k = (delta._normalised(numbers(tokens, heads, key_dim, seed=i)) for i in (1, 2))
    v, g, beta = (
        numbers(tokens, heads, dim, seed=3),
        -numbers(tokens, heads, seed=4).abs(),
        numbers(tokens, heads).sigmoid(),
    )
    for before in (None, numbers(heads, key_dim, dim, seed=5)):
        memory = torch.zeros(heads, key_dim, dim, device=DEVICE) if before is None else before
        outs = []
        for t in range(tokens):
            memory = memory * g[t].exp()[:, None, None]
            change = (v[t] - (memory * k[t].unsqueeze(-1)).sum(-2)) * beta[t].unsqueeze(-1)
            memory = memory + k[t].unsqueeze(-1) * change.unsqueeze(-2)
            outs.append((memory * q[t].unsqueeze(-1)).sum(-2))
        out, after = delta.chunked_rule(q, k, v, g, beta, before)
        torch.testing.assert_close(out, torch.stack(outs), **CLOSE)
        torch.testing.assert_close(after, memory, **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [700, 3, 129]])
def test_fla_core_computes_the_rule_of_prompts(lengths: list[int]) -> None:
    """In bfloat16, as it is served; some prompts continue, and the slots of others are NaN."""
    rule = delta.fla_rule()
    if rule is None:
        pytest.skip("needs fla-core, of FLA_VERSIONS")
    sizes = DeltaSizes(4, 8, 128, 128)
    weights, ours = weights_of(sizes), states_of(sizes)
    x, b, a = (part.bfloat16() for part in rows_of(sizes, sum(lengths)))
    has_state = [i % 2 == 1 for i in range(len(lengths))]
    slots = torch.tensor([3, 1, 6][: len(lengths)], device=DEVICE)
    for slot, continues in zip(slots.tolist(), has_state, strict=True):
        if not continues:
            ours.recurrent[slot] = float("nan")
    expected = DeltaStates(*(state.clone() for state in ours))
    weights = DeltaWeights(*(weight.bfloat16() for weight in weights))
    rows = delta.prompt_rows(lengths, has_state, slots)
    out = delta._prompts(x, b, a, weights, sizes, ours, rows)
    with torch.enable_grad():  # plain torch
        wanted = delta._prompts(x, b, a, weights, sizes, expected, rows)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2 * scale)
    torch.testing.assert_close(ours.recurrent[slots], expected.recurrent[slots], rtol=2e-2, atol=2e-2)
