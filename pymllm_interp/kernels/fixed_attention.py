# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Attention over paged KV with one partition of the keys for all passes: for batch-invariant mode.

A tile has the query heads of one KV head for consecutive rows of a request. A decode row is a tile with one row; such tiles are
small where that gives the same bits. Keys are divided at multiples of `SPAN`. Each part has its own softmax. Parts are merged in
order, by the program with all parts of a tile, or by the last that ends. Hidden keys add zeros. So a row's bits depend on
its own keys only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from .launch import Launcher, grid_wait, launch_dependents, shared_memory

TILE, FEW = 64, 16
"""Rows of a matrix product, heads times tokens, in prompts and of a decode row. Tensor core instructions have such sizes."""
SCRATCH = 16 << 10
"""Bytes of shared memory for Triton's own use."""
MANY = 4
"""Programs for each multiprocessor, above which a decode row's is small. With fewer programs four warps are faster than one."""
BLOCK = 64
"""Keys of a step."""
SPAN = 1024
"""Keys of a part."""
PROGRAMS_PER_SM, MAX_PARTS = 4, 48
"""Programs wanted, and most programs for a tile."""


@triton.jit
def _join(best, total, value, part_best, part_total, part_value):
    """Two softmaxes as one: maxima and sums [rows], and values [rows, dim] before the division by the sum."""
    peak = tl.maximum(best, part_best)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    fade, own = tl.exp2(best - base), tl.exp2(part_best - base)
    return peak, total * fade + part_total * own, value * fade[:, None] + part_value * own[:, None]


@triton.jit
def _scores(q, k, position, length, scale, cap, CAPPED: tl.constexpr, WINDOW: tl.constexpr):
    """Scores [rows, keys] to base 2; minus infinity at keys that a row does not see."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:  # the hyperbolic tangent, by exponentials
        scores = cap * (2.0 / (1.0 + tl.exp2(scores * (-2.8853900817779268 / cap))) - 1.0)
    seen = position[None, :] < length[:, None]
    if WINDOW > 0:
        seen = seen & (position[None, :] >= length[:, None] - WINDOW)
    return tl.where(seen, scores * 1.4426950408889634, float("-inf"))


@triton.jit
def _absorb(best, total, value, scores, v):
    """The softmax of a part with more keys."""
    peak = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights, fade = tl.exp2(scores - base[:, None]), tl.exp2(best - base)
    added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return peak, total * fade + tl.sum(weights, 1), value * fade[:, None] + added


@triton.jit
def _keep(at, dim, real, DIM: tl.constexpr, best, total, value):
    """Store a part's softmax at `at` [rows]: values [DIM], maximum, sum."""
    tl.store(at[:, None] + dim[None, :], value, mask=real[:, None] & (dim[None, :] < DIM))
    tl.store(at + DIM, best, mask=real)
    tl.store(at + DIM + 1, total, mask=real)


