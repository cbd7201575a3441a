"""The conformance suite of attention backends: every one agrees with a float64 loop over heads and queries.

A backend that is added to `BACKENDS` takes all of it.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import helpers_flashinfer
import pytest
import torch
from helpers_attention import Sequences, make_layer, reference_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from pymllm_interp import attention
from pymllm_interp.attention import (
    AttentionBackend,
    FlashInferAttnBackend,
    RadixAttention,
    create_attention_backend,
    flashinfer_backend,
    flashinfer_plans,
    torch_backend,
    torch_plan,
)
from pymllm_interp.core.forward_batch import ForwardMode
from pymllm_interp.mem_cache import KVPool
from pymllm_interp.mem_cache.memory_pool import FP8

Ranges = dict[int, tuple[int, int]]


class BackendCase(NamedTuple):
    name: str
    device: str
    limits: dict[str, int]  # of the torch backend: small ones make short requests take the paths of long ones
    dtype: torch.dtype = torch.float32

    def fit(self, layer: RadixAttention) -> RadixAttention:
        """The layer with heads that the backend has kernels for."""
        if layer.sinks is not None:
            layer = replace(layer, sinks=layer.sinks.to(self.device))
        return replace(layer, head_dim=64, scaling=0.125) if self.name == "flashinfer" else layer


BACKENDS = {
    "torch": BackendCase("torch", "cpu", {}),
    "torch-unfused": BackendCase("torch", "cpu", {"FUSED_SCORES": 0}),
    "torch-long": BackendCase("torch", "cpu", {"MAX_SCORE_BYTES": 1 << 12, "FUSED_SCORES": 0, "SMALL_PAIRS": 64}),
    "torch-cuda": BackendCase("torch", "cuda", {}),
    "flashinfer-in-torch": BackendCase("flashinfer", "cpu", {}, torch.bfloat16),
    "flashinfer": BackendCase("flashinfer", "cuda", {}, torch.bfloat16),
}


CPU = BACKENDS["torch"]


@pytest.fixture(
    params=[
        pytest.param(case, id=name, marks=[pytest.mark.gpu] if case.device == "cuda" else [])
        for name, case in BACKENDS.items()
    ]
)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BackendCase:
    if request.param.name == "flashinfer":
        if request.param.device == "cuda":
            pytest.importorskip("flashinfer")
        else:
            monkeypatch.setattr(flashinfer_backend, "import_flashinfer", lambda: helpers_flashinfer)
            monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)
    for name, value in request.param.limits.items():
        monkeypatch.setattr(torch_backend if name == "FUSED_SCORES" else torch_plan, name, value)
    return request.param


def backend_of(case: BackendCase, dtype: torch.dtype | None = None) -> AttentionBackend:
    if case.name == "flashinfer":
        return FlashInferAttnBackend(case.device, dtype or case.dtype)
    return create_attention_backend(case.name, case.device, dtype or case.dtype)


SINKS = torch.tensor([-3.0, 0.0, 1.0, 2.5, 6.0, -20.0])
LAYERS = {
    "9-over-3": make_layer(9, 3, 64),
    "4-over-1": make_layer(4, 1, 16),
    "4-over-4": make_layer(4, 4, 16),
    "window-1": make_layer(4, 2, 16, sliding_window=1),
    "window-4": make_layer(9, 3, 16, sliding_window=4),
    "window-100": make_layer(4, 2, 16, sliding_window=100),
    "cap": make_layer(9, 3, 16, logit_cap=1.5),
    "cap-window-4": make_layer(4, 1, 16, logit_cap=1.5, sliding_window=4),
    "sinks": make_layer(6, 2, 16, sinks=SINKS),
    "sinks-window-4": make_layer(6, 3, 16, sinks=SINKS, sliding_window=4),
    "sinks-cap": make_layer(6, 1, 16, sinks=SINKS, logit_cap=1.5),
}
kinds_of_layer = pytest.mark.parametrize("layer", [LAYERS[name] for name in ("9-over-3", "window-4", "cap", "sinks")])
# Position ranges of each request in a pass; the pages have 16 slots or one.
PASSES: dict[str, list[tuple[int, int]]] = {
    "one-token-prompt": [(0, 1)],
    "one-decode": [(16, 17)],
    "decode": [(0, 1), (15, 16), (16, 17), (2, 3), (40, 41), (7, 8)],
    "prompt": [(0, 33)],
    "prompts": [(0, 5), (0, 16), (0, 17), (0, 1), (0, 40), (0, 17)],
    "equal-prompts": [(0, 16), (0, 16), (0, 16)],
    "prefixes": [(0, 9), (3, 9), (16, 24), (17, 30), (15, 17), (32, 33)],
    "mixed": [(20, 21), (8, 9), (0, 19), (16, 40), (33, 34)],
    "mixed-backwards": [(16, 40), (0, 19), (20, 21)],
    "past-the-window": [(0, 110), (99, 105), (103, 104)],
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance)


def make_sequences(
    case: BackendCase, lengths: list[int], layer: RadixAttention, dtype: torch.dtype | None = None, **options: int
) -> Sequences:
    return Sequences.make(lengths, case.fit(layer), dtype or case.dtype, device=case.device, **options)


def prepare(
    case: BackendCase,
    ranges: list[tuple[int, int]],
    layer: RadixAttention,
    dtype: torch.dtype | None = None,
    **options: int,
) -> tuple[Sequences, Ranges]:
    """Sequences that reach to the ranges' ends, their prefixes in the pool."""
    sequences = make_sequences(case, [stop for _, stop in ranges], layer, dtype, **options)
    sequences.fill({i: start for i, (start, _) in enumerate(ranges)})
    return sequences, dict(enumerate(ranges))


