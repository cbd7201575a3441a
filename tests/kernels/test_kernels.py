"""Triton's kernels against their torch references: compiled on CUDA, under Triton's interpreter elsewhere.

The interpreter cuts float32 off where it should round to bfloat16; there bfloat16 is compared to a few last bits, and float16,
which it rounds, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import COMMON
from helpers_runner import ByHand, make_runner, random_ids
from torch.testing import assert_close
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from pymllm_interp.attention import torch_backend
from pymllm_interp.core.forward_batch import ForwardMode, Waits
from pymllm_interp.core.norm_kind import RMS_OFFSET
from pymllm_interp.kernels.cpu.cpu_dispatch import cpu_kernels
from pymllm_interp.layers import activation, gemm, norm, rope
from pymllm_interp.layers.dispatch import kernels_for, triton_kernels_for
from pymllm_interp.layers.linear import Linear
from pymllm_interp.mem_cache import KVPool
from pymllm_interp.models.native import cpu_layer
from pymllm_interp.runner import ModelRunner
from pymllm_interp.runner.partition import Execution

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.kernels import edit_ops as triton_edits
from pymllm_interp.kernels import launch, triton_activation, triton_inputs, triton_norm
from pymllm_interp.kernels import triton_kernels as kernels
from pymllm_interp.kernels.launch import Launcher

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def reference(function: Callable[..., Any], *args: Any) -> Any:
    """What the public function computes in plain torch: with gradients on, no tensor goes to the kernels."""
    with torch.enable_grad():
        return function(*args)


def near(actual: torch.Tensor, expected: torch.Tensor, last_bits: int = 2) -> None:
    """Equal up to some units in the last place, of a number of the tensor's own scale."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype == torch.bfloat16 and not CUDA:
        last_bits *= 2
    tolerance = last_bits * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, where the interpreter rounds."""
    if actual.dtype == torch.bfloat16 and not CUDA:
        near(actual, expected)
    else:
        assert torch.equal(actual, expected), (actual - expected).abs().max()


# -- norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 576), (17, 72), (5, 128), (2, 2048), (1, 3072), (2, 8192)])
def test_a_norm_equals_torch(rows, size, dtype):
    x, weight = randn(1, rows, size, dtype=dtype) * 3, 1 + 0.1 * randn(size, dtype=dtype, seed=1)
    kept = x.clone()
    near(kernels.rms_norm(x, weight, EPS), reference(norm.rms_norm, x, weight, EPS))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_rounded_before_its_weight_multiplies(dtype):
    x, weight = randn(3, 576, dtype=dtype), randn(576, dtype=dtype, seed=1)
    equal(kernels.rms_norm(x, weight, EPS), weight * kernels.rms_norm(x, torch.ones_like(weight), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_nearly_nothing_and_of_much(dtype):
    x = torch.cat((randn(1, 72) * 1e-4, randn(1, 72) * 100, torch.zeros(1, 72, device=DEVICE))).to(dtype)
    weight = randn(72, dtype=dtype, seed=1)
    near(kernels.rms_norm(x, weight, EPS), reference(norm.rms_norm, x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_norm_of_strided_heads_equals_that_of_a_copy(tokens, dtype):
    qkv, weight = randn(tokens, 9 + 3 + 3, 24, dtype=dtype), randn(24, dtype=dtype, seed=1)
    for heads in (qkv[:, :9], qkv[:, 9:12], qkv[:, ::2], qkv.transpose(0, 1)):
        assert torch.equal(kernels.rms_norm(heads, weight, EPS), kernels.rms_norm(heads.contiguous(), weight, EPS))
    near(kernels.rms_norm(qkv[:, 9:12], weight, EPS), reference(norm.rms_norm, qkv[:, 9:12], weight, EPS))


def test_a_norm_of_any_other_strides_is_that_of_a_copy():
    x, weight = randn(2, 6, 20, 16), randn(16, seed=1)
    for view in (
        x[:, 1:4],
        x.transpose(2, 3)[..., :16].transpose(2, 3)[..., ::1],
        x[0].transpose(0, 1)[:, ::3],
        x[..., ::2],
    ):
        w = weight[: view.shape[-1]].contiguous()
        assert torch.equal(kernels.rms_norm(view, w, EPS), kernels.rms_norm(view.contiguous(), w, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_in_place_and_values_stay(dtype):
    qkv, weights = randn(5, 9 + 3 + 3, 24, dtype=dtype), randn(2, 24, dtype=dtype, seed=1)
    before = qkv.clone()
    kernels.rms_norm_(qkv[:, :9], weights[0], EPS)
    kernels.rms_norm_(qkv[:, 9:12], weights[1], EPS)
    assert torch.equal(qkv[:, :9], kernels.rms_norm(before[:, :9], weights[0], EPS))
    assert torch.equal(qkv[:, 9:12], kernels.rms_norm(before[:, 9:12], weights[1], EPS))
    assert torch.equal(qkv[:, 12:], before[:, 12:])
    near(qkv, reference(norm.norm_heads, before, weights[0], weights[1], 3, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 72), (2, 4096)])
def test_add_and_norm_have_the_bits_of_the_sum_and_of_its_norm(rows, size, dtype):
    h, delta, weight = (
        randn(1, rows, size, dtype=dtype),
        randn(1, rows, size, dtype=dtype, seed=1),
        randn(size, dtype=dtype),
    )
    kept = h.clone(), delta.clone()
    total, normed = kernels.add_rms_norm(h, delta, weight, EPS)
    equal(total, h + delta)
    assert torch.equal(normed, kernels.rms_norm(total, weight, EPS))
    assert torch.equal(h, kept[0]) and torch.equal(delta, kept[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (17, 72), (2, 2304)])
def test_a_norm_with_an_offset_and_a_layer_norm_equal_torch(rows, size, dtype):
    x, weight = 3 * randn(1, rows, size, dtype=dtype) + 1, 0.1 * randn(size, dtype=dtype, seed=1)
    near(kernels.rms_norm(x, weight, EPS, RMS_OFFSET), reference(norm.rms_norm, x, weight, EPS, RMS_OFFSET))
    both = torch.stack((1 + weight, randn(size, dtype=dtype, seed=2)))
    near(kernels.layer_norm(x, both, EPS), F.layer_norm(x, (size,), *both, EPS), last_bits=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 72)])
def test_a_layer_norm_adds_one_delta_or_the_sum_of_two(rows, size, dtype):
    h, mlp, attention = (randn(1, rows, size, dtype=dtype, seed=seed) for seed in range(3))
    both, kept = randn(2, size, dtype=dtype, seed=3), [h.clone(), mlp.clone()]
    total, normed = kernels.add_layer_norm(h, mlp, both, EPS, None)
    equal(total, h + mlp)
    assert torch.equal(normed, kernels.layer_norm(total, both, EPS))
    expected = h + (mlp + attention)
    total, normed = kernels.add_layer_norm(h, mlp, both, EPS, attention)
    equal(total, expected)
    assert total is attention and torch.equal(normed, kernels.layer_norm(total, both, EPS))
    assert torch.equal(h, kept[0]) and torch.equal(mlp, kept[1])


def test_a_rows_norm_does_not_depend_on_the_rows_beside_it():
    x, weight = randn(33, 72), randn(72, seed=1)
    together = kernels.rms_norm(x, weight, EPS)
    for i in (0, 7, 32):
        assert torch.equal(kernels.rms_norm(x[i : i + 1], weight, EPS)[0], together[i])


# -- rope ------------------------------------------------------------------------------------


def turn(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A rotation whose halves differ, as a trace may make one."""
    angles = 3 * randn(1, tokens, head_dim, seed=9)
    return rope.rotation(angles.cos().to(dtype), angles.sin().to(dtype))


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [10, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 9), (3, 1), (2, 40)])
def test_a_rotation_equals_torch_bit_for_bit(tokens, heads, head_dim, dtype):
    x, turned = randn(tokens, heads, head_dim, dtype=dtype), turn(tokens, head_dim, dtype)
    kept = x.clone()
    out = kernels.rope(x, *turned)
    equal(out, reference(rope.apply_rope, x, *turned))
    assert out.is_contiguous() and torch.equal(x, kept)
    exact = turn(tokens, head_dim, torch.float32)  # products are not rounded, as in transformers' vision towers
    equal(kernels.rope(x, *exact), reference(rope.apply_rope, x, *exact).to(dtype))
    by_columns = [part.transpose(0, 2).contiguous().transpose(0, 2) for part in turned]
    assert torch.equal(kernels.rope(x, *by_columns), out), "a rotation with another layout"


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 24), (32, 8, 64), (4, 1, 80), (2, 2, 128)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_rotation_that_writes_equals_one_of_q_and_k_and_a_write(tokens, heads, kv_heads, head_dim, dtype):
    merged = randn(tokens, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)
    qkv, turned = merged[:, :-3].unflatten(1, (-1, head_dim)), turn(tokens, head_dim, dtype)
    pools = [KVPool(2, 32, kv_heads, head_dim, dtype, DEVICE, 4) for _ in range(2)]
    for pool in pools:
        pool._kv.copy_(randn(*pool._kv.shape, seed=4))
    slots = torch.tensor([7, 2, 31, 16, 3], device=DEVICE)[:tokens]
    q = kernels.rope_and_write(qkv, *turned, *pools[0].get_kv(1), slots)
    assert torch.equal(q, kernels.rope(qkv[:, :heads], *turned)) and q.is_contiguous()
    equal(q, reference(rope.rope_and_write, qkv, *turned, pools[1], 1, slots))
    equal(pools[0]._kv, pools[1]._kv)
    k_cache, v_cache = pools[0].get_kv(1)
    assert torch.equal(k_cache[slots], kernels.rope(qkv[:, heads : heads + kv_heads], *turned))
    assert torch.equal(v_cache[slots], qkv[:, heads + kv_heads :])


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "turned"), [(3, 24, 6), (12, 64, 0), (8, 80, 20), (2, 256, 64), (20, 64, 64)]
)
def test_a_rotation_of_some_channels_or_of_none_copies_the_others(heads, head_dim, turned, by_head, dtype):
    tokens, slots = 3, torch.tensor([7, 2, 31], device=DEVICE)
    qkv = randn(tokens, 3 * heads, head_dim, dtype=dtype)
    turn_ = turn(tokens, turned, dtype) if turned else (None, None)
    q, k, v = rope.heads_of(qkv, heads, by_head)
    pools = [KVPool(1, 32, heads, head_dim, dtype, DEVICE, 4) for _ in range(2)]
    for pool in pools:
        pool._kv.copy_(randn(*pool._kv.shape, seed=4))
    out = kernels.rope_and_write(qkv, *turn_, *pools[0].get_kv(0), slots, None, by_head)
    equal(out, reference(rope.rope_and_write, qkv, *turn_, pools[1], 0, slots, None, by_head))
    equal(pools[0]._kv, pools[1]._kv)
    assert torch.equal(out[..., turned:], q[..., turned:]) and torch.equal(pools[0].get_kv(0)[1][slots], v)
    if turned:
        assert torch.equal(out, kernels.rope(q, *turn_)) and torch.equal(
            pools[0].get_kv(0)[0][slots], kernels.rope(k, *turn_)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("turned", [0, 8, 24])
def test_a_cache_in_fp8_gets_rows_by_its_scales(turned, dtype):
    qkv, turn_ = randn(3, 6, 24, dtype=dtype) * 100, turn(3, turned, dtype) if turned else (None, None)
    qkv[0, 0:6, 0] = torch.tensor([1e4, -1e4, 449.0, -3e4, 447.0, 1e4])
    pool, expected = (KVPool(1, 16, 2, 24, torch.float8_e4m3fn, DEVICE, 4, {0: (0.5, 3.0)}) for _ in range(2))
    slots = torch.tensor([5, 9, 4], device=DEVICE)
    kernels.rope_and_write(qkv, *turn_, *pool.get_kv(0), slots, kv_scales=pool.scales(0))
    reference(rope.rope_and_write, qkv, *turn_, expected, 0, slots)
    found, wanted = pool._kv.float(), expected._kv.float()
    assert wanted.abs().max() == 448
    if DEVICE == "cpu":  # Triton's interpreter takes 15.9 to 8, and ties away from zero
        other = found != wanted
        assert other[wanted != 0].float().mean() < 0.1
        assert ((found == wanted / 2) | ((found - wanted).abs() <= wanted.abs() / 8))[other].all()
        return
    assert torch.equal(found, wanted)


def test_a_cache_of_another_dtype_gets_what_was_rounded_to_the_models():
    qkv, turned = randn(3, 6, 24), turn(3, 24, torch.float32)
    pool, expected = (KVPool(1, 16, 2, 24, torch.float16, DEVICE, 4) for _ in range(2))
    slots = torch.tensor([5, 9, 4], device=DEVICE)
    kernels.rope_and_write(qkv, *turned, *pool.get_kv(0), slots)
    reference(rope.rope_and_write, qkv, *turned, expected, 0, slots)
    assert torch.equal(pool._kv, expected._kv) and pool._kv.any()


# -- activation ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 56), (3, 1536), (2, 1025)])
def test_silu_equals_torch_and_its_product_has_the_bits_of_both(rows, size, dtype):
    gate_up = 4 * randn(1, rows, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    alone = kernels.silu(gate)
    near(alone, F.silu(gate))
    equal(kernels.silu_mul(gate_up), alone * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 56), (2, 1025)])