@triton.jit
def _joined(place, first_part, stop_part, dim, real, DIM: tl.constexpr, best, total, value):
    """A softmax with those that `_keep` stored, in their order."""
    known = real[:, None] & (dim[None, :] < DIM)
    for part in range(first_part, stop_part):
        at = place + part * (DIM + 2)
        part_value = tl.load(at[:, None] + dim[None, :], mask=known, other=0.0, cache_modifier=".cg")
        part_best = tl.load(at + DIM, mask=real, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(at + DIM + 1, mask=real, other=0.0, cache_modifier=".cg")
        best, total, value = _join(best, total, value, part_best, part_total, part_value)
    return best, total, value


@triton.jit(do_not_specialize=["width", "q_stride", "scale", "cap", "v_scale", "parts"])
def _attend(
    q, k_cache, v_cache, firsts, counts, owners, lens, table, out, kept, ended, sinks, width, q_stride, scale, cap, v_scale, parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, ONE: tl.constexpr, SPLIT: tl.constexpr, DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first, count = tile, 1
    if not ONE:
        first, count = tl.load(firsts + tile), tl.load(counts + tile)
    entry, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    token, member = entry // GROUP, entry % GROUP
    queries: tl.constexpr = HEADS // KV_HEADS
    head = kv_head * queries + member
    real = (token < count) & (member < queries)
    row = (first + tl.where(token < count, token, 0)).to(tl.int64)
    length = tl.load(lens + row)  # keys up to the row's own
    at = table + tl.load(owners + first).to(tl.int64) * width
    known_dim = dim[None, :] < DIM
    q_tile = tl.load(
        q + row[:, None] * q_stride + head[:, None] * DIM + dim[None, :], mask=real[:, None] & known_dim, other=0.0
    )
    if k_cache.dtype.element_ty == tl.float8e4nv:
        q_tile = q_tile.to(tl.float16)
    longest = tl.max(length)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(tl.min(length) - WINDOW, 0)
    best, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    value = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    if SINKS:
        best = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    offset = kv_head * DIM + dim
    first_part, stop_part = begin // PART, tl.cdiv(longest, PART)
    programs = tl.maximum(tl.minimum(stop_part - first_part, parts), 1)
    if tl.program_id(2) >= programs:  # without parts; the first program always takes part
        return
    place = kept + (row * HEADS + head) * tl.cdiv(width, PART) * (DIM + 2)  # [rows, heads, parts of the row, dim + 2]
    first_best, first_total = best, total
    for part in range(first_part + tl.program_id(2), stop_part, parts):
        part_best = tl.full((ROWS,), float("-inf"), tl.float32)
        part_total = tl.zeros((ROWS,), tl.float32)
        part_value = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
        stop = tl.minimum(part * PART + PART, longest)
        start = part * PART
        if WINDOW > 0:
            start = tl.maximum(start, begin // KEYS * KEYS)
        for at_key in range(start, stop, KEYS):
            position = at_key + tl.arange(0, KEYS)
            there = position < longest
            slot = tl.load(at + position, mask=there, other=0).to(tl.int64)
            where = slot[:, None] * (KV_HEADS * DIM) + offset[None, :]
            k = tl.load(k_cache + where, mask=there[:, None] & known_dim, other=0.0).to(q_tile.dtype)
            v = tl.load(v_cache + where, mask=there[:, None] & known_dim, other=0.0).to(q_tile.dtype)
            scores = _scores(q_tile, k, position, length, scale, cap, CAPPED, WINDOW)
            part_best, part_total, part_value = _absorb(part_best, part_total, part_value, scores, v)
        if SPLIT:
            if programs > 1:
                _keep(place + part * (DIM + 2), dim, real, DIM, part_best, part_total, part_value)
        best, total, value = _join(best, total, value, part_best, part_total, part_value)
    last = programs > 0
    if SPLIT:
        if programs > 1:
            tl.debug_barrier()  # all threads have stored before one counts
            counter = ended + tile * KV_HEADS + kv_head
            last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
            if last:
                tl.store(counter, 0)
                value = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
                best, total, value = _joined(
                    place, first_part, stop_part, dim, real, DIM, first_best, first_total, value
                )
    if last:
        target = out + (row[:, None] * HEADS + head[:, None]) * DIM + dim[None, :]
        result = (value / total[:, None] * v_scale).to(out.dtype.element_ty)
        tl.store(target, result, mask=real[:, None] & known_dim)


# Without fused multiply-adds, both places that join parts round alike.
_attend_launch = cache(lambda stages: Launcher(_attend, pdl=True, num_stages=stages, enable_fp_fusion=False))


def tokens_of_tile(heads: int, kv_heads: int) -> int:
    """Most rows of a request in a tile."""
    return max(1, TILE // triton.next_power_of_2(heads // kv_heads))


def num_programs(tiles: int, kv_heads: int, width: int, num_sms: int) -> int:
    """Number of programs for a tile, which share its parts. Bits do not depend on it."""
    wanted = PROGRAMS_PER_SM * num_sms // max(tiles * kv_heads, 1)
    return max(1, min(wanted, MAX_PARTS, triton.cdiv(width, SPAN)))


def attention(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    tiles: tuple[torch.Tensor, torch.Tensor] | None,
    owners: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    num_sms: int,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    window: int | None = None,
    few: int | None = None,
) -> None:
    """Attention of rows over their keys, written to `out`.

    Args:
        q, out: [rows, heads, head_dim].
        kv: the caches, [slots, kv_heads, head_dim] each.
        tiles: (first row, number of rows) of each tile, int32. Its rows are of one request, in order. None: a tile for each row.
        owners: [rows], row of `table` of each row.
        lens: [rows] int32: a row sees the keys before this position.
        table: [requests, width] int32, slots.
        scale: factor of the scores.
        num_sms: multiprocessors of the device.
        cap: soft cap of the scores; None: none.
        sinks: [heads], see `RadixAttention`; None: none.
        kept: memory for parts, of `parts_memory`; None: each tile's parts run in one program.
        kv_scales: dequantization scales of the caches.
        window: keys that a row sees at most; None: all.
        few: rows of the matrix product of a decode row; None: `few_rows`.
    """
    heads, dim = q.shape[1:]
    rows = min(len(q), len(lens))  # behind them is padding
    kv_heads, width = kv[0].shape[1], table.shape[1]
    group = triton.next_power_of_2(heads // kv_heads)
    num_tiles = rows if tiles is None else len(tiles[0])
    if not num_tiles:
        return
    programs = 1 if kept is None else num_programs(num_tiles, kv_heads, width, num_sms)
    matrix_rows = max(TILE, group)
    if tiles is None and group <= FEW and (few or num_tiles * kv_heads * programs > MANY * num_sms):
        kind = heads // kv_heads, dim, q.dtype, kv[0].dtype, bool(cap), sinks is not None
        matrix_rows = few or few_rows(str(q.device), *kind)
    split, dim_block = programs > 1, max(16, triton.next_power_of_2(dim))
    firsts, counts = (lens, lens) if tiles is None else tiles
    memory, ended = (out, lens) if kept is None else kept
    given = q if sinks is None else sinks
    keys = 2 * BLOCK * dim_block * kv[0].element_size()
    free = shared_memory(q.get_device()) - matrix_rows * dim_block * q.element_size() - SCRATCH
    _attend_launch(max(1, min(3, free // keys)))(
        (num_tiles, kv_heads, programs),
        (q, *kv, firsts, counts, owners, lens, table, out, memory, ended, given),
        (width, q.stride(0), scale * kv_scales[0], cap or 0.0, kv_scales[1], programs),
        (heads, kv_heads, dim, group, window or 0, bool(cap), sinks is not None, tiles is None, split, dim_block,
         matrix_rows, BLOCK, SPAN),
        min(matrix_rows, TILE) // 16 * (1 if dim <= 128 else 2),
    )  # fmt: skip


_few: dict[tuple[Any, ...], int] = {}


def few_rows(
    device: str, queries: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, capped: bool, sinks: bool
) -> int:
    """Rows of the matrix product of a decode row: `FEW` where random numbers give the bits of `TILE` rows.

    The first call for a kind of layer compares, and waits for the device. A capture takes a known number, or `TILE`.

    Args:
        queries: query heads of a KV head.
    """
    key = device, queries, dim, dtype, kv_dtype, capped, sinks
    if knobs.runtime.interpret:
        return FEW
    if key not in _few:
        if torch.cuda.is_current_stream_capturing():
            return TILE
        noise = torch.Generator(device).manual_seed(0)
        rows, keys = 256, 301

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=noise, device=device)

        q = numbers(rows, queries, dim).to(dtype)
        kv = numbers(keys, 1, dim).to(kv_dtype), numbers(keys, 1, dim).to(kv_dtype)
        owners = torch.zeros(rows, dtype=torch.int64, device=device)
        lens = torch.arange(rows, device=device, dtype=torch.int32) + (keys + 1 - rows)
        table = torch.arange(keys, device=device, dtype=torch.int32)[None]
        sink = numbers(queries) if sinks else None
        found = []
        for few in (FEW, TILE):
            out = torch.empty_like(q)
            attention(q, kv, None, owners, lens, table, out, dim**-0.5, 1, 30.0 if capped else None, sink, few=few)
            found.append(out)
        _few[key] = FEW if torch.equal(*found) else TILE
    return _few[key]


def parts_memory(
    rows: int, heads: int, kv_heads: int, dim: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of as many rows: parts, float32, and counters of programs that have ended, zeros between calls."""
    size = rows * heads * triton.cdiv(width, SPAN) * (dim + 2)
    parts = torch.empty(size, dtype=torch.float32, device=device)
    return parts, torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