def check_against_reference(backend: AttentionBackend, sequences: Sequences, ranges: Ranges) -> None:
    for i, out in sequences.run(backend, ranges).items():
        assert out.dtype == sequences.q[i].dtype
        close(out, sequences.expected(i, *ranges[i]), out.dtype)


@pytest.mark.thin(12)
@pytest.mark.parametrize("ranges", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_pass_equals_reference(case: BackendCase, layer: RadixAttention, ranges: list[tuple[int, int]]) -> None:
    sequences, passed = prepare(case, ranges, layer)
    check_against_reference(backend_of(case), sequences, passed)


@pytest.mark.thin(4)
@pytest.mark.parametrize("ranges", PASSES.values(), ids=PASSES)
def test_bfloat16_pass_equals_reference(case: BackendCase, ranges: list[tuple[int, int]]) -> None:
    sequences, passed = prepare(case, ranges, LAYERS["9-over-3"], torch.bfloat16)
    check_against_reference(backend_of(case, torch.bfloat16), sequences, passed)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_where_the_pages_lie_changes_no_bit(case: BackendCase, name: str, page_size: int) -> None:
    sequences, ranges = prepare(case, PASSES[name], LAYERS["9-over-3"])
    expected = sequences.run(backend_of(case), ranges)
    other = make_sequences(case, sequences.lengths, sequences.layer, page_size=page_size, seed=1)
    assert other.slots != sequences.slots
    other.q, other.k, other.v = sequences.q, sequences.k, sequences.v
    other.fill({i: start for i, (start, _) in ranges.items()})
    for i, out in other.run(backend_of(case), ranges).items():
        assert torch.equal(out, expected[i])


@pytest.mark.thin(3)
@kinds_of_layer
@pytest.mark.parametrize("cuts", [[20], [1, 2, 3], [16, 17, 33], [5, 40]])
def test_chunked_equals_unchunked(case: BackendCase, layer: RadixAttention, cuts: list[int]) -> None:
    sequences = make_sequences(case, [41, 9], layer)
    whole = sequences.run(backend_of(case), {0: (0, 41)})[0]
    sequences = make_sequences(case, [41, 9], layer)
    edges = [0, *cuts, 41]
    chunks = [sequences.run(backend_of(case), {0: span})[0] for span in itertools.pairwise(edges)]
    close(torch.cat(chunks), whole, whole.dtype)


@kinds_of_layer
def test_mixed_equals_separate_passes(case: BackendCase, layer: RadixAttention) -> None:
    sequences, ranges = prepare(case, PASSES["mixed"], layer)
    mixed = sequences.run(backend_of(case), ranges, ForwardMode.MIXED)
    for i, span in ranges.items():
        separate, _ = prepare(case, PASSES["mixed"], layer)
        close(separate.run(backend_of(case), {i: span})[i], mixed[i], case.dtype)


@pytest.mark.thin(8)
@pytest.mark.parametrize("name", ["decode", "prompts", "prefixes", "mixed"])
@kinds_of_layer
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_requests_change_no_bit_of_the_others(
    case: BackendCase, layer: RadixAttention, name: str, poison: float
) -> None:
    sequences, ranges = prepare(case, PASSES[name], layer)
    clean = sequences.run(backend_of(case), ranges)
    for victims in ([0], [1, 4], [i for i in ranges if i != 2]):
        sequences, _ = prepare(case, PASSES[name], layer)
        for i in victims:
            for x in (sequences.q, sequences.k, sequences.v):
                x[i] = torch.full_like(x[i], poison)
        sequences.fill({i: ranges[i][0] for i in victims})
        poisoned = sequences.run(backend_of(case), ranges)
        for i in ranges:
            if i in victims:
                assert not poisoned[i].isfinite().all()
            else:
                assert torch.equal(poisoned[i], clean[i])


@pytest.mark.thin(8)
@pytest.mark.parametrize("name", ["decode", "prompts", "prefixes", "mixed"])
@kinds_of_layer
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_padded_rows_left_in_the_dummy_page_reaches_nobody(
    case: BackendCase, layer: RadixAttention, name: str, poison: float
) -> None:
    sequences, ranges = prepare(case, PASSES[name], layer)
    clean = sequences.run(backend_of(case), ranges)
    for buffer in (*sequences.pool.k_buffer, *sequences.pool.v_buffer):
        buffer[:16] = poison
    for i, out in sequences.run(backend_of(case), ranges).items():
        assert torch.equal(out, clean[i])


@pytest.mark.parametrize("name", ["decode", "prefixes", "mixed"])
def test_pass_writes_its_slots_and_no_others(case: BackendCase, name: str) -> None:
    sequences, ranges = prepare(case, PASSES[name], LAYERS["9-over-3"])
    sequences.run(backend_of(case), ranges)
    for buffers, rows in ((sequences.pool.k_buffer, sequences.k), (sequences.pool.v_buffer, sequences.v)):
        expected = torch.full_like(buffers[1], float("nan"))
        expected[:16] = 0
        for slots, row in zip(sequences.slots, rows, strict=True):
            expected[slots] = row
        assert torch.equal(buffers[1].nan_to_num(9.0), expected.nan_to_num(9.0))
        assert buffers[0][16:].isnan().all()


def test_padded_decode_rows_change_nobody(case: BackendCase) -> None:
    sequences, ranges = prepare(case, PASSES["decode"], LAYERS["9-over-3"])
    backend, batch = backend_of(case), sequences.batch(ranges)

    def pad(x: torch.Tensor | None, value: float) -> torch.Tensor:
        assert x is not None
        return torch.cat((x, x.new_full((2, *x.shape[1:]), value)))

    padded = replace(
        batch,
        batch_size=batch.batch_size + 2,
        input_ids=pad(batch.input_ids, 0),
        req_pool_indices=pad(batch.req_pool_indices, 0),  # the dummy row
        out_cache_loc=pad(batch.out_cache_loc, 0),  # the dummy slot
        seq_lens=pad(batch.seq_lens, 1),
        seq_lens_cpu=pad(batch.seq_lens_cpu, 1),
    )
    backend.init_forward_metadata(padded)
    q, k, v = (pad(x, 3.0) for x in sequences.rows(ranges))
    out = backend.forward(q, k, v, sequences.layer, padded)
    close(out[:-2], torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)
    assert out[-2:].isfinite().all()
    for buffers, rows in ((sequences.pool.k_buffer, sequences.k), (sequences.pool.v_buffer, sequences.v)):
        for slots, row in zip(sequences.slots, rows, strict=True):
            assert torch.equal(buffers[1][slots], row)


def test_without_saving_the_pool_is_read_as_it_is(case: BackendCase) -> None:
    sequences, ranges = prepare(case, PASSES["mixed"], LAYERS["9-over-3"])
    sequences.fill({i: stop for i, (_, stop) in ranges.items()})
    backend, batch = backend_of(case), sequences.batch(ranges)
    q, k, v = sequences.rows(ranges)
    backend.init_forward_metadata(batch)
    out = backend.forward(
        q, torch.full_like(k, 9.0), torch.full_like(v, 9.0), sequences.layer, batch, save_kv_cache=False
    )
    close(out, torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)


def test_layers_of_one_pass_have_their_own_windows_and_kv(case: BackendCase) -> None:
    sequences, ranges = prepare(case, PASSES["mixed"], LAYERS["9-over-3"])
    backend, batch = backend_of(case), sequences.batch(ranges)
    backend.init_forward_metadata(batch)
    for options in ({}, {"sliding_window": 4}, {"logit_cap": 1.5}, {"sliding_window": 9}, {}):
        sequences.layer = replace(case.fit(LAYERS["9-over-3"]), **options)  # pyright: ignore[reportArgumentType]
        out = backend.forward(*sequences.rows(ranges), sequences.layer, batch)
        close(out, torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)


@pytest.mark.parametrize("name", ["one-decode", "decode", "prompt", "mixed"])
def test_outputs_are_fresh_memory(case: BackendCase, name: str) -> None:
    sequences, ranges = prepare(case, PASSES[name], LAYERS["9-over-3"])
    backend, batch = backend_of(case), sequences.batch(ranges)
    backend.init_forward_metadata(batch)
    rows = sequences.rows(ranges)
    inputs = [x.clone() for x in rows]
    first = backend.forward(*rows, sequences.layer, batch)
    expected = first.clone()
    second = backend.forward(*rows, sequences.layer, batch)
    second.fill_(7.0)
    assert torch.equal(first, expected)
    assert torch.equal(backend.forward(*rows, sequences.layer, batch), expected)
    for row, before in zip(rows, inputs, strict=True):
        assert torch.equal(row, before)


def test_q_k_v_may_be_slices_of_a_merged_projection(case: BackendCase) -> None:
    sequences, ranges = prepare(case, PASSES["mixed"], LAYERS["9-over-3"])
    rows = sequences.rows(ranges)
    backend, batch = backend_of(case), sequences.batch(ranges)
    backend.init_forward_metadata(batch)
    sliced = torch.cat(rows, 1).split([9, 3, 3], 1)
    assert not sliced[0].is_contiguous()
    expected = backend.forward(*rows, sequences.layer, batch)
    assert torch.equal(backend.forward(sliced[0], sliced[1], sliced[2], sequences.layer, batch), expected)


@pytest.mark.parametrize("name", ["one-decode", "mixed"])
@pytest.mark.parametrize("scales", [None, (1.0, 1.0), (0.5, 2.0)], ids=["bfloat16", "fp8", "fp8-scales"])
def test_kv_is_rounded_to_the_pools_dtype(case: BackendCase, scales: tuple[float, float] | None, name: str) -> None:
    """In FP8 a checkpoint's scales are part of it. The layer behind has others: a call that was noted would have the first ones."""
    dtype, dim = FP8 if scales else torch.bfloat16, 64 if case.device == "cpu" else 128
    layer, ranges = make_layer(9, 3, dim), dict(enumerate(PASSES[name]))
    sequences = Sequences.make([stop for _, stop in ranges.values()], layer, case.dtype, device=case.device)
    backend = backend_of(case)
    for layer_id, own in ((1, scales), (0, (1.0, 4.0)), (1, scales)):
        sequences.layer = replace(layer, layer_id=layer_id)
        both = {1: scales or (1.0, 1.0), 0: (1.0, 4.0) if scales else (1.0, 1.0)}
        sequences.pool = KVPool(2, sequences.pool.size, 3, dim, dtype, case.device, 16, both if scales else None)
        sequences.fill({i: start for i, (start, _) in ranges.items()})
        for i, out in sequences.run(backend, ranges).items():
            k, v = (
                (x[i].double() / scale).to(dtype).double() * scale
                for x, scale in zip((sequences.k, sequences.v), own if scales and own else (1.0, 1.0), strict=True)
            )
            start = ranges[i][0]
            close(out, reference_attention(sequences.q[i], k, v, layer)[start:], case.dtype)


def test_pass_without_tokens_gives_no_rows(case: BackendCase) -> None:
    sequences, _ = prepare(case, [(0, 3)], LAYERS["9-over-3"])
    backend, batch = backend_of(case), replace(sequences.batch({0: (0, 3)}), attn_metadata=None)
    batch = replace(
        batch,
        forward_mode=ForwardMode.IDLE,
        batch_size=0,
        extend_seq_lens_cpu=None,
        **{name: getattr(batch, name)[:0] for name in ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu")},
        out_cache_loc=batch.out_cache_loc[:0],
    )
    backend.init_forward_metadata(batch)
    out = backend.forward(*(x[:0] for x in sequences.rows({0: (0, 3)})), layer=sequences.layer, forward_batch=batch)
    assert out.shape == (0, 9 * 64)


# The gradient pass is the torch backend's alone.


@pytest.fixture(params=[{}, BACKENDS["torch-long"].limits], ids=["short", "long"])
def torch_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    for name, value in request.param.items():
        monkeypatch.setattr(torch_backend if name == "FUSED_SCORES" else torch_plan, name, value)
    return create_attention_backend("torch", "cpu", torch.float32)


@pytest.mark.thin(3)
@kinds_of_layer
@pytest.mark.parametrize("lengths", [[1], [19], [3, 30, 17]])
def test_fresh_kv_gradients_equal_reference(
    torch_only: AttentionBackend, layer: RadixAttention, lengths: list[int]
) -> None:
    sequences = Sequences.make(lengths, layer, torch.float64)
    pool_before = sequences.pool.k_buffer[1].clone()
    ranges = {i: (0, length) for i, length in enumerate(lengths)}
    for x in (*sequences.q, *sequences.k, *sequences.v):
        x.requires_grad_()
    leaves = [*sequences.q, *sequences.k, *sequences.v]
    batch = replace(sequences.batch(ranges, ForwardMode.EXTEND), fresh_kv_only=True, token_to_kv_pool=None)
    torch_only.init_forward_metadata(batch)
    out = torch_only.forward(*sequences.rows(ranges), layer, batch)
    expected = torch.cat([sequences.expected(i, *span) for i, span in ranges.items()])
    # The soft cap's path works in float32.
    tolerance = torch.float64 if layer.logit_cap is None else torch.float32
    close(out, expected, tolerance)
    weight = torch.randn(out.shape, dtype=torch.float64)
    grads = torch.autograd.grad((out * weight).sum(), leaves)
    for grad, wanted in zip(grads, torch.autograd.grad((expected * weight).sum(), leaves), strict=True):
        close(grad, wanted, tolerance)
    assert torch.equal(sequences.pool.k_buffer[1].nan_to_num(9.0), pool_before.nan_to_num(9.0))


def test_fresh_kv_of_one_request_does_not_reach_another(torch_only: AttentionBackend) -> None:
    lengths = [5, 19, 3]
    ranges = {i: (0, length) for i, length in enumerate(lengths)}
    outs = []
    for poison in (False, True):
        sequences = Sequences.make(lengths, LAYERS["9-over-3"])
        if poison:
            for x in (sequences.q, sequences.k, sequences.v):
                x[0], x[2] = (torch.full_like(x[i], float("nan")) for i in (0, 2))
        batch = replace(sequences.batch(ranges), fresh_kv_only=True)
        torch_only.init_forward_metadata(batch)
        outs.append(torch_only.forward(*sequences.rows(ranges), sequences.layer, batch))
    assert torch.equal(outs[0][5:24], outs[1][5:24])


def test_fresh_kv_with_a_prefix_is_refused(torch_only: AttentionBackend) -> None:
    sequences, ranges = prepare(CPU, [(0, 5), (3, 9)], LAYERS["9-over-3"])
    with pytest.raises(ValueError, match=r"request 1 .* 3 tokens in the KV pool"):
        torch_only.init_forward_metadata(replace(sequences.batch(ranges), fresh_kv_only=True))


def test_lengths_that_contradict_each_other_are_refused(torch_only: AttentionBackend) -> None:
    sequences, ranges = prepare(CPU, [(0, 5), (0, 9)], LAYERS["9-over-3"])
    batch = replace(sequences.batch(ranges), seq_lens_cpu=torch.tensor([5, 8], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"request 1 .* seq_len 8, but 9 new tokens"):
        torch_only.init_forward_metadata(batch)


def test_lengths_may_be_on_the_device_only(torch_only: AttentionBackend) -> None:
    sequences, ranges = prepare(CPU, PASSES["mixed"], LAYERS["9-over-3"])
    batch = replace(sequences.batch(ranges), seq_lens_cpu=None)
    torch_only.init_forward_metadata(batch)
    out = torch_only.forward(*sequences.rows(ranges), sequences.layer, batch)
    close(out, torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)


# The torch backend's plan.


def plan_of(spans: list[tuple[int, int]], layer: RadixAttention) -> torch_plan.AttnPlan:
    sequences = Sequences.make([stop for _, stop in spans], layer)
    batch = sequences.batch(dict(enumerate(spans)))
    return torch_plan.build_plan(torch_plan.make_chunks(batch), layer, batch, torch.float32)


@pytest.mark.parametrize(
    ("spans", "groups"),
    [
        ([(n, n + 1) for n in range(64, 128)], [(64, 1, 128)]),
        ([(0, n) for n in range(17, 33)], [(16, 32, 32)]),
        ([(n, n + 1) for n in range(64, 96)] + [(0, n) for n in range(17, 33)], [(32, 1, 96), (16, 32, 32)]),
        ([(99, 100)] * 31 + [(3999, 4000)], [(31, 1, 112), (1, 1, 4000)]),
        ([(0, 2000), (9, 10)], [(1, 1, 16), (1, 2000, 2000)]),
    ],
    ids=["decode", "short prompts", "mixed", "one long context", "one long prompt"],
)
def test_similar_requests_share_a_group(spans: list[tuple[int, int]], groups: list[tuple[int, int, int]]) -> None:
    plan = plan_of(spans, make_layer(2, 1, 4))
    assert [(group.size, group.q_len, group.kv_len) for group in plan.groups] == groups


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 600), st.integers(1, 300)), min_size=1, max_size=24), st.randoms())
def test_padding_is_bounded_and_every_row_has_one_place(requests: list[tuple[int, int]], rng: random.Random) -> None:
    rng.shuffle(requests)
    layer = make_layer(4, 2, 4, sliding_window=rng.choice([None, 50]))
    plan = plan_of([(prefix, prefix + num) for prefix, num in requests], layer)
    limit = torch_plan.MAX_SCORE_BYTES // (4 * layer.num_heads)
    for group in plan.groups:
        # Rounding up may go past the limit.
        bound = limit * (1 + torch_plan.QUERY_MULTIPLE / group.q_len) * (1 + torch_plan.KV_MULTIPLE / group.kv_len)
        assert group.size * group.q_len * group.kv_len <= bound or group.mask is None
    tokens = sum(num for _, num in requests)
    if plan.inverse is None:
        assert sum(group.size * group.q_len for group in plan.groups) == tokens
        return
    rows = torch.cat([group.q_index for group in plan.groups if group.q_index is not None])
    assert torch.equal(rows[plan.inverse], torch.arange(tokens))
    assert len(set(plan.inverse.tolist())) == tokens