def test_gelu_equals_torch_and_its_product_has_the_bits_of_both(rows, size, tanh, dtype):
    gate_up = 4 * randn(1, rows, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    alone = kernels.gelu(gate, tanh)
    near(alone, F.gelu(gate, approximate="tanh" if tanh else "none"))
    equal(kernels.gelu_mul(gate_up, tanh), alone * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_soft_cap_equals_torch(dtype):
    x = 40 * randn(1, 3, 977, dtype=dtype)
    near(kernels.softcap(x, 30.0), (torch.tanh(x.float() / 30) * 30).to(dtype))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_silu_where_an_exponential_overflows():
    x = torch.tensor([[-200.0, -89.0, 0.0, 89.0, 200.0, float("inf"), float("nan")]], device=DEVICE)
    expected = F.silu(x)
    torch.testing.assert_close(kernels.silu(x), expected, equal_nan=True)


# -- matrix times vector -----------------------------------------------------------------------


# Interpreted, large matrices have one of both dtypes with a bias, and the other without.
ROW_TIMES_MATRIX = [
    pytest.param(out, width, bias, dtype,
                 marks=[] if CUDA or width not in (576, 2048) or bias == (dtype == torch.bfloat16) else pytest.mark.slow)
    for out, width in ((5, 72), (64, 576), (33, 2048), (3, 5000))
    for bias in (False, True)
    for dtype in (torch.float16, torch.bfloat16)
]  # fmt: skip


@pytest.mark.parametrize(("out", "width", "bias", "dtype"), ROW_TIMES_MATRIX)
def test_a_row_times_a_matrix_equals_torch(out, width, bias, dtype):
    linear = Linear(width, out, bias, dtype, DEVICE)
    for seed, parameter in enumerate(linear.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=seed))
    x = randn(1, 1, width, dtype=dtype, seed=5)
    expected = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    scale = width**0.5
    for options in ({}, {"block_k": 64}, {"block_k": 512, "num_warps": 4}):
        actual = kernels.gemv(x, linear.weight, linear.bias, **options)
        assert actual.dtype == dtype and actual.shape == (1, 1, out)
        bits = 1 if CUDA or dtype == torch.float16 else 2
        torch.testing.assert_close(actual.double(), expected, rtol=bits * torch.finfo(dtype).eps, atol=1e-6 * scale)


# -- launches --------------------------------------------------------------------------------------


LAUNCHERS = [
    launcher
    for module in (kernels, triton_norm, triton_activation)
    for launcher in vars(module).values()
    if isinstance(launcher, Launcher)
]


def results(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each kernel makes of so many rows."""
    x, delta, weight = (
        randn(1, rows, 576, dtype=dtype),
        randn(1, rows, 576, dtype=dtype, seed=1),
        randn(576, dtype=dtype),
    )
    qkv = randn(rows, 9 + 3 + 3, 64, dtype=dtype, seed=2)
    cos, signed_sin = rope.rotation(randn(1, rows, 64, dtype=dtype, seed=3), randn(1, rows, 64, dtype=dtype, seed=4))
    caches = torch.zeros(2, 2 * rows, 3, 64, dtype=dtype, device=DEVICE)
    slots = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(0))[:rows].to(DEVICE)
    normed = qkv.clone()
    kernels.rms_norm_(normed[:, :9], weight[:64], EPS)
    return [
        kernels.rms_norm(x, weight, EPS),
        *kernels.add_rms_norm(x, delta, weight, EPS),
        *kernels.add_layer_norm(x, delta, torch.stack((weight, weight)), EPS, delta.clone()),
        kernels.gelu(x, True),
        kernels.softcap(x, 2.0),
        kernels.rms_norm(qkv[:, 9:12], weight[:64], EPS),
        normed,
        kernels.rope(qkv, cos, signed_sin),
        kernels.rope_and_write(qkv, cos, signed_sin, *caches, slots),
        caches,
        kernels.silu(x),
        kernels.silu_mul(x),
        kernels.gemv(x[:, :1], randn(7 + rows, 576, dtype=dtype, seed=5), None),
        kernels.gemv(x[:, :1], randn(7 + rows, 576, dtype=dtype, seed=5), randn(7 + rows, dtype=dtype, seed=6)),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_launched_again_has_the_bits_of_tritons_own_launch(dtype, monkeypatch):
    expected = {}
    for rows in (1, 3, 16, 100):
        for launcher in LAUNCHERS:
            monkeypatch.setattr(launcher, "_compiled", {})
        expected[rows] = results(rows, dtype)
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "_compiled", {})
    for rows in (1, 2):  # they serve any number; of one row all heads lie behind each other
        results(rows, dtype)
    for launcher in LAUNCHERS:
        assert launcher._compiled
        monkeypatch.setattr(launcher, "kernel", None)
    for rows, outs in expected.items():
        for out, again in zip(outs, results(rows, dtype), strict=True):
            assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("way", ["launched", "replayed"])
def test_kernels_that_start_early_compute_what_those_do_that_wait(rows, way, monkeypatch):
    """Each reads what the one in front of it writes, over and over, in memory that is used again."""
    if not launch.supports_pdl(0):
        pytest.skip("this device starts no kernel before the one in front has ended")
    size = 1024
    wide, narrow = (
        gemm.Gemm([weight], weight, None)
        for weight in (randn(n, size, dtype=torch.bfloat16, seed=n) * 0.03 for n in (2 * size, size))
    )
    norm_weight, x = randn(size, dtype=torch.bfloat16, seed=2), randn(1, rows, size, dtype=torch.bfloat16)
    cos, sin = (randn(rows, 64, dtype=torch.bfloat16, seed=seed) for seed in (3, 4))

    def chain() -> torch.Tensor:
        h = delta = x
        for _ in range(40):
            h, normed = kernels.add_rms_norm(h, delta, norm_weight, EPS)
            turned = kernels.rope(normed.view(rows, size // 64, 64), cos, sin).view(1, rows, size)
            delta = narrow(kernels.silu_mul(wide(turned)))
        return h

    def run() -> Callable[[], torch.Tensor]:
        kept = chain()  # compiles
        if way == "launched":
            return chain
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = chain()

        def replay() -> torch.Tensor:
            graph.replay()
            return kept

        return replay

    early = run()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "supports_pdl", lambda device: False)
        late = run()
        wanted = []
        for seed in range(20):
            x.copy_(randn(1, rows, size, dtype=torch.bfloat16, seed=10 + seed))
            wanted.append(late().clone())
    for seed in range(20):
        x.copy_(randn(1, rows, size, dtype=torch.bfloat16, seed=10 + seed))
        assert torch.equal(early(), wanted[seed]), seed


@pytest.mark.gpu
def test_a_tensor_of_the_host_is_refused_also_behind_one_of_the_device():
    h, delta, weight = randn(1, 3, 576), randn(1, 3, 576, seed=1), randn(576)
    expected = kernels.add_rms_norm(h, delta, weight, EPS)
    for _ in range(2):
        with pytest.raises(ValueError, match="cpu tensor"):
            kernels.add_rms_norm(h, delta.cpu(), weight, EPS)
    for out, again in zip(expected, kernels.add_rms_norm(h, delta, weight, EPS), strict=True):
        assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_is_not_aligned_is_read_and_written_as_any_other(dtype):
    flat = randn(1 + 3 * 576, dtype=dtype)
    aligned, odd = flat[1:].clone().view(3, 576), flat[1:].view(3, 576)
    weight = randn(577, dtype=dtype, seed=1)
    for _ in range(2):
        for x, w in ((aligned, weight[1:].clone()), (odd, weight[1:]), (aligned, weight[1:])):
            # Threads share a row in another way, so its sum goes in another order.
            assert_close(kernels.rms_norm(x, w, EPS), kernels.rms_norm(aligned, weight[1:].clone(), EPS))
        assert torch.equal(kernels.silu(odd), kernels.silu(aligned))
    heads = odd.view(3, 9, 64)
    kernels.rms_norm_(heads, weight[1:65], EPS)
    assert_close(heads, kernels.rms_norm(aligned.view(3, 9, 64), weight[1:65].clone(), EPS))


class TritonsOwn:
    """Stands for a compiled kernel without a device: notes how it is launched, by Triton and again."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted, self.own, self.again = interpreted, [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> TritonsOwn | None:
            self.own.append((grid, args, options))
            return None if self.interpreted else self

        return launch

    def run(self, *args: Any) -> None:
        self.again.append(args)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 5)))
    return 5


