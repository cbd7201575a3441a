"""The CPU's compiled kernels against plain torch, the passes over them, and what happens without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import COMMON
from helpers_runner import ByHand, make_runner, random_ids
from torch.testing import assert_close
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from pymllm_interp import LM, SamplingParams
from pymllm_interp.core.forward_batch import ForwardMode
from pymllm_interp.core.norm_kind import RMS_OFFSET
from pymllm_interp.kernels.cpu import cpu_dispatch
from pymllm_interp.layers.activation import SiLU, gated, silu
from pymllm_interp.layers.norm import add_rms_norm, rms_norm
from pymllm_interp.layers.rope import apply_rope, rope_and_write
from pymllm_interp.layers.seal import seal
from pymllm_interp.mem_cache import KVPool
from pymllm_interp.models.native import cpu_layer
from pymllm_interp.runner.partition import Execution

kernels: Any = cpu_dispatch.cpu_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="the kernels' tests need a C++ compiler")

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(function: Callable[..., Any], *args: Any) -> Any:
    """What the public function computes in plain torch: with gradients on, no tensor goes to the kernels."""
    with torch.enable_grad():
        return function(*args)


def near(actual: torch.Tensor, expected: torch.Tensor, last_bits: int = 4) -> None:
    """Equal up to some units in the last place, of a number of the tensor's own scale."""
    assert actual.dtype == expected.dtype
    atol = last_bits * torch.finfo(actual.dtype).eps * max(1.0, expected.float().abs().max().item())
    assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (5, 16), (1, 576), (40, 1000)])
def test_norms_equal_torch_and_each_other(rows, size, dtype):
    h, delta, weight = (
        randn(1, rows, size, dtype=dtype),
        randn(1, rows, size, dtype=dtype, seed=1),
        randn(size, dtype=dtype, seed=2),
    )
    total, normed = add_rms_norm(h, delta, weight, EPS)
    assert torch.equal(total, h + delta)
    assert torch.equal(normed, rms_norm(total, weight, EPS))
    near(normed, reference(rms_norm, total, weight, EPS))
    near(rms_norm(h, weight, EPS), reference(rms_norm, h, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (5, 24), (2, 1000)])
def test_norms_with_an_offset_equal_torch_and_each_other(rows, size, dtype):
    h, delta = (randn(1, rows, size, dtype=dtype, seed=seed) for seed in range(2))
    weight = 0.1 * randn(size, dtype=dtype, seed=2)
    total, normed = add_rms_norm(h, delta, weight, EPS, RMS_OFFSET)
    assert torch.equal(total, h + delta) and torch.equal(normed, rms_norm(total, weight, EPS, RMS_OFFSET))
    near(normed, reference(rms_norm, total, weight, EPS, RMS_OFFSET))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("heads, head_dim, turned", [(3, 24, 6), (2, 16, 0), (5, 80, 20)])
