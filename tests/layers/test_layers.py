"""Layers against plain torch and transformers' own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import COMMON
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from pymllm_interp.layers.linear import Embedding, Linear, MergedLinear
from pymllm_interp.layers.norm import RMSNorm, rms_norm
from pymllm_interp.layers.rope import RotaryEmbedding, apply_rope, rotation

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [27, 9, 9]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, expected.abs().max().item()))


def make_linear(bias: bool, dtype: torch.dtype, width: int = 20, out: int = 33) -> Linear:
    linear = Linear(width, out, bias, dtype, "cpu")
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(randn(*parameter.shape))
    return linear


def make_merged(bias: bool, dtype: torch.dtype, width: int = 20) -> MergedLinear:
    merged = MergedLinear(width, SIZES, bias, dtype, "cpu")
    with torch.no_grad():
        for seed, projection in enumerate(merged.projections()):
            for parameter in projection.parameters():
                parameter.copy_(randn(*parameter.shape, seed=seed))
    return merged


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_linear_equals_torch(rows, bias, dtype):
    linear, x = make_linear(bias, dtype), randn(1, rows, 20, dtype=dtype, seed=1)
    near(linear(x), F.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_no_rows_has_no_rows(bias: bool, device: str) -> None:
    """The head's, in a pass that ends no prompt."""
    for dtype in (torch.float32, torch.bfloat16):
        linear = Linear(16, 24, bias, dtype, device)
        assert linear(torch.empty(1, 0, 16, dtype=dtype, device=device)).shape == (1, 0, 24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_follows_a_weight_that_is_edited_in_place_loaded_or_replaced(dtype):
    linear, x = make_linear(True, dtype), randn(1, 3, 20, dtype=dtype, seed=1)
    linear(x)  # packs the weight, where it is packed
    linear.weight[4] = 0
    assert torch.equal(linear(x)[..., 4], linear.bias[4].expand(1, 3))
    linear.weight.copy_(randn(33, 20, seed=7))
    near(linear(x), F.linear(x, linear.weight, linear.bias))
    linear.bias.zero_()
    near(linear(x), F.linear(x, linear.weight))
    linear.weight = torch.nn.Parameter(randn(33, 20, dtype=dtype, seed=8), False)
    linear.bind()
    near(linear(x), F.linear(x, linear.weight))


def test_bfloat16_with_grad_has_a_gradient():
    linear, x = make_linear(False, torch.bfloat16), randn(1, 3, 20, dtype=torch.bfloat16).requires_grad_()
    with torch.enable_grad():
        linear(x).sum().backward()
    assert x.grad is not None
    near(x.grad, linear.weight.sum(0).expand(1, 3, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_projections_serve_slices_of_one_product(bias, dtype, monkeypatch):
    merged, x = make_merged(bias, dtype), randn(1, 5, 20, dtype=dtype, seed=3)
    products = []
    gemm = merged.gemm
    monkeypatch.setattr(merged, "gemm", lambda x: products.append(1) or gemm(x))
    with merged.product(x):
        outs = [projection(x) for projection in merged.projections()]
    assert len(products) == 1
    assert torch.equal(torch.cat(outs, -1), gemm(x))
    for out, projection in zip(outs, merged.projections(), strict=True):
        near(out, F.linear(x, projection.weight, projection.bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_projections_alone_outside_of_a_product(dtype):
    merged, x = make_merged(True, dtype), randn(1, 5, 20, dtype=dtype, seed=3)
    for projection in merged.projections():
        near(projection(x), F.linear(x, projection.weight, projection.bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_input_edited_in_place_is_computed_again_for_the_projections_after_the_edit(dtype):
    merged, x = make_merged(False, dtype), randn(1, 5, 20, dtype=dtype, seed=3)
    before = merged.gemm(x).split(SIZES, -1)
    with merged.product(x):
        q = merged.projections()[0](x)
        x[:, 2] = 0
        k, v = merged.projections()[1](x), merged.projections()[2](x)
    assert torch.equal(q, before[0]), "what was served before the edit stays"
    assert not k[:, 2].any() and not v[:, 2].any()
    kept = torch.tensor([0, 1, 3, 4])
    assert torch.equal(k[:, kept], before[1][:, kept]), "rows that nobody edited keep their bits"
    assert torch.equal(v[:, kept], before[2][:, kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replaced_input_reaches_its_own_projection_alone_and_other_rows_keep_their_bits(dtype):
    merged, x = make_merged(True, dtype), randn(1, 5, 20, dtype=dtype, seed=3)
    plain = merged.gemm(x).split(SIZES, -1)
    other = x.clone()
    other[:, 1] = 1
    with merged.product(x):
        q = merged.projections()[0](x)
        k = merged.projections()[1](other)
        v = merged.projections()[2](x)
    assert torch.equal(q, plain[0]) and torch.equal(v, plain[2])
    near(k, F.linear(other, merged.projections()[1].weight, merged.projections()[1].bias))
    kept = torch.tensor([0, 2, 3, 4])
    assert torch.equal(k[:, kept], plain[1][:, kept])
    assert not torch.equal(k[:, 1], plain[1][:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_projection_weights_are_views_of_the_merged_weight_and_edits_reach_the_product(dtype):
    merged, x = make_merged(True, dtype), randn(1, 2, 20, dtype=dtype)
    merged.gemm(x)  # packs
    merged.projections()[1].weight.zero_()
    merged.projections()[1].bias.fill_(3)
    q, k, v = merged.gemm(x).split(SIZES, -1)
    assert torch.equal(k, torch.full_like(k, 3))
    near(q, F.linear(x, merged.projections()[0].weight, merged.projections()[0].bias))
    near(v, F.linear(x, merged.projections()[2].weight, merged.projections()[2].bias))
    assert len({projection.weight.untyped_storage().data_ptr() for projection in merged.projections()}) == 1


def test_a_product_ends_with_its_block_also_when_the_block_raises():
    merged, x = make_merged(False, torch.float32), randn(1, 2, 20)
    with pytest.raises(KeyError), merged.product(x):
        raise KeyError
    assert merged._input is None and merged._product is None


def test_the_merged_product_is_no_module_of_the_tree():
    merged = make_merged(True, torch.float32)
    parent = torch.nn.Module()
    parent._qkv = merged  # pyright: ignore
    parent.q_proj, parent.k_proj, parent.v_proj = merged.projections()
    assert sorted(parent.state_dict()) == sorted(f"{n}_proj.{p}" for n in "qkv" for p in ("weight", "bias"))


def test_embedding_equals_torch():
    embedding = Embedding(11, 6, torch.float32, "cpu")
    embedding.weight.copy_(randn(11, 6))
    ids = torch.tensor([[3, 0, 10, 3]])
    assert torch.equal(embedding(ids), embedding.weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm_equals_transformers(scale, dtype):
    ours, theirs = RMSNorm(40, 1e-6, dtype, "cpu"), LlamaRMSNorm(40, 1e-6).to(dtype)
    weight = 1 + 0.1 * randn(40)
    ours.weight.copy_(weight)
    theirs.weight.copy_(weight)
    x = (randn(1, 7, 40) * scale).to(dtype)
    kept = x.clone()
    # The order of sums differs, which may change the last bits.
    tolerances = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(ours(x), theirs(x), **tolerances)
    assert torch.equal(rms_norm(x, ours.weight, 1e-6), ours(x))
    assert torch.equal(x, kept), "a norm does not write to what it reads"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 9])
def test_rope_equals_transformers(heads, dtype):
    config = LlamaConfig(**{**COMMON, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 10})
    ours, theirs = RotaryEmbedding(config, 10, 128, dtype, "cpu"), LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 5, 127, 63, 64]])
    q = randn(6, heads, 10, dtype=dtype)
    cos, sin = ours(q, position_ids=positions)
    expected_cos, expected_sin = theirs(q[None], positions)
    assert cos.dtype == dtype and cos.shape == (1, 6, 10)
    near(cos, expected_cos)
    near(sin, expected_sin)
    batched = q.transpose(0, 1).unsqueeze(0)  # [1, heads, tokens, head_dim]
    rotated, _ = apply_rotary_pos_emb(batched, batched, expected_cos, expected_sin)
    mine = apply_rope(q, *rotation(cos, sin))
    near(mine, rotated[0].transpose(0, 1))
    assert mine.data_ptr() != q.data_ptr()


def test_length_dependent_rope_needs_lengths_and_keeps_rows_apart():
    config = LlamaConfig(**{
        **COMMON, "max_position_embeddings": 16, "hidden_size": 64, "num_attention_heads": 4,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    })  # fmt: skip
    rope = RotaryEmbedding(config, 16, 32, torch.float32, "cpu")
    positions = torch.tensor([[3, 3, 3]])
    with pytest.raises(AssertionError, match="dynamic"):
        rope(positions, positions)
    cos, _ = rope(positions, positions, torch.tensor([10, 30, 16]))
    assert torch.equal(cos[0, 0], cos[0, 2]), "lengths up to the original one share their frequencies"
    assert not torch.equal(cos[0, 0], cos[0, 1])
    alone, _ = rope(positions, positions[:, :1], torch.tensor([30]))
    assert torch.equal(cos[0, 1], alone[0, 0])


def test_an_unknown_rope_scaling_is_refused_by_name():
    config = LlamaConfig(**{**COMMON, "hidden_size": 64, "num_attention_heads": 4})
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="spiral"):
        RotaryEmbedding(config, 16, 32, torch.float32, "cpu")
    config.rope_parameters = {"rope_type": "default"}
    with pytest.raises(ValueError, match="rope_theta"):
        RotaryEmbedding(config, 16, 32, torch.float32, "cpu")