def test_a_kernel_is_launched_again_without_triton_where_only_numbers_and_the_grid_differ(stream):
    own = TritonsOwn()
    launcher, x, y = Launcher(own, enable_fp_fusion=False), randn(4), randn(4)
    launcher((3, 1, 1), (x, y), (3, 0.5), (64, True), 4)
    assert own.own == [((3, 1, 1), (x, y, 3, 0.5, 64, True), {"num_warps": 4, "enable_fp_fusion": False})]
    launcher((5, 2, 1), (y, x), (5, 0.25), (64, True), 4)
    pointers = y.data_ptr(), x.data_ptr()
    assert own.again == [(5, 2, 1, stream, 7, (4, 1, 0), None, None, None, *pointers, 5, 0.25, 64, True)]
    assert len(own.own) == 1


def test_triton_launches_what_it_has_not_compiled_and_what_is_not_aligned(stream):
    own, x = TritonsOwn(), randn(8)
    launcher = Launcher(own)
    launcher((1, 1, 1), (x, x), (), (64,), 4)
    different = [((x, x), (32,), 4), ((x, x), (64,), 8), ((x, x.half()), (64,), 4)]
    for count, (tensors, constants, warps) in enumerate(different, 2):
        launcher((1, 1, 1), tensors, (), constants, warps)
        assert (len(own.own), len(own.again)) == (count, 0)
    for count in (5, 6):
        launcher((1, 1, 1), (x, x[1:]), (), (64,), 4)
        assert (len(own.own), len(own.again)) == (count, 0)