# Decode passes for CUDA graphs: planned into memory that keeps its address.


def decode_twice(
    case: BackendCase, layer: RadixAttention, first: list[int], second: list[int]
) -> tuple[AttentionBackend, Sequences, torch.Tensor]:
    """The outputs of a pass that is planned for capture at lengths `first`, then for replay at lengths `second`."""
    sequences = make_sequences(case, [max(pair) for pair in zip(first, second, strict=True)], layer)
    backend = backend_of(case)
    backend.init_cuda_graph_state(8)
    static = sequences.batch({i: (n - 1, n) for i, n in enumerate(first)})
    backend.init_forward_metadata_capture_cuda_graph(static)
    q, k, v = sequences.rows({i: (n - 1, n) for i, n in enumerate(first)})
    backend.forward(q, k, v, sequences.layer, static)
    for buffer in (*sequences.pool.k_buffer, *sequences.pool.v_buffer):
        buffer[:16] = float("nan")  # what rows of padding may leave there
    sequences.fill({i: n - 1 for i, n in enumerate(second)})
    now = sequences.batch({i: (n - 1, n) for i, n in enumerate(second)})
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
        getattr(static, name).copy_(getattr(now, name))
    backend.init_forward_metadata_replay_cuda_graph(static)
    if isinstance(backend, torch_backend.TorchAttnBackend):
        # What a replayed graph does: the plan is a part of the captured pass.
        backend.init_forward_metadata_capture_cuda_graph(static)
    rows = sequences.rows({i: (n - 1, n) for i, n in enumerate(second)})
    out = backend.forward(*rows, sequences.layer, static)
    close(out, torch.cat([sequences.expected(i, n - 1, n) for i, n in enumerate(second)]), out.dtype)
    return backend, sequences, out