def test_a_rotation_of_some_channels_or_of_none_has_torchs_bits(heads, head_dim, turned, by_head, dtype):
    tokens, slots = 3, torch.tensor([7, 2, 31])
    qkv = randn(tokens, 3 * heads, head_dim, dtype=dtype)
    turn = randn(tokens, 1, 2 * turned, dtype=dtype, seed=1).chunk(2, dim=-1) if turned else (None, None)
    pools = [KVPool(1, 32, heads, head_dim, dtype, "cpu", 4) for _ in range(2)]
    q = rope_and_write(qkv, *turn, pools[0], 0, slots, None, by_head)
    assert torch.equal(q, reference(rope_and_write, qkv, *turn, pools[1], 0, slots, None, by_head))
    assert torch.equal(pools[0]._kv[..., slots, :, :], pools[1]._kv[..., slots, :, :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_a_slice_of_heads_reads_its_own_elements(dtype):
    qkv, weight = randn(5, 9, 24, dtype=dtype), randn(24, dtype=dtype, seed=1)
    kept = qkv.clone()
    assert torch.equal(rms_norm(qkv[:, 2:6], weight, EPS), rms_norm(qkv[:, 2:6].contiguous(), weight, EPS))
    assert torch.equal(qkv, kept)


def test_a_norm_of_another_width_is_refused():
    with pytest.raises(RuntimeError, match="has 8 elements"):
        rms_norm(randn(2, 9), randn(8), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, heads, head_dim", [(1, 1, 2), (3, 5, 24), (40, 9, 64)])
def test_rope_has_torchs_bits(tokens, heads, head_dim, dtype):
    x, both = randn(tokens, heads + 2, head_dim, dtype=dtype), randn(tokens, 1, 2 * head_dim, dtype=dtype, seed=1)
    cos, sin = both.chunk(2, dim=-1)
    for value in (x[:, :heads], x[:, :heads].contiguous()):
        assert torch.equal(apply_rope(value, cos, sin), reference(apply_rope, value, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 3), (2, 16), (33, 100), (7, 1536)])
def test_silu_equals_torch_and_its_product(rows, size, dtype):
    gate_up = 20 * randn(1, rows, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    near(silu(gate), F.silu(gate.contiguous()))
    assert torch.equal(gated(gate_up, silu), SiLU()(gate.contiguous()) * up)


def test_silu_of_what_is_not_finite():
    x = torch.tensor([float("nan"), float("inf"), -200.0, 200.0, 0.0])
    assert_close(silu(x), torch.tensor([float("nan"), float("inf"), 0.0, 200.0, 0.0]), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 16, 1000])
def test_argmax_is_the_first_of_the_largest(size, dtype):
    x = randn(6, size + 3, dtype=dtype)[:, :size].round()
    x[1] = 0.0
    x[2, size // 2] = float("nan")
    x[3] = -float("inf")
    x[4, -1] = float("inf")
    assert torch.equal(kernels.argmax(x).long(), x.max(dim=-1).indices)


# -- passes --------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    **COMMON,
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=32, mlp_bias=True, attention_bias=True),
    "qwen2": lambda: Qwen2Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=48),
}