def test_the_interpreter_makes_all_launches():
    own, x = TritonsOwn(interpreted=True), randn(8)
    launcher = Launcher(own)
    for _ in range(2):
        launcher((1, 1, 1), (x,), (), (), 4)
    assert (len(own.own), len(own.again)) == (2, 0)


@pytest.mark.gpu
def test_the_kernels_numbers_are_none_that_triton_specialises_on():
    whole = {"rows", "count", "width", "site", "record_stride", "score_stride", "k_scale", "v_scale"}
    for launcher in (*LAUNCHERS, triton_edits._edit_launch, triton_edits._capture_launch, triton_inputs._launch):
        for parameter in launcher.kernel.params:
            assert parameter.is_constexpr == parameter.name.isupper(), parameter.name
            assert parameter.do_not_specialize == (parameter.name in whole), parameter.name


# -- the native families over them ---------------------------------------------------------------


def test_kernels_are_for_cuda_and_for_passes_without_gradients():
    x = randn(1, 3)
    assert kernels_for(x) is (kernels if CUDA else cpu_kernels())
    assert triton_kernels_for(x) is (kernels if CUDA else None)
    with torch.enable_grad():
        assert kernels_for(x) is None


SIZES: dict[str, Any] = {**COMMON, "hidden_size": 72, "num_hidden_layers": 2}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=64, mlp_bias=True),
    "qwen3": lambda: Qwen3Config(**SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=128),
    # 9 heads of 8 over 3, and no silu
    "odd": lambda: LlamaConfig(**SIZES, num_attention_heads=9, num_key_value_heads=3, hidden_act="gelu"),
    "gpt2": lambda: GPT2Config(**{**SIZES, "hidden_size": 128}, n_head=2),
    "gpt_neox": lambda: GPTNeoXConfig(**{**SIZES, "hidden_size": 128}, num_attention_heads=2),
    "gemma2": lambda: Gemma2Config(
        **SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=100, sliding_window=3
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=64, sliding_window=3,
        layer_types=["full_attention", "sliding_attention"],
    ),
}  # fmt: skip
KERNELS: dict[str, list[str]] = {
    "llama": ["rms_norm", "add_rms_norm", "rope", "silu", "silu_mul"],
    "qwen3": ["rms_norm", "rms_norm_", "add_rms_norm", "rope", "silu", "silu_mul"],
    "odd": ["rms_norm", "add_rms_norm", "rope", "gelu", "gelu_mul"],
    "gpt2": ["layer_norm", "add_layer_norm", "gelu"],
    "gpt_neox": ["layer_norm", "add_layer_norm", "rope", "gelu"],
    "gemma2": ["rms_norm", "add_rms_norm", "rope", "gelu", "gelu_mul", "softcap"],
    "gemma3_text": ["rms_norm", "rms_norm_", "add_rms_norm", "rope", "gelu", "gelu_mul"],
}
"""What a family launches in its two passes, beside `rope_and_write`."""