@pytest.mark.thin(3)
@pytest.mark.parametrize("layer", [LAYERS[name] for name in ("9-over-3", "window-4", "cap", "cap-window-4")])
@pytest.mark.parametrize(
    "second", [[2, 17, 33, 1], [40, 1, 16, 8], [1, 16, 31, 5]], ids=["other pages", "back and forth", "the same pages"]
)
def test_planned_for_capture_a_replay_sees_the_new_lengths(
    case: BackendCase, layer: RadixAttention, second: list[int]
) -> None:
    decode_twice(case, layer, [1, 16, 32, 5], second)


@pytest.mark.parametrize("case", [BACKENDS["flashinfer-in-torch"]], indirect=True)
def test_a_plan_that_fails_is_made_anew_for_the_same_pass(case: BackendCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had written is of no pass."""
    sequences, backend = make_sequences(case, [9, 17], LAYERS["9-over-3"]), backend_of(case)
    assert isinstance(backend, FlashInferAttnBackend)
    ranges = {0: (0, 9), 1: (0, 17)}
    batch, rows = sequences.batch(ranges), sequences.rows(ranges)
    backend.init_forward_metadata(batch)
    first = backend.forward(*rows, sequences.layer, batch)
    (planned,) = backend._plans.values()

    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError("half a plan")

    backend.init_forward_metadata(batch)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"^half a plan$"):
        patch.setattr(planned.wrapper, "plan", fails)
        backend.forward(*rows, sequences.layer, batch)
    assert torch.equal(backend.forward(*rows, sequences.layer, batch), first) and planned.wrapper.plans == 2


@pytest.mark.parametrize(
    ("heads", "expected"),
    [((32, 8, 128), 69_746_688), ((32, 1, 128), 557_973_504), ((9, 3, 64), 26_357_760)],
)
def test_the_workspace_is_as_large_as_flashinfer_asks_for(heads: tuple[int, int, int], expected: int) -> None:
    """By its scheduler.cuh, on a device of 132 multiprocessors."""
    kind = flashinfer_plans.LayerKind.of(make_layer(*heads), 4096)
    assert flashinfer_plans.partial_bytes(kind, 132) == expected + 16


@pytest.mark.parametrize("case", [BACKENDS["flashinfer-in-torch"]], indirect=True)
def test_a_workspace_that_is_too_small_grows_and_earlier_plans_keep_theirs(case: BackendCase) -> None:
    backend, ranges = backend_of(case), {0: (0, 17)}
    assert isinstance(backend, FlashInferAttnBackend)
    backend._num_sms = 4
    for layer in (make_layer(2, 2, 64), make_layer(34, 2, 64)):
        sequences = make_sequences(case, [17], layer)
        sequences.fill({0: 0})
        check_against_reference(backend, sequences, ranges)
    small, large = (planned.wrapper._workspace for planned in backend._plans.values())
    assert len(small) < len(large) and large is backend._workspace


def test_captured_torch_passes_refuse_lengths_past_what_they_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    case, layer = BACKENDS["torch"], LAYERS["4-over-4"]
    monkeypatch.setattr(torch_backend, "STATIC_KV_BYTES", 2 * 2 * 4 * 16 * 4 * 20)  # 2 rows of 20 tokens
    backend, sequences, _ = decode_twice(case, layer, [1, 16], [2, 20])
    assert backend.can_replay(sequences.batch({0: (1, 2), 1: (19, 20)}), 2)
    longer = make_sequences(case, [3, 21], layer)
    assert not backend.can_replay(longer.batch({0: (1, 2), 1: (20, 21)}), 2)


# What a plan's first layer has worked out serves those behind it.

flashinfer_alone = pytest.mark.parametrize(
    "case",
    [BACKENDS["flashinfer-in-torch"], pytest.param(BACKENDS["flashinfer"], marks=pytest.mark.gpu)],
    ids=["in-torch", "flashinfer"],
    indirect=True,
)


def plan_for_two_layers(
    case: BackendCase, name: str
) -> tuple[FlashInferAttnBackend, Sequences, Callable[..., torch.Tensor]]:
    """A backend, sequences, and what runs layer 0 or 1 of a pass over queries (the sequences' own by default)."""
    sequences, ranges = prepare(case, PASSES[name], LAYERS["9-over-3"])
    for buffers in (sequences.pool.k_buffer, sequences.pool.v_buffer):
        buffers[0].copy_(-buffers[1])
    backend, batch, (own, k, v) = backend_of(case), sequences.batch(ranges), sequences.rows(ranges)
    assert isinstance(backend, FlashInferAttnBackend)
    backend.init_forward_metadata(batch)

    def run(layer_id: int, q: torch.Tensor = own) -> torch.Tensor:
        layer, sign = replace(sequences.layer, layer_id=layer_id), 2 * layer_id - 1
        sequences.pool.set_kv(layer_id, batch.out_cache_loc, sign * k, sign * v)
        return backend.forward(q, k, v, layer, batch, save_kv_cache=False)

    return backend, sequences, run


@flashinfer_alone
@pytest.mark.parametrize("name", ["one-decode", "decode", "prompts", "mixed"])
def test_layers_behind_the_first_of_a_plan_skip_its_wrapper_and_have_its_bits(
    case: BackendCase, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, sequences, run = plan_for_two_layers(case, name)
    first = run(1)
    plans = list(backend._plans.values())
    assert len(plans) == (name in ("prompts", "mixed"))
    for planned in plans:
        monkeypatch.setattr(planned.wrapper, "run", None)
    outs = {0: run(0), 1: run(1)}
    monkeypatch.undo()
    assert torch.equal(outs[1], first) and not torch.equal(outs[0], first)
    q = torch.cat([q[start:stop] for q, (start, stop) in zip(sequences.q, PASSES[name], strict=True)])
    for layer_id, out in outs.items():
        for planned in plans:
            rows = planned.owner.rows
            expected = torch.empty_like(q[rows])
            planned.wrapper.run(q[rows], sequences.pool.paged(layer_id), out=expected)
            assert torch.equal(out[rows], expected.flatten(1))


@flashinfer_alone
@kinds_of_layer
def test_decode_rows_of_a_mixed_pass_have_the_bits_of_a_decode_pass(case: BackendCase, layer: RadixAttention) -> None:
    sequences, ranges = prepare(case, PASSES["mixed"], layer)
    mixed = sequences.run(backend_of(case), ranges, ForwardMode.MIXED)
    sequences, _ = prepare(case, PASSES["mixed"], layer)
    decoded = sequences.run(backend_of(case), {i: ranges[i] for i in (0, 1)}, ForwardMode.DECODE)
    assert all(torch.equal(decoded[i], mixed[i]) for i in decoded)


@flashinfer_alone
def test_queries_that_a_plan_is_not_for_are_still_refused(case: BackendCase) -> None:
    _, sequences, run = plan_for_two_layers(case, "prompts")
    first = run(1)
    q = torch.cat(sequences.q)
    for other in (q[:-1], q.half()):
        with pytest.raises(ValueError):
            run(1, other)
    assert torch.equal(run(1), first)


@flashinfer_alone
def test_a_plan_is_not_run_with_what_the_last_one_worked_out(case: BackendCase) -> None:
    sequences, _ = prepare(case, [(0, 41), (0, 20)], LAYERS["9-over-3"])
    backend = backend_of(case)
    for ranges in (
        {0: (15, 16), 1: (2, 3)},
        {0: (16, 17), 1: (3, 4)},
        {0: (40, 41), 1: (19, 20)},
        {0: (2, 3), 1: (1, 2)},
    ):
        sequences.fill({i: start for i, (start, _) in ranges.items()})
        check_against_reference(backend, sequences, ranges)


class Module:
    """Of a wrapper, with its kernel under the same name, but not as FlashInfer has it."""

    __slots__ = ("paged_run",)

    def __init__(self, paged_run: Callable[..., None]) -> None:
        self.paged_run = paged_run


def around_the_module(self: Any, q: torch.Tensor, paged: Any, out: torch.Tensor) -> None:
    self._paged_run(self._qo_indptr, q, *paged, *self._buffers, out, None)


def over_a_copy(self: Any, q: torch.Tensor, paged: Any, out: torch.Tensor) -> None:
    self._cached_module.paged_run(self._qo_indptr, q.clone(), *paged, *self._buffers, out, None)


@pytest.mark.parametrize("case", [BACKENDS["flashinfer-in-torch"]], indirect=True)
@pytest.mark.parametrize(
    ("of", "name", "other"),
    [
        (helpers_flashinfer, "SimpleNamespace", Module),
        (helpers_flashinfer._Paged, "run", around_the_module),
        (helpers_flashinfer._Paged, "run", over_a_copy),
    ],
)
def test_a_wrapper_that_calls_its_kernel_in_another_way_runs_every_layer(
    case: BackendCase, of: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, run = plan_for_two_layers(case, "mixed")
    expected = [run(i) for i in (1, 0)]
    monkeypatch.setattr(of, name, other)
    _, _, run = plan_for_two_layers(case, "mixed")
    for _ in range(2):
        assert all(torch.equal(run(i), out) for i, out in zip((1, 0), expected, strict=True))


# FlashInfer's own kernels.


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "prefixes", "mixed", "past-the-window"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 64)], ids=str
)
def test_flashinfer_equals_reference_for_each_dtype_and_head_size(
    dtype: torch.dtype, head_dim: int, page_size: int, name: str
) -> None:
    pytest.importorskip("flashinfer")
    layer = make_layer(8, 2, head_dim)
    sequences = Sequences.make([stop for _, stop in PASSES[name]], layer, dtype, page_size, "cuda")
    sequences.fill({i: start for i, (start, _) in enumerate(PASSES[name])})
    check_against_reference(FlashInferAttnBackend("cuda", dtype), sequences, dict(enumerate(PASSES[name])))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "mixed", "past-the-window"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"sliding_window": 20}, {"logit_cap": 1.5}, {"sinks": torch.linspace(-3, 6, 8)},
        {"sinks": torch.zeros(8), "sliding_window": 20},
    ],
    ids=["plain", "window", "cap", "sinks", "sinks-window"],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_flashinfer_equals_reference_for_windows_and_caps_of_large_heads(
    head_dim: int, options: dict[str, Any], page_size: int, name: str
) -> None:
    pytest.importorskip("flashinfer")
    layer = BACKENDS["torch-cuda"].fit(make_layer(8, 2, head_dim, **options))
    sequences = Sequences.make([stop for _, stop in PASSES[name]], layer, torch.bfloat16, page_size, "cuda")
    sequences.fill({i: start for i, (start, _) in enumerate(PASSES[name])})
    check_against_reference(FlashInferAttnBackend("cuda", torch.bfloat16), sequences, dict(enumerate(PASSES[name])))


