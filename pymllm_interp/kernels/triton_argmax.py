# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
"""Each row's largest logit in two launches: torch's own reduction takes several times as long over a whole vocabulary.

A logit and its place make one whole number, ``order(logit) << 32 | (2**32 - 1 - place)``. Its maximum is the largest logit, and the
first of equal ones, in whatever order it is taken. A NaN counts as largest, as it does in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
PROGRAMS = 512
"""Programs that keep a GPU busy: rows are split until there are as many."""
MAX_SPLITS = 64
"""A power of two."""


@triton.jit(do_not_specialize=["splits"])  # one compiled kernel for all numbers of rows
def _partial(scores, keys, stride, vocab, splits, BLOCK: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lowest: tl.constexpr = -0x80000000
    best, where = tl.full([BLOCK], lowest, dtype=tl.int32), tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(split * BLOCK, vocab, splits * BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(scores + row * stride + place, mask=place < vocab, other=0.0).to(tl.float32)
        bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = tl.where(value != value, 0x7FFFFFFF, order)
        larger = (order > best) & (place < vocab)
        best, where = tl.where(larger, order, best), tl.where(larger, place, where)
    # Places without a score stay lowest, below the key of -inf.
    key = (best.to(tl.int64) << 32) | (0xFFFFFFFF - where.to(tl.int64))
    tl.store(keys + row * splits + split, tl.max(key, axis=0))


@triton.jit(do_not_specialize=["splits"])
def _final(keys, out, splits, BLOCK: tl.constexpr):
    row, split = tl.program_id(0), tl.arange(0, BLOCK)
    key = tl.load(keys + row * splits + split, mask=split < splits, other=-0x8000000000000000)
    place = 0xFFFFFFFF - (tl.max(key, axis=0) & 0xFFFFFFFF)
    tl.store(out + row, place.to(tl.int32))


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """scores [rows, vocab], any float dtype, last dim contiguous -> [rows] int32."""
    rows, vocab = scores.shape
    out = torch.empty(rows, dtype=torch.int32, device=scores.device)
    if rows:
        splits = max(1, min(PROGRAMS // rows, MAX_SPLITS, triton.cdiv(vocab, BLOCK)))
        keys = torch.empty(rows, splits, dtype=torch.int64, device=scores.device)
        _partial[(rows, splits)](scores, keys, scores.stride(0), vocab, splits, BLOCK, num_warps=8)
        _final[(rows,)](keys, out, splits, MAX_SPLITS)
    return out
