"""The conformance suite of attention backends: every one agrees with a float64 loop over heads and queries.

A backend that is added to `BACKENDS` takes all of it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from helpers_attention import Sequences, make_layer, reference_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from pymllm_interp.attention import (
    AttentionBackend,
    RadixAttention,
    create_attention_backend,
    torch_backend,
    torch_plan,
)
from pymllm_interp.core.forward_batch import ForwardMode
from pymllm_interp.mem_cache import KVPool

Ranges = dict[int, tuple[int, int]]


class BackendCase(NamedTuple):
    name: str
    device: str
    limits: dict[str, int]  # of the torch backend: small ones make short requests take the paths of long ones


BACKENDS = {
    "torch": BackendCase("torch", "cpu", {}),
    "torch-unfused": BackendCase("torch", "cpu", {"FUSED_SCORES": 0}),
    "torch-long": BackendCase("torch", "cpu", {"MAX_SCORE_BYTES": 1 << 12, "FUSED_SCORES": 0, "SMALL_PAIRS": 64}),
    "torch-cuda": BackendCase("torch", "cuda", {}),
}


@pytest.fixture(
    params=[
        pytest.param(case, id=name, marks=[pytest.mark.gpu] if case.device == "cuda" else [])
        for name, case in BACKENDS.items()
    ]
)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BackendCase:
    if request.param.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for name, value in request.param.limits.items():
        monkeypatch.setattr(torch_backend if name == "FUSED_SCORES" else torch_plan, name, value)
    return request.param


def backend_of(case: BackendCase, dtype: torch.dtype = torch.float32) -> AttentionBackend:
    return create_attention_backend(case.name, case.device, dtype)


LAYERS = {
    "9-over-3": make_layer(9, 3, 64),
    "4-over-1": make_layer(4, 1, 16),
    "4-over-4": make_layer(4, 4, 16),
    "window-1": make_layer(4, 2, 16, sliding_window=1),
    "window-4": make_layer(9, 3, 16, sliding_window=4),
    "window-100": make_layer(4, 2, 16, sliding_window=100),
    "cap": make_layer(9, 3, 16, logit_cap=1.5),
    "cap-window-4": make_layer(4, 1, 16, logit_cap=1.5, sliding_window=4),
}
kinds_of_layer = pytest.mark.parametrize("layer", [LAYERS[name] for name in ("9-over-3", "window-4", "cap")])
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
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def prepare(
    ranges: list[tuple[int, int]], layer: RadixAttention, dtype: torch.dtype = torch.float32, **options: int | str
) -> tuple[Sequences, Ranges]:
    """Sequences that reach to the ranges' ends, their prefixes in the pool."""
    sequences = Sequences.make([stop for _, stop in ranges], layer, dtype, **options)  # pyright: ignore[reportArgumentType]
    sequences.fill({i: start for i, (start, _) in enumerate(ranges)})
    return sequences, dict(enumerate(ranges))


def check_against_reference(backend: AttentionBackend, sequences: Sequences, ranges: Ranges) -> None:
    for i, out in sequences.run(backend, ranges).items():
        assert out.dtype == sequences.q[i].dtype
        close(out, sequences.expected(i, *ranges[i]), out.dtype)