@pytest.mark.gpu
def test_flashinfer_long_contexts_are_split_and_still_equal_torch() -> None:
    pytest.importorskip("flashinfer")
    layer = make_layer(8, 2, 128)
    lengths = [3000, 1, 700, 4097]
    sequences = Sequences.make(lengths, layer, torch.bfloat16, 16, "cuda")
    for ranges in ({i: (n - 1, n) for i, n in enumerate(lengths)}, {0: (2990, 3000), 2: (0, 700), 3: (1000, 4097)}):
        sequences.fill({i: start for i, (start, _) in ranges.items()})
        outs = sequences.run(FlashInferAttnBackend("cuda", torch.bfloat16), ranges)
        expected = sequences.run(torch_backend.TorchAttnBackend(), ranges)
        for i, out in outs.items():
            close(out, expected[i], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED])
def test_flashinfer_plans_and_runs_without_waiting_for_the_device(mode: ForwardMode) -> None:
    pytest.importorskip("flashinfer")
    name = "decode" if mode.is_decode() else "mixed"
    sequences, ranges = prepare(BACKENDS["flashinfer"], PASSES[name], LAYERS["9-over-3"])
    backend, batch = FlashInferAttnBackend("cuda", torch.bfloat16), sequences.batch(ranges, mode)
    rows = sequences.rows(ranges)
    backend.init_forward_metadata(batch)
    backend.forward(*rows, sequences.layer, batch)  # compiles and loads what is missing
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.init_forward_metadata(batch)
        backend.forward(*rows, sequences.layer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_flashinfer_hands_fresh_kv_passes_to_torch() -> None:
    pytest.importorskip("flashinfer")
    sequences, ranges = prepare(BACKENDS["flashinfer"], [(0, 7), (0, 19)], LAYERS["9-over-3"])
    batch = replace(sequences.batch(ranges, ForwardMode.EXTEND), fresh_kv_only=True, token_to_kv_pool=None)
    backend = FlashInferAttnBackend("cuda", torch.bfloat16)
    backend.init_forward_metadata(batch)
    out = backend.forward(*sequences.rows(ranges), sequences.layer, batch)
    close(out, torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: create_attention_backend("flashinfer", "cpu", torch.bfloat16), ValueError, "needs a CUDA device, not cpu"),
    (lambda: create_attention_backend("flashinfer", "cuda", torch.float32), ValueError, "no float32 kernels"),
    (lambda: create_attention_backend("xformers", "cpu", torch.float32), ValueError, "'auto', 'torch' or 'flashinfer'"),
    (
        lambda: create_attention_backend("flashinfer", "cuda", torch.bfloat16, head_dim=96),
        ValueError,
        r"head_dim=96.*\(64, 128, 256\).*'torch'",
    ),
]


