"""Triton's kernels around a step (inputs, pages, greedy sampling) against plain torch: compiled on CUDA, interpreted elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pymllm_interp.attention import flashinfer_backend
from pymllm_interp.runner import input_batch
from pymllm_interp.runner.input_batch import InputBuffers
from pymllm_interp.runner.request_state import RequestState

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.attention.decode_kernel import MAX_PROGRAMS, decode_attention_torch
from pymllm_interp.kernels import triton_decode
from pymllm_interp.kernels.triton_argmax import argmax
from pymllm_interp.kernels.triton_inputs import lay_out
from pymllm_interp.kernels.triton_pages import fill_kv_indices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 97), (3, 4096), (2, 4097), (7, 9001)])
def test_argmax_is_torchs(rows: int, vocab: int, dtype: torch.dtype) -> None:
    scores = torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(vocab)).to(DEVICE, dtype)[:, :vocab]
    assert torch.equal(argmax(scores), scores.cpu().float().max(-1).indices.to(DEVICE, torch.int32))


def test_argmax_takes_the_first_of_equals_and_counts_a_nan_as_largest() -> None:
    scores = torch.zeros(6, 9000)
    scores[0, 0] = -0.0
    scores[1, 8999], scores[1, 17] = torch.nan, torch.inf
    scores[2] = -torch.inf
    scores[3, 3] = scores[3, 8200] = 5
    scores[4] = -torch.nan
    scores[5] = -1e-40
    scores[5, 8191] = -1e-41
    expected = [0, 8999, 0, 3, 0, 8191]
    assert scores.max(-1).indices.tolist() == expected and argmax(scores.to(DEVICE)).tolist() == expected


@pytest.mark.parametrize(("count", "padded"), [(1, 0), (5, 8), (128, 128), (129, 136), (300, 0)])
def test_inputs_are_laid_out_as_in_plain_torch(count: int, padded: int) -> None:
    draw = np.random.default_rng(count)
    tokens = np.stack([draw.integers(-1, 50, count), draw.integers(0, 40, count), draw.integers(1, 9, count)])
    states = RequestState(8, 40, DEVICE)
    states.last_sampled_tokens = torch.from_numpy(draw.integers(0, 50, 9)).to(DEVICE)
    states.edited = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.int32, device=DEVICE)
    table = torch.from_numpy(draw.integers(1, 999, (9, 40)).astype(np.int32)).to(DEVICE)
    table[0] = 0
    found, expected = InputBuffers(304, DEVICE), InputBuffers(304, DEVICE)
    found._lay_out, expected._lay_out = lay_out, input_batch._lay_out
    for buffers in (found, expected):
        for name in ("input_ids", "positions", "out_cache_loc", "rows", "op_rows", "seq_lens"):
            getattr(buffers, name).fill_(77)
        buffers.lay_out(tokens, states, table, padded)
    for name in ("input_ids", "positions", "out_cache_loc", "rows", "op_rows", "seq_lens"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.rows[count : max(padded, count)].tolist() == [0] * max(padded - count, 0), "padding is the dummy row's"
    assert found.op_rows[count : max(padded, count)].tolist() == [-1] * max(padded - count, 0)
    assert found.out_cache_loc[max(padded, count) :].eq(77).all(), "nothing is written behind the step's rows"


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_are_listed_as_in_plain_torch(page_size: int) -> None:
    draw = np.random.default_rng(page_size)
    pages = np.array([1, 3, 600, 1, 2049])
    table = torch.from_numpy(draw.integers(16, 2**20, (7, 2049 * page_size)).astype(np.int32)).to(DEVICE)
    rows = torch.tensor([4, 2, 6, 0, 1], device=DEVICE)
    indptr = torch.from_numpy(np.concatenate([[0], pages.cumsum()]).astype(np.int32)).to(DEVICE)
    found, expected = (torch.full((int(pages.sum()) + tail,), -1, dtype=torch.int32, device=DEVICE) for tail in (9, 0))
    fill_kv_indices(found, indptr, rows, table, page_size)
    flashinfer_backend._fill_kv_indices(expected, indptr, rows, table, page_size)
    assert torch.equal(found[:-9], expected) and found[-9:].tolist() == [-1] * 9


# Interpreted, a cap with many parts is seen with two shapes of heads; the others have one with few parts.
DECODES = [
    pytest.param(
        *how, *shape, marks=[] if DEVICE == "cuda" or how != (0, 1.5, 132) or shape[0] in (9, 8) else pytest.mark.slow
    )
    for how in ((0, 0.0, 1), (0, 0.0, 132), (33, 0.0, 20), (0, 1.5, 132), (5, 2.0, 1), (5, 2.0, 20))
    for shape in ((9, 3, 64), (4, 4, 64), (8, 2, 128), (34, 2, 64), (3, 1, 256))
]


@pytest.mark.thin(6)
@pytest.mark.parametrize(("window", "cap", "num_sms", "heads", "kv_heads", "dim"), DECODES)
def test_decode_attention_is_that_of_plain_torch(
    heads: int, kv_heads: int, dim: int, window: int, cap: float, num_sms: int
) -> None:
    check_decode_attention(heads, kv_heads, dim, window, cap, num_sms)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 2, 128)], ids=str)
def test_decode_attention_reads_fp8_by_its_scales(heads: int, kv_heads: int, dim: int) -> None:
    check_decode_attention(heads, kv_heads, dim, 33, 1.5, 20, (0.5, 3.0))


def check_decode_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    cap: float,
    num_sms: int,
    scales: tuple[float, float] | None = None,
) -> None:
    """One token, a full page, a page plus one, a full block, a block plus one; few parts and many."""
    lens = [1, 16, 17, 64, 65, 128, 129, 300] if DEVICE == "cuda" else [1, 17, 65, 200]
    requests, width, generator = len(lens), 320, torch.Generator().manual_seed(heads + window)
    slots = torch.randperm(requests * width + 9, generator=generator)[: (requests + 1) * width - width]
    table = torch.zeros(requests + 3, width, dtype=torch.int32)
    rows = torch.randperm(requests + 2, generator=generator)[:requests] + 1
    table[rows] = slots.view(requests, width).int()
    shape = requests * width + 9, kv_heads, dim
    k, v = (torch.randn(shape, generator=generator).half().to(DEVICE) for _ in range(2))
    unused = torch.ones(shape[0], dtype=torch.bool)
    for row, length in zip(rows, lens, strict=True):
        unused[table[row, :length].long()] = False
    k[unused.to(DEVICE)] = v[unused.to(DEVICE)] = float("nan")
    if scales is not None:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    by = {} if scales is None else {"kv_scales": scales}
    q = torch.randn(requests, heads, dim, generator=generator).half().to(DEVICE)
    inputs = q, k, v, rows.to(DEVICE), torch.tensor(lens, dtype=torch.int32, device=DEVICE), table.to(DEVICE)
    expected, found = torch.empty_like(q), torch.full_like(q, float("nan"))
    decode_attention_torch(*inputs, expected, dim**-0.5, window, cap, **by)
    splits = triton_decode.num_splits(requests, kv_heads, num_sms)
    parts = torch.full((requests * heads * splits * (dim + 1),), float("nan"), device=DEVICE)
    counters = torch.zeros(requests * kv_heads, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        triton_decode.decode_attention(*inputs, found, parts, counters, num_sms, dim**-0.5, window, cap, **by)
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3 if scales is None else 1e-2)
        assert not counters.any(), "the next kernel counts from zero"


def test_partial_results_fit_their_memory_for_any_batch() -> None:
    for num_sms in (1, 20, 108, 132):
        for kv_heads in (1, 2, 3, 8, 32):
            for requests in range(1, 600):
                splits = triton_decode.num_splits(requests, kv_heads, num_sms)
                assert splits == 1 or requests * kv_heads * splits <= MAX_PROGRAMS * num_sms
