# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Triton kernels for declared ops and captures, on rows held in registers (edit_rows.py).

They keep flat parameters. `Launcher` passes addresses by position, and the layout of tuples changes with Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core.forward_batch import Delta, ParallelDelta
from ..core.model_spec import delta_site, final_norm_site
from ..core.norm_kind import RMS, Norm
from .edit_codes import OpTables, TokenRows
from .edit_rows import CAPTURE_WORDS, WORDS, _apply_ops, _capture, _first_vector
from .launch import Launcher, grid_wait, launch_dependents
from .triton_norm import load_shift, norm_launch, normalize

MAX_REGISTERS = 128
"""Registers per thread: two programs fit a multiprocessor, so that 256 rows of 4,096 run at once."""


@triton.jit(do_not_specialize=["count", "record_stride", "site"])
def _capture_kernel(
    h, owners, captures, vectors, records, ring, record_stride, count, site,
    SIZE: tl.constexpr, SITES: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Captures of `h` at `site`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < count
    mask = inside & (column < SIZE)
    owner = tl.load(owners + row, mask=inside, other=-1)
    if tl.max(owner) >= 0:
        owned = inside & (owner >= 0)
        first = tl.load(records + row, mask=inside, other=0)
        stop = tl.load(records + record_stride + row, mask=inside, other=0)
        words = captures + (owner * SITES + site) * CAPTURE_WORDS
        offset = tl.load(words, mask=owned, other=-1)
        way = tl.load(words + 1, mask=owned, other=0)
        value = tl.load(h + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
        _capture(value, offset, way, words, first, stop, vectors, ring, column, mask, SIZE, WIDTH, ALIGNED)


_capture_launch = Launcher(_capture_kernel, enable_fp_fusion=False)


@triton.jit
def _apply_site(
    value, rows, site, tables, captured, SIZE: tl.constexpr, SITES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    dtype: tl.constexpr, AFTER: tl.constexpr, CAPTURES: tl.constexpr, ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """`value` [rows, block] float32 after the ops at ``site + AFTER``; with CAPTURES also captured.

    Args:
        rows, tables: see `_apply_ops`.
        captured: (captures, records, record_stride, ring).
    """
    owner, _, row, column, mask, inside = rows
    ops, _, vectors, _, _, _, _, _ = tables
    captures, records, record_stride, ring = captured
    owned = inside & (owner >= 0)
    place = owner * SITES + site + AFTER
    kind = tl.load(ops + place * DEPTH * WORDS, mask=owned, other=0)
    vector = _first_vector(ops + place * DEPTH * WORDS, kind, vectors, column, mask, WIDTH)
    value = _apply_ops(
        value, rows, site + AFTER, kind, vector, tables, SIZE, SITES, DEPTH, WIDTH, HEAD_DIM, COLUMNS, dtype
    )
    if CAPTURES:
        words = captures + place * CAPTURE_WORDS
        offset = tl.load(words, mask=owned, other=-1)
        way = tl.load(words + 1, mask=owned, other=0)
        first = tl.load(records + row, mask=owned, other=0)
        stop = tl.load(records + record_stride + row, mask=owned, other=0)
        _capture(value, offset, way, words, first, stop, vectors, ring, column, mask, SIZE, WIDTH, ALIGNED)
    return value


@triton.jit(do_not_specialize=["count", "record_stride", "score_stride", "site"])
def _edit_kernel(
    h, delta, weight, total, out, owners, positions, ops, fires, vectors, captures, records, ring, flags, first_fired,
    features, seen, scores, record_stride, score_stride, count, eps, site,
    SIZE: tl.constexpr, SITES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, LAST: tl.constexpr,
    PARALLEL: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    COUNTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Ops on `h` at `site`. With NORM: ops and captures of `delta` at `site`, then of ``h + delta`` at the next site, then the
    norm. With LAST also of the norm's output, at the site after that. With PARALLEL, `total` holds the delta of the layer's
    attention, with its site two before `site`. The sum overwrites it. With COUNTS, `seen` counts the rows of each owner at the
    add, and at the norm's output.

    All reads are issued at the start, and the tables are read before the states are there, because latency dominates. The tables
    and the norm's weights stay in the cache. The weights of the projections pass through it once a step.
    """
    launch_dependents(PDL)
    dtype: tl.constexpr = h.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < count
    mask = inside & (column < SIZE)
    source = row * SIZE + column
    owner = tl.load(owners + row, mask=inside, other=-1, eviction_policy="evict_last")
    position = tl.load(positions + row, mask=inside, other=0, eviction_policy="evict_last").to(tl.int32)
    rows = owner, position, row, column, mask, inside
    tables = ops, fires, vectors, flags, first_fired, features, scores, score_stride
    captured = captures, records, record_stride, ring
    if not PDL:
        state = tl.load(h + source, mask=mask, other=0.0)
    if NORM:
        if not PDL:
            value = tl.load(delta + source, mask=mask, other=0.0).to(tl.float32)
        weights = tl.load(weight + column, mask=column < SIZE, other=0.0, eviction_policy="evict_last")
        shift = load_shift(weight, weights, column, SIZE, KIND)
        owned = inside & (owner >= 0)
        place = owner * SITES + site
        word = ops + place * DEPTH * WORDS
        kind = tl.load(word, mask=owned, other=0, eviction_policy="evict_last")
        kind_after = tl.load(word + DEPTH * WORDS, mask=owned, other=0, eviction_policy="evict_last")
        vector = _first_vector(word, kind, vectors, column, mask, WIDTH)
        vector_after = _first_vector(word + DEPTH * WORDS, kind_after, vectors, column, mask, WIDTH)
        capture_words = captures + place * CAPTURE_WORDS
        offset = tl.load(capture_words, mask=owned, other=-1, eviction_policy="evict_last")
        way = tl.load(capture_words + 1, mask=owned, other=0, eviction_policy="evict_last")
        offset_after = tl.load(capture_words + CAPTURE_WORDS, mask=owned, other=-1, eviction_policy="evict_last")
        way_after = tl.load(capture_words + CAPTURE_WORDS + 1, mask=owned, other=0, eviction_policy="evict_last")
        first = tl.load(records + row, mask=owned, other=0, eviction_policy="evict_last")
        stop = tl.load(records + record_stride + row, mask=owned, other=0, eviction_policy="evict_last")
    if PDL:
        grid_wait(PDL)
    if COUNTS:
        # Any other order brings a fence, and empties the first-level cache.
        tl.atomic_add(seen + owner, 1 + LAST, mask=owned, sem="relaxed")
    if PDL:
        state = tl.load(h + source, mask=mask, other=0.0)
        if NORM:
            value = tl.load(delta + source, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        if PARALLEL:
            attention = tl.load(total + source, mask=mask, other=0.0).to(tl.float32)
            if tl.max(owner) >= 0:
                attention = _apply_site(
                    attention, rows, site, tables, captured, SIZE, SITES, DEPTH, WIDTH, dtype, -2, True, ALIGNED, 0, 0
                )
        if tl.max(owner) >= 0:
            for step in range(0, 2):  # delta, then the sum, by the same code
                value = _apply_ops(
                    value, rows, site + step, kind, vector, tables, SIZE, SITES, DEPTH, WIDTH, 0, 0, dtype
                )
                _capture(
                    value, offset, way, capture_words + step * CAPTURE_WORDS, first, stop, vectors, ring, column, mask, SIZE, WIDTH,
                    ALIGNED,
                )  # fmt: skip
                if step == 0:
                    if PARALLEL:
                        value = (value + attention).to(dtype).to(tl.float32)
                    value = (state.to(tl.float32) + value).to(dtype).to(tl.float32)
                kind, vector, offset, way = kind_after, vector_after, offset_after, way_after
        else:
            if PARALLEL:
                value = (value + attention).to(dtype).to(tl.float32)
            value = (state.to(tl.float32) + value).to(dtype).to(tl.float32)
        tl.store(total + source, value.to(dtype), mask=mask)
        value = normalize(value, weights, shift, eps, column, SIZE, KIND, dtype).to(tl.float32)
    else:
        value = state.to(tl.float32)
    if LAST or not NORM:
        if tl.max(owner) >= 0:
            value = _apply_site(
                value, rows, site, tables, captured, SIZE, SITES, DEPTH, WIDTH, dtype, LAST * 2, LAST, ALIGNED, HEAD_DIM,
                COLUMNS,
            )  # fmt: skip
    tl.store(out + source, value.to(dtype), mask=mask)


_edit_launch = Launcher(_edit_kernel, pdl=True, enable_fp_fusion=False, maxnreg=MAX_REGISTERS)


def _launch(
    h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, out: torch.Tensor, eps: float,
    site: int, tables: OpTables, rows: TokenRows, norm: bool, parallel: bool = False, kind: int = RMS,
    features: torch.Tensor | None = None, seen: torch.Tensor | None = None,
) -> None:  # fmt: skip
    size = h.shape[-1]
    count = h.numel() // size
    if count == 0:
        return
    sites, depth = tables.fires.shape[1:3]
    group, block, warps = norm_launch(size)
    tensors = (
        h, delta, weight, total, out, rows.owners, rows.positions, tables.ops, tables.fires, tables.vectors, tables.captures,
        rows.records, tables.ring, rows.flags, tables.first_fired, tables.vectors if features is None else features,
        tables.fires if seen is None else seen, rows.scores,
    )  # fmt: skip
    last = norm and site + 2 == final_norm_site(tables.num_layers)
    constants = (
        size, sites, depth, tables.vectors.shape[1], norm, last, parallel, kind, tables.aligned, tables.head_dim_at(site),
        0 if features is None else features.shape[0], seen is not None, group, block,
    )  # fmt: skip
    strides = rows.records.stride(0), rows.scores.stride(0)
    _edit_launch((-(-count // group), 1, 1), tensors, (*strides, count, eps, site), constants, warps)


def capture(value: torch.Tensor, site: int, tables: OpTables, rows: TokenRows) -> None:
    """Store the rows of `value` [1, tokens, width] in the ring, for the requests that capture `site`."""
    value, size = value.contiguous(), value.shape[-1]
    count = value.numel() // size
    if count == 0:
        return
    group, block, warps = norm_launch(size)
    tensors = (value, rows.owners, tables.captures, tables.vectors, rows.records, tables.ring)
    constants = (size, tables.captures.shape[1], tables.vectors.shape[1], tables.aligned, group, block)
    _capture_launch((-(-count // group), 1, 1), tensors, (rows.records.stride(0), count, site), constants, warps)


def edit(value: torch.Tensor, site: int, tables: OpTables, rows: TokenRows) -> torch.Tensor:
    """`value` [1, tokens, width] after the ops at `site`, in new memory."""
    value = value.contiguous()
    out = torch.empty_like(value)
    features = rows.features if site in tables.encoded else None
    _launch(value, value, value, value, out, 0.0, site, tables, rows, norm=False, features=features)
    return out


def edit_add_norm(
    h: torch.Tensor,
    delta: Delta,
    norm: Norm,
    residual_add: int,
    tables: OpTables,
    rows: TokenRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Norm.add_normalize` with the ops and captures of a residual add; h, delta [1, tokens, width]."""
    h, site, parallel = h.contiguous(), delta_site(residual_add), isinstance(delta, ParallelDelta)
    mlp, total = (delta.mlp, delta.attention) if isinstance(delta, ParallelDelta) else (delta, torch.empty_like(h))
    mlp, out = mlp.contiguous(), torch.empty_like(h)
    _launch(h, mlp, norm.kernel_weight, total, out, norm.eps, site, tables, rows, True, parallel, norm.kind)
    return total, out


def edit_norm_(
    delta: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, eps: float, kind: int, residual_add: int, tables: OpTables,
    rows: TokenRows, seen: torch.Tensor,
) -> None:  # fmt: skip
    """Variant of `edit_add_norm` for a norm of another library, in place: `stream` becomes the sum, and `delta` its norm.

    Args:
        delta, stream: [tokens, width], contiguous.
        weight: [width].
        kind: kind with an add (`core.norm_kind`).
        seen: [table rows] int32, counts the rows of each owner.

    Raises:
        ValueError: rows are not contiguous.
    """
    if not (delta.is_contiguous() and stream.is_contiguous()):
        raise ValueError(f"delta and stream must be contiguous; strides {delta.stride()} and {stream.stride()}")
    site = delta_site(residual_add)
    _launch(stream, delta, weight, stream, delta, eps, site, tables, rows, True, kind=kind, seen=seen)