@pytest.mark.parametrize(("make", "error", "match"), ERRORS, ids=[error[2] for error in ERRORS])
def test_backends_that_cannot_serve_are_refused(make: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_flashinfer_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # what an import of a missing package finds
    with pytest.raises(ImportError, match=r'pip install -e "\.\[cuda\]"'):
        create_attention_backend("flashinfer", "cuda", torch.bfloat16)


def test_layers_and_pools_that_flashinfer_lacks_kernels_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "import_flashinfer", lambda: helpers_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)
    backend = FlashInferAttnBackend("cpu", torch.bfloat16)
    for layer, dtype, match in (
        (make_layer(4, 2, 48), torch.bfloat16, r"head_dim=48.*attention_backend='torch'"),
        (make_layer(4, 2, 64), torch.float16, r"kv_cache_dtype=torch.float16.*kv_cache_dtype='auto'"),
    ):
        sequences = Sequences.make([5], layer, dtype)
        with pytest.raises(ValueError, match=match):
            sequences.run(backend, {0: (0, 5)})


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "head_dim", "expected"),
    [
        (True, "cuda", torch.bfloat16, 128, FlashInferAttnBackend),
        (True, "cuda", torch.float16, None, FlashInferAttnBackend),
        (True, "cuda", torch.float32, 128, torch_backend.TorchAttnBackend),
        (True, "cuda", torch.bfloat16, 24, torch_backend.TorchAttnBackend),
        (True, "cpu", torch.bfloat16, 128, torch_backend.TorchAttnBackend),
        (False, "cuda", torch.bfloat16, 128, torch_backend.TorchAttnBackend),
    ],
)
def test_auto_is_flashinfer_where_it_can_serve(
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    device: str,
    dtype: torch.dtype,
    head_dim: int | None,
    expected: type,
) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(FlashInferAttnBackend, "__init__", lambda self, device, dtype: None)
    assert type(create_attention_backend("auto", device, dtype, head_dim)) is expected


def test_kernels_that_cannot_be_compiled_are_an_error_that_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "import_flashinfer", lambda: helpers_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)
    backend, layer = FlashInferAttnBackend("cpu", torch.bfloat16), make_layer(4, 2, 64)
    plan = helpers_flashinfer._Paged._plan

    def no_compiler(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("No such file or directory: 'ninja'")

    monkeypatch.setattr(helpers_flashinfer._Paged, "_plan", no_compiler)
    with pytest.raises(RuntimeError, match=r"4 heads over 2 of size 64.*'ninja'.*attention_backend='torch'"):
        Sequences.make([5], layer, torch.bfloat16).run(backend, {0: (0, 5)})
    monkeypatch.setattr(helpers_flashinfer._Paged, "_plan", plan)
    Sequences.make([5], layer, torch.bfloat16).run(backend, {0: (0, 5)})