@pytest.fixture(params=[(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")], ids=str)
def runner(request):
    family, dtype = request.param
    torch.manual_seed(0)
    made = make_runner(FAMILIES[family](), dtype=dtype, kv_cache_tokens=2048)
    for name, parameter in made.get_model().named_parameters():
        parameter.copy_(0.2 * randn(*parameter.shape, seed=len(name)) + (1 if "norm" in name else 0))
    yield made
    made.shutdown()


def test_a_decode_pass_has_the_bits_of_the_pass_by_modules_and_of_each_request_alone(runner, monkeypatch):
    prompts = {i: random_ids(n, seed=i) for i, n in enumerate((1, 4, 9, 23))}
    calls = []
    original = cpu_layer.decode_layer

    def noted(*args: Any) -> Any:
        out = original(*args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr("pymllm_interp.models.native.llama.decode_layer", noted)
    found = {}
    for way, execution in (("fused", Execution.PLAIN), ("modules", Execution.MODULES), ("alone", Execution.PLAIN)):
        hand = ByHand(runner)
        hand.extend(prompts)
        steps = []
        for step in range(3):
            tokens = {i: [5 + i + step] for i in prompts}
            parts = [{i: ids} for i, ids in tokens.items()] if way == "alone" else [tokens]
            logits = [
                runner.forward(hand.batch(part, ForwardMode.DECODE), execution).next_token_logits for part in parts
            ]
            steps.append(torch.cat([value.reshape(-1, value.shape[-1]) for value in logits]))
        found[way] = torch.stack(steps)
    assert torch.equal(found["fused"], found["modules"])
    if kernels.has_gemm(runner.dtype):
        assert any(calls), "a decode pass runs a layer in one call"
        assert torch.equal(found["fused"], found["alone"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_with_captures_at_its_ends_runs_in_one_call_with_the_same_bits(family, dtype, monkeypatch):
    """Inner sites and the stream between attention and MLP are behind its input: such layers run kernel by kernel."""
    lm = LM("tiny", load_format="dummy", hf_config=FAMILIES[family](), dtype=dtype, device="cpu", kv_cache_tokens=2048)
    if not kernels.has_gemm(lm.dtype):
        lm.shutdown()
        pytest.skip("this processor has no product of the dtype")
    steps = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14]]
    everywhere = [
        "embed",
        "resid_post.*",
        "resid_mid.*",
        "attn_out.*",
        "mlp_out.*",
        "q.*",
        "z.*",
        "mlp_act.*",
        "final_norm",
    ]
    wanted = lm.generate(prompts, steps, capture=everywhere)
    calls, original = [], cpu_layer.decode_layer

    def noted(layer: Any, *args: Any) -> Any:
        out = original(layer, *args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr("pymllm_interp.models.native.llama.decode_layer", noted)
    for sites, layers in (
        (["resid_post.*", "mlp_out.*", "final_norm"], "all"),
        (["q.1"], "some"),
        (["resid_mid.*"], "none"),
    ):
        calls.clear()
        found = lm.generate(prompts, steps, capture=sites)
        decoded = calls[-4 * lm.cfg.num_hidden_layers :]  # steps behind the prompts
        assert {(True, True): "all", (False, True): "some", (False, False): "none"}[
            min(decoded), max(decoded)
        ] == layers
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.token_ids == theirs.token_ids
            for site in ours.activations:
                assert torch.equal(ours.activations[site], theirs.activations[site]), site
    lm.shutdown()


class Called:
    """The kernels, with the names of those that were called."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(kernels, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.names.add(name)
            return value(*args, **kwargs)

        return noted if callable(value) else value


def test_decode_equals_plain_torch(runner, monkeypatch):
    prompts = {i: random_ids(n, seed=i) for i, n in enumerate((1, 4, 9, 23))}
    found, called = [], Called()
    for way, dispatched in (("kernels", called), ("torch", None)):
        monkeypatch.setattr(cpu_dispatch, "cpu_kernels", lambda dispatched=dispatched: dispatched)
        called.names.clear()
        hand = ByHand(runner)
        hand.extend(prompts)
        batch = hand.batch({i: [5 + i] for i in prompts}, ForwardMode.DECODE)
        found.append(runner.forward(batch).next_token_logits.float())
        used = {"rms_norm", "rope_and_write", "silu_mul"} | ({"gemm"} if kernels.has_gemm(runner.dtype) else set())
        assert called.names >= used if dispatched else not called.names, (way, called.names)
    scale = found[1].abs().max().item()
    assert_close(found[0], found[1], rtol=0, atol=scale * (1e-5 if runner.dtype is torch.float32 else 0.05))


@pytest.mark.parametrize("name", ["mlp.gate_proj", "self_attn.k_proj", "self_attn.o_proj", "input_layernorm"])
def test_a_weight_that_is_edited_between_passes_is_seen_by_the_next(name, runner):
    seal(runner.get_model())

    def logits() -> torch.Tensor:
        hand = ByHand(runner)
        hand.extend({0: random_ids(4)})
        return runner.forward(hand.batch({0: [7]}, ForwardMode.DECODE)).next_token_logits

    before, weight = logits(), dict(runner.get_model().named_parameters())[f"model.layers.1.{name}.weight"]
    old = weight.detach().clone()
    weight.mul_(1.5)
    assert not torch.equal(logits(), before)
    weight.data = old
    assert torch.equal(logits(), before)


def test_without_a_compiler_plain_torch_serves(tmp_path):
    script = (
        "import torch\n"
        "from pymllm_interp.kernels.cpu.cpu_dispatch import cpu_kernels\n"
        "from pymllm_interp.layers.linear import Linear\n"
        "assert cpu_kernels() is None\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    linear = Linear(8, 5, False, dtype, 'cpu')\n"
        "    linear.weight.fill_(1)\n"
        "    with torch.no_grad(): assert linear(torch.ones(2, 8, dtype=dtype)).eq(8).all()\n"
    )
    env = os.environ | {"CXX": str(tmp_path / "missing"), "PYMLLM_INTERP_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "plain torch is used" in done.stderr