class Launches:
    """Stands for `triton_kernels`, and notes what is launched."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(kernels, name)

    def since(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The layers take the kernels on this device, also where it is a CPU."""
    noted = Launches()

    def forced(x: torch.Tensor, *others: torch.Tensor) -> Launches | None:
        return None if torch.is_grad_enabled() else noted

    modules: list[ModuleType] = [norm, rope, activation]
    for module in modules:
        monkeypatch.setattr(module, "kernels_for", forced)
    for module in (norm, gemm, activation):
        monkeypatch.setattr(module, "triton_kernels_for", forced)
    for module in (cpu_layer, gemm, torch_backend):
        monkeypatch.setattr(module, "cpu_kernels_for", lambda *tensors: None)
    return noted


@pytest.fixture(scope="module")
def runner_of():
    made: dict[tuple[str, str], ModelRunner] = {}

    def load(family: str, dtype: str) -> ModelRunner:
        if (family, dtype) not in made:
            torch.manual_seed(0)
            backend = "torch" if family == "odd" else "auto"
            runner = make_runner(CONFIGS[family](), dtype=dtype, device=DEVICE, kv_cache_tokens=2048,
                                 disable_cuda_graph=True, attention_backend=backend)  # fmt: skip
            made[family, dtype] = runner
            for name, parameter in runner.get_model().named_parameters():
                with torch.no_grad():
                    values = 0.2 * randn(*parameter.shape, seed=len(name))
                    parameter.copy_(1 + values if "norm" in name else values)
        return made[family, dtype]

    yield load
    for runner in made.values():
        runner.shutdown()