@pytest.mark.parametrize("ranges", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_pass_equals_reference(case: BackendCase, layer: RadixAttention, ranges: list[tuple[int, int]]) -> None:
    sequences, passed = prepare(ranges, layer, device=case.device)
    check_against_reference(backend_of(case), sequences, passed)


@pytest.mark.parametrize("ranges", PASSES.values(), ids=PASSES)
def test_bfloat16_pass_equals_reference(case: BackendCase, ranges: list[tuple[int, int]]) -> None:
    sequences, passed = prepare(ranges, LAYERS["9-over-3"], torch.bfloat16, device=case.device)
    check_against_reference(backend_of(case, torch.bfloat16), sequences, passed)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_where_the_pages_lie_changes_no_bit(case: BackendCase, name: str, page_size: int) -> None:
    sequences, ranges = prepare(PASSES[name], LAYERS["9-over-3"], device=case.device)
    expected = sequences.run(backend_of(case), ranges)
    other = Sequences.make(sequences.lengths, sequences.layer, page_size=page_size, device=case.device, seed=1)
    assert other.slots != sequences.slots
    other.q, other.k, other.v = sequences.q, sequences.k, sequences.v
    other.fill({i: start for i, (start, _) in ranges.items()})
    for i, out in other.run(backend_of(case), ranges).items():
        assert torch.equal(out, expected[i])


@kinds_of_layer
@pytest.mark.parametrize("cuts", [[20], [1, 2, 3], [16, 17, 33], [5, 40]])
def test_chunked_equals_unchunked(case: BackendCase, layer: RadixAttention, cuts: list[int]) -> None:
    sequences = Sequences.make([41, 9], layer, device=case.device)
    whole = sequences.run(backend_of(case), {0: (0, 41)})[0]
    sequences = Sequences.make([41, 9], layer, device=case.device)
    edges = [0, *cuts, 41]
    chunks = [sequences.run(backend_of(case), {0: span})[0] for span in itertools.pairwise(edges)]
    close(torch.cat(chunks), whole, whole.dtype)


@kinds_of_layer
def test_mixed_equals_separate_passes(case: BackendCase, layer: RadixAttention) -> None:
    sequences, ranges = prepare(PASSES["mixed"], layer, device=case.device)
    mixed = sequences.run(backend_of(case), ranges, ForwardMode.MIXED)
    for i, span in ranges.items():
        separate, _ = prepare(PASSES["mixed"], layer, device=case.device)
        close(separate.run(backend_of(case), {i: span})[i], mixed[i], torch.float32)


@pytest.mark.parametrize("name", ["decode", "prompts", "prefixes", "mixed"])
@kinds_of_layer
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_requests_change_no_bit_of_the_others(
    case: BackendCase, layer: RadixAttention, name: str, poison: float
) -> None:
    sequences, ranges = prepare(PASSES[name], layer, device=case.device)
    clean = sequences.run(backend_of(case), ranges)
    for victims in ([0], [1, 4], [i for i in ranges if i != 2]):
        sequences, _ = prepare(PASSES[name], layer, device=case.device)
        for i in victims:
            for x in (sequences.q, sequences.k, sequences.v):
                x[i] = torch.full_like(x[i], poison)
        sequences.fill({i: ranges[i][0] for i in victims})
        poisoned = sequences.run(backend_of(case), ranges)
        for i in ranges:
            if i in victims:
                assert poisoned[i].isnan().any()
            else:
                assert torch.equal(poisoned[i], clean[i])


@pytest.mark.parametrize("name", ["decode", "prefixes", "mixed"])
def test_pass_writes_its_slots_and_no_others(case: BackendCase, name: str) -> None:
    sequences, ranges = prepare(PASSES[name], LAYERS["9-over-3"], device=case.device)
    sequences.run(backend_of(case), ranges)
    for buffers, rows in ((sequences.pool.k_buffer, sequences.k), (sequences.pool.v_buffer, sequences.v)):
        expected = torch.full_like(buffers[1], float("nan"))
        expected[:16] = 0
        for slots, row in zip(sequences.slots, rows, strict=True):
            expected[slots] = row
        assert torch.equal(buffers[1].nan_to_num(9.0), expected.nan_to_num(9.0))
        assert buffers[0][16:].isnan().all()


def test_padded_decode_rows_change_nobody(case: BackendCase) -> None:
    sequences, ranges = prepare(PASSES["decode"], LAYERS["9-over-3"], device=case.device)
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
    sequences, ranges = prepare(PASSES["mixed"], LAYERS["9-over-3"], device=case.device)
    sequences.fill({i: stop for i, (_, stop) in ranges.items()})
    backend, batch = backend_of(case), sequences.batch(ranges)
    q, k, v = sequences.rows(ranges)
    backend.init_forward_metadata(batch)
    out = backend.forward(
        q, torch.full_like(k, 9.0), torch.full_like(v, 9.0), sequences.layer, batch, save_kv_cache=False
    )
    close(out, torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)


def test_layers_of_one_pass_have_their_own_windows_and_kv(case: BackendCase) -> None:
    sequences, ranges = prepare(PASSES["mixed"], LAYERS["9-over-3"], device=case.device)
    backend, batch = backend_of(case), sequences.batch(ranges)
    backend.init_forward_metadata(batch)
    for options in ({}, {"sliding_window": 4}, {"logit_cap": 1.5}, {"sliding_window": 9}, {}):
        sequences.layer = replace(LAYERS["9-over-3"], **options)  # pyright: ignore[reportArgumentType]
        out = backend.forward(*sequences.rows(ranges), sequences.layer, batch)
        close(out, torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)


@pytest.mark.parametrize("name", ["one-decode", "decode", "prompt", "mixed"])
def test_outputs_are_fresh_memory(case: BackendCase, name: str) -> None:
    sequences, ranges = prepare(PASSES[name], LAYERS["9-over-3"], device=case.device)
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
    sequences, ranges = prepare(PASSES["mixed"], LAYERS["9-over-3"], device=case.device)
    rows = sequences.rows(ranges)
    backend, batch = backend_of(case), sequences.batch(ranges)
    backend.init_forward_metadata(batch)
    sliced = torch.cat(rows, 1).split([9, 3, 3], 1)
    assert not sliced[0].is_contiguous()
    expected = backend.forward(*rows, sequences.layer, batch)
    assert torch.equal(backend.forward(sliced[0], sliced[1], sliced[2], sequences.layer, batch), expected)


def test_kv_is_rounded_to_the_pools_dtype(case: BackendCase) -> None:
    if case.name != "torch":
        pytest.skip("kernels have one dtype")
    layer = LAYERS["9-over-3"]
    sequences, ranges = prepare([(0, 20), (0, 5)], layer, device=case.device)
    sequences.pool = KVPool(2, sequences.pool.size, 3, 64, torch.bfloat16, case.device, 16)
    outs = sequences.run(backend_of(case), ranges)
    for i, out in outs.items():
        k, v = (x[i].bfloat16().float() for x in (sequences.k, sequences.v))
        close(out, reference_attention(sequences.q[i], k, v, layer), torch.float32)


def test_pass_without_tokens_gives_no_rows(case: BackendCase) -> None:
    sequences, _ = prepare([(0, 3)], LAYERS["9-over-3"], device=case.device)
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
    sequences, ranges = prepare([(0, 5), (3, 9)], LAYERS["9-over-3"])
    with pytest.raises(ValueError, match=r"request 1 .* 3 tokens in the KV pool"):
        torch_only.init_forward_metadata(replace(sequences.batch(ranges), fresh_kv_only=True))


def test_lengths_that_contradict_each_other_are_refused(torch_only: AttentionBackend) -> None:
    sequences, ranges = prepare([(0, 5), (0, 9)], LAYERS["9-over-3"])
    batch = replace(sequences.batch(ranges), seq_lens_cpu=torch.tensor([5, 8], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"request 1 .* seq_len 8, but 9 new tokens"):
        torch_only.init_forward_metadata(batch)


def test_lengths_may_be_on_the_device_only(torch_only: AttentionBackend) -> None:
    sequences, ranges = prepare(PASSES["mixed"], LAYERS["9-over-3"])
    batch = replace(sequences.batch(ranges), seq_lens_cpu=None)
    torch_only.init_forward_metadata(batch)
    out = torch_only.forward(*sequences.rows(ranges), sequences.layer, batch)
    close(out, torch.cat([sequences.expected(i, *span) for i, span in ranges.items()]), out.dtype)


# The torch backend's plan.


def plan_of(spans: list[tuple[int, int]], layer: RadixAttention) -> torch_plan.AttnPlan:
    sequences = Sequences.make([stop for _, stop in spans], layer)
    batch = sequences.batch(dict(enumerate(spans)))
    return torch_plan.build_plan(torch_plan.make_segments(batch), layer, batch, torch.float32)


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


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: create_attention_backend("flashinfer", "cpu", torch.bfloat16), ValueError, "needs a CUDA device, not cpu"),
    (lambda: create_attention_backend("flashinfer", "cuda", torch.float32), ValueError, "no float32 kernels"),
    (lambda: create_attention_backend("xformers", "cpu", torch.float32), ValueError, "'auto', 'torch' or 'flashinfer'"),
    (
        lambda: create_attention_backend("flashinfer", "cuda", torch.bfloat16),
        NotImplementedError,
        r"pymllm-interp\[cuda\]",
    ),
]


@pytest.mark.parametrize(("make", "error", "match"), ERRORS, ids=[error[2] for error in ERRORS])
def test_backends_that_cannot_serve_are_refused(make: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_auto_is_torch_on_the_cpu() -> None:
    backend = create_attention_backend("auto", "cpu", torch.float32)
    assert isinstance(backend, torch_backend.TorchAttnBackend)
    with pytest.raises(NotImplementedError, match="TorchAttnBackend cannot be captured"):
        backend.init_cuda_graph_state(8)
