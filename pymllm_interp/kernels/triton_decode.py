# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Decode attention over paged KV in one kernel (flash-decoding, Dao et al., 2023).

A program computes the query heads of one KV head over a part of one request's positions. The last program of a request and KV
head combines the parts. The kernel reads lengths and the request table on the device. So it needs no plan, and a captured one
serves all lengths. `decode_kernel.decode_attention_torch` is the same in plain torch.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from .launch import Launcher, grid_wait, launch_dependents

MAX_SPLITS, PROGRAMS_PER_SM = 48, 4
WARPS, STAGES = 4, 2
MERGED_VALUES = 8192
"""Values of parts that are combined at once."""


@triton.jit(do_not_specialize=["width", "q_stride", "splits", "min_chunk", "scale", "cap", "v_scale"])
def _kernel(
    q, k_cache, v_cache, rows, seq_lens, req_to_token, out, parts, counters, sinks,
    width, q_stride, splits, min_chunk, scale, cap, v_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr, HEAD_TILE: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    request, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + request)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    # Parts of whole blocks, as equal as can be, but not shorter than min_chunk.
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length - first, splits), BLOCK) * BLOCK, min_chunk)
    num_parts = tl.cdiv(length - first, chunk)
    start = first + part * chunk
    stop = tl.minimum(start + chunk, length)
    table = req_to_token + tl.load(rows + request) * width
    if start >= length:
        return
    grid_wait(PDL)
    group, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    queries: tl.constexpr = HEADS // KV_HEADS
    head = kv_head * queries + group
    inside = group < queries
    q_tile = tl.load(
        q + request.to(tl.int64) * q_stride + head[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0
    )
    if k_cache.dtype.element_ty == tl.float8e4nv:  # one instruction makes it float16, without a rounding
        q_tile = q_tile.to(tl.float16)
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    value = tl.zeros((GROUP, DIM), tl.float32)
    if SINKS:  # a sink is a key with a value of zeros, in the first part
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        best, total = tl.where(part == 0, sink, best), tl.where(part == 0, 1.0, total)
    offset = kv_head * DIM + dim
    for at in tl.range(start, stop, BLOCK, num_stages=LOADS):
        position = at + tl.arange(0, BLOCK)
        known = position < stop
        slot = tl.load(table + position, mask=known, other=0).to(tl.int64)
        where = slot[:, None] * (KV_HEADS * DIM) + offset[None, :]
        k = tl.load(k_cache + where, mask=known[:, None], other=0.0).to(q_tile.dtype)
        v = tl.load(v_cache + where, mask=known[:, None], other=0.0).to(q_tile.dtype)
        scores = tl.dot(q_tile, tl.trans(k)) * scale
        if CAPPED:  # the hyperbolic tangent, by exponentials
            scores = cap * (2.0 / (1.0 + tl.exp2(scores * (-2.8853900817779268 / cap))) - 1.0)
        scores = tl.where(known[None, :], scores * 1.4426950408889634, float("-inf"))  # to base 2
        peak = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - peak[:, None])
        fade = tl.exp2(best - peak)
        total = total * fade + tl.sum(weights, 1)
        value = value * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        best = peak
    if num_parts == 1:
        where_out = out + (request.to(tl.int64) * HEADS + head[:, None]) * DIM + dim[None, :]
        tl.store(where_out, (value / total[:, None] * v_scale).to(out.dtype.element_ty), mask=inside[:, None])
        return
    # [requests, heads, splits, dim + 1]: normalised values, then the logarithm of their weight.
    mine = parts + ((request.to(tl.int64) * HEADS + head) * splits + part) * (DIM + 1)
    tl.store(mine[:, None] + dim[None, :], value / total[:, None], mask=inside[:, None])
    tl.store(mine + DIM, best + tl.log2(total), mask=inside)
    tl.debug_barrier()  # all threads have stored before one counts
    counter = counters + request * KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") != num_parts - 1:
        return
    tl.store(counter, 0)
    # Several parts at once: each load takes a round trip to the L2 cache.
    some, few = tl.arange(0, PARTS), tl.arange(0, HEAD_TILE)
    head = kv_head * queries + few
    inside = few < queries
    base = (request.to(tl.int64) * HEADS + head) * splits
    best = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    value = tl.zeros((HEAD_TILE, DIM), tl.float32)
    for at in range(0, num_parts, PARTS):
        there = (at + some < num_parts)[:, None] & inside[None, :]
        theirs = parts + (base[None, :] + (at + some)[:, None]) * (DIM + 1)
        weight = tl.load(theirs + DIM, mask=there, other=float("-inf"), cache_modifier=".cg")
        weight = tl.where(inside[None, :], weight, 0.0)
        states = tl.load(
            theirs[:, :, None] + dim[None, None, :], mask=there[:, :, None], other=0.0, cache_modifier=".cg"
        )
        peak = tl.maximum(best, tl.max(weight, 0))
        fade, own = tl.exp2(best - peak), tl.exp2(weight - peak[None, :])
        total = total * fade + tl.sum(own, 0)
        value = value * fade[:, None] + tl.sum(states * own[:, :, None], 0)
        best = peak
    where_out = out + (request.to(tl.int64) * HEADS + head[:, None]) * DIM + dim[None, :]
    tl.store(where_out, (value / total[:, None] * v_scale).to(out.dtype.element_ty), mask=inside[:, None])


_launch = cache(lambda stages: Launcher(_kernel, pdl=True, num_stages=stages))


def num_splits(requests: int, kv_heads: int, num_sms: int) -> int:
    """Parts that a request's positions are divided into at most: enough programs for the device, to `MAX_SPLITS`."""
    return max(1, min(MAX_SPLITS, round(PROGRAMS_PER_SM * num_sms / (requests * kv_heads))))


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    counters: torch.Tensor,
    num_sms: int,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Compute the attention of decode rows (`decode_kernel.DecodeAttention`).

    Args:
        parts: float32, `parts_size` elements or more.
        counters: int32, an element or more for each request and KV head: zeros, and zeros again afterwards.
        num_sms: multiprocessors of the device.
        window: positions that a query attends to; 0: all.
        cap: soft cap of the scores; 0.0: none.
        sinks: [heads], see `RadixAttention`; None: none.
        kv_scales: dequantization scales of the caches.
    """
    requests, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    splits = num_splits(requests, kv_heads, num_sms)
    head_tile = triton.next_power_of_2(heads // kv_heads)
    merged = max(1, MERGED_VALUES // (head_tile * dim))
    # Few programs: short parts keep the device busy. Many: combining parts costs more than it gains.
    small = (
        k_cache.dtype.itemsize == 1
    )  # the fastest of nine for FP8 on an H100: 2.49 TB/s of K and V; 2.03 with blocks of 128
    block, loads = (64, 3) if small else (128 if dim == 128 else 64, STAGES)
    min_chunk = 512 if requests * kv_heads >= num_sms else block
    group = max(16, head_tile)  # rows of a matrix product, at least
    _launch(loads)(
        (requests, kv_heads, splits),
        (q, k_cache, v_cache, rows, seq_lens, req_to_token, out, parts, counters, q if sinks is None else sinks),
        (req_to_token.shape[1], q.stride(0), splits, min_chunk, scale * kv_scales[0], cap, kv_scales[1]),
        (heads, kv_heads, dim, group, window, cap > 0, sinks is not None, block, loads, head_tile, merged),
        WARPS,
    )