class Watch:
    """Nobody waits at the layers `at`, inside of what `inside` names, or elsewhere than at the outputs of `output`."""

    def __init__(
        self, at: set[int] = frozenset(), inside: set[Any] = frozenset(), output: set[int] = frozenset()
    ) -> None:
        self.at, self.inside, self.output = at, inside, output

    def first_hook(self, first: int, stop: int) -> tuple[int, Waits]:
        for layer in range(first, stop):
            if layer not in self.at:
                return layer, "at output" if layer in self.output else "within"
        return stop, "nowhere"

    def try_fuse(self, layer: int, module: str = "", but: str = "") -> bool:
        role = module if module in ("", "mlp") else "attention"  # its name is the family's
        return (layer, role, f"{role}.last" if but else "") in self.inside

    def is_own_call(self) -> bool:
        return False

    def at_output(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


STEPS = [
    (ForwardMode.EXTEND, {0: random_ids(4), 1: random_ids(1, seed=1)}),
    (ForwardMode.MIXED, {1: [8], 0: random_ids(2, seed=4)}),
    (ForwardMode.DECODE, {0: [5], 1: [6]}),
]
WATCHES = [
    None,
    Watch(at={0}),
    Watch(at={1}, inside={(0, "", "")}),
    Watch(output={0, 1}),
    Watch(at={0}, output={1}),
    Watch(inside={(0, "attention", ""), (1, "mlp", "")}),
    Watch(inside={(1, "attention", "attention.last"), (0, "mlp", "mlp.last")}),
]
HALF = "bfloat16" if CUDA else "float16"


# Interpreted, float32 is seen with two families: what families do differently is the same in half precision.
PASSES = [
    pytest.param(
        family, dtype, marks=[] if CUDA or dtype == HALF or family in ("llama", "gemma2") else pytest.mark.slow
    )
    for family in CONFIGS
    for dtype in ("float32", HALF)
]


@pytest.mark.few("family", "llama", "gpt_neox", "gemma3_text")
@pytest.mark.parametrize(("family", "dtype"), PASSES)
def test_both_passes_over_the_kernels_are_bit_equal_however_their_layers_are_mixed(family, dtype, runner_of, launches):
    runner = runner_of(family, dtype)
    hand, torch_hand = ByHand(runner), ByHand(runner)
    for mode, tokens in STEPS:
        batch = hand.batch(tokens, mode)
        kv, slots = batch.token_to_kv_pool._kv, batch.out_cache_loc  # pyright: ignore[reportOptionalMemberAccess]
        fused = runner.forward(batch).next_token_logits
        written = kv[:, :, slots]
        near_torch(fused, runner, torch_hand.batch(tokens, mode))
        for watch in WATCHES:
            batch.hook_query, kv[:, :, slots] = watch, 0
            modules = runner.forward(batch, Execution.MODULES).next_token_logits
            assert torch.equal(fused, modules), f"{mode.name}: {(fused - modules).abs().max()}"
            assert torch.equal(kv[:, :, slots], written)
    assert set(launches.since()) == {*KERNELS[family], "rope_and_write"}


def near_torch(fused: torch.Tensor, runner: ModelRunner, batch: Any) -> None:
    """The same pass in plain torch."""
    backend: Any = runner.attn_backend
    backend.init_forward_metadata(batch)
    with torch.enable_grad():
        expected = runner.executions.call_model(batch, Execution.PLAIN)[0].detach()
    scale = expected.abs().max().item()
    tolerance = 1e-5 if fused.dtype == torch.float32 else 16 * torch.finfo(fused.dtype).eps
    torch.testing.assert_close(fused, expected, rtol=0, atol=tolerance * scale)


HEADS = ["rms_norm_", "rms_norm_"]
LAYERS: dict[str, list[str]] = {
    "llama": ["gemv", "rope_and_write", "gemv", "add_rms_norm", "gemv", "silu_mul", "gemv"],
    "qwen3": ["gemv", *HEADS, "rope_and_write", "gemv", "add_rms_norm", "gemv", "silu_mul", "gemv"],
    "odd": ["gemv", "rope_and_write", "gemv", "add_rms_norm", "gemv", "gelu_mul", "gemv"],
    "gpt2": ["gemv", "rope_and_write", "gemv", "add_layer_norm", "gemv", "gelu", "gemv"],
    "gpt_neox": ["gemv", "rope_and_write", "gemv", "layer_norm", "gemv", "gelu", "gemv"],
    "gemma2": ["gemv", "rope_and_write", "gemv", "rms_norm", "add_rms_norm", "gemv", "gelu_mul", "gemv", "rms_norm"],
    "gemma3_text": [
        "gemv", *HEADS, "rope_and_write", "gemv", "rms_norm", "add_rms_norm", "gemv", "gelu_mul", "gemv", "rms_norm",
    ],
}  # fmt: skip
"""What a layer of one row launches behind its first norm, but for attention."""


@pytest.mark.parametrize("family", CONFIGS if CUDA else ["llama"])
def test_a_layer_of_one_row_is_four_products_their_kernels_and_attention(family, runner_of, launches):
    runner = runner_of(family, HALF)
    batch = ByHand(runner).batch({0: [1]}, ForwardMode.DECODE)
    fused = runner.forward(batch).next_token_logits
    layer, norm = LAYERS[family], "layer_norm" if family.startswith("gpt") else "rms_norm"
    cap = ["softcap"] if family == "gemma2" else []
    assert launches.since() == [norm, *layer, f"add_{norm}", *layer, f"add_{norm}", "gemv", *cap]
    assert torch.equal(fused, runner.forward(batch, Execution.MODULES).next_token_logits)
    assert launches.since().count("gemv") == 9


def test_a_pass_that_keeps_its_keys_writes_none(runner_of, launches):
    """`fresh_kv_only`: K and V go to the backend, and the pool stays."""
    runner = runner_of("llama", "float32")
    batch = ByHand(runner).batch({0: [1, 2, 3]})
    assert batch.token_to_kv_pool is not None
    expected = runner.forward(batch).next_token_logits
    batch.token_to_kv_pool._kv[:, :, batch.out_cache_loc] = 7
    batch.fresh_kv_only = True
    logits = runner.forward(batch).next_token_logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (batch.token_to_kv_pool._kv[:, :, batch.out_cache_loc] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"enable_torch_compile": True, "torch_compile_max_bs": 1}])
def test_captured_passes_are_near_those_by_modules(family, options):
    runner = make_runner(
        CONFIGS[family](), dtype="bfloat16", device="cuda", kv_cache_tokens=512, max_running_requests=2, **options
    )
    hand = ByHand(runner)
    hand.extend({0: random_ids(5), 1: random_ids(9, seed=1)})
    for tokens in ({0: [3]}, {0: [4], 1: [5]}):
        batch = hand.batch(tokens, ForwardMode.DECODE)
        replayed = runner.forward(batch).next_token_logits
        assert runner.graph_runner is not None and runner.graph_runner.can_run(batch)
        modules = runner.forward(batch, Execution.MODULES).next_token_logits
        torch.testing.assert_close(replayed, modules, rtol=0, atol=0.03 * modules.abs().max().item())
    runner.shutdown()


# -- top-k of a vocabulary ----------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "k"), [(5000, 3), (5000, 0), (1024, 5), (1025, 1), (9 * 1024, 8), (77, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_reads_blocks_and_finds_what_torch_finds(vocab: int, k: int, dtype: torch.dtype) -> None:
    from pymllm_interp.kernels.triton_top_k import top_k

    logits = (3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype).to(DEVICE)
    logits[1] = logits[1, 0]  # all are equal
    logits[2, : vocab // 2] = -torch.inf
    logits[3, -1] = 50.0
    values, indexes, total = top_k(logits, k)
    assert torch.equal(values, logits.topk(k).values) and torch.equal(logits.gather(1, indexes), values)
    assert all(len(set(row)) == k for row in indexes.tolist())
    torch.testing.assert_close(total, logits.float().logsumexp(-1), rtol=1e-5, atol=1e-5)
    logits[0, vocab // 3] = torch.nan
    values, _, total = top_k(logits, k)
    assert total[0].isnan() and total[1:].isfinite().all() and values[0, :1].isnan().all()
