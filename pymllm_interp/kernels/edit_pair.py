# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""A Triton kernel for declared ops and captures in front of another library's norm, in place.

The norm gets the delta and the stream, and adds them. A row with an edited sum becomes (0, the edited sum), which the norm adds
exactly. Rows without an owner are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core.model_spec import delta_site
from .edit_codes import OpTables, TokenRows
from .edit_ops import MAX_REGISTERS
from .edit_rows import CAPTURE_WORDS, WORDS, _apply_ops, _capture, _first_vector
from .launch import Launcher, grid_wait, launch_dependents
from .triton_norm import norm_launch


@triton.jit(do_not_specialize=["count", "record_stride", "score_stride", "site"])
def _pair_kernel(
    delta, stream, owners, positions, ops, fires, vectors, captures, records, ring, flags, first_fired, seen, scores,
    record_stride, score_stride, count, site,
    SIZE: tl.constexpr, SITES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, PAIR: tl.constexpr, ALIGNED: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Ops and captures of `delta` at `site`. With PAIR then ops and captures of ``stream + delta`` at the next site.

    The tables are read before the states are there, because latency dominates.
    """
    launch_dependents(PDL)
    dtype: tl.constexpr = delta.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < count
    owner = tl.load(owners + row, mask=inside, other=-1, eviction_policy="evict_last")
    if tl.max(owner) >= 0:
        column = tl.arange(0, BLOCK)[None, :]
        owned = inside & (owner >= 0)
        mask = owned & (column < SIZE)
        source = row * SIZE + column
        position = tl.load(positions + row, mask=inside, other=0, eviction_policy="evict_last").to(tl.int32)
        rows = owner, position, row, column, mask, inside
        tables = ops, fires, vectors, flags, first_fired, vectors, scores, score_stride
        place = owner * SITES + site
        word = ops + place * DEPTH * WORDS
        kind = tl.load(word, mask=owned, other=0, eviction_policy="evict_last")
        vector = _first_vector(word, kind, vectors, column, mask, WIDTH)
        words = captures + place * CAPTURE_WORDS
        offset = tl.load(words, mask=owned, other=-1, eviction_policy="evict_last")
        way = tl.load(words + 1, mask=owned, other=0, eviction_policy="evict_last")
        first = tl.load(records + row, mask=owned, other=0, eviction_policy="evict_last")
        stop = tl.load(records + record_stride + row, mask=owned, other=0, eviction_policy="evict_last")
        if PAIR:
            kind_after = tl.load(word + DEPTH * WORDS, mask=owned, other=0, eviction_policy="evict_last")
            vector_after = _first_vector(word + DEPTH * WORDS, kind_after, vectors, column, mask, WIDTH)
            offset_after = tl.load(words + CAPTURE_WORDS, mask=owned, other=-1, eviction_policy="evict_last")
            way_after = tl.load(words + CAPTURE_WORDS + 1, mask=owned, other=0, eviction_policy="evict_last")
        grid_wait(PDL)
        tl.atomic_add(seen + owner, 1, mask=owned, sem="relaxed")
        value = tl.load(delta + source, mask=mask, other=0.0).to(tl.float32)
        if PAIR:
            state = tl.load(stream + source, mask=mask, other=0.0).to(tl.float32)
            changed_delta, total = value, value
            for step in range(0, 2):  # delta, then the sum, by the same code
                value = _apply_ops(
                    value, rows, site + step, kind, vector, tables, SIZE, SITES, DEPTH, WIDTH, 0, 0, dtype
                )
                _capture(
                    value,
                    offset,
                    way,
                    words + step * CAPTURE_WORDS,
                    first,
                    stop,
                    vectors,
                    ring,
                    column,
                    mask,
                    SIZE,
                    WIDTH,
                    ALIGNED,
                )
                if step == 0:
                    changed_delta = value
                    value = (state + value).to(dtype).to(tl.float32)
                    total = value
                kind, vector, offset, way = kind_after, vector_after, offset_after, way_after
            changed = tl.max((mask & (value != total)).to(tl.int32), axis=1, keep_dims=True) > 0
            tl.store(stream + source, value.to(dtype), mask=mask & changed)
            value = tl.where(changed, 0.0, changed_delta)
        else:
            value = _apply_ops(value, rows, site, kind, vector, tables, SIZE, SITES, DEPTH, WIDTH, HEAD_DIM, 0, dtype)
            _capture(value, offset, way, words, first, stop, vectors, ring, column, mask, SIZE, WIDTH, ALIGNED)
        tl.store(delta + source, value.to(dtype), mask=mask)
    else:
        grid_wait(PDL)  # later kernels wait for this one only


_pair_launch = Launcher(_pair_kernel, pdl=True, enable_fp_fusion=False, maxnreg=MAX_REGISTERS)


def _launch_pair(
    delta: torch.Tensor,
    stream: torch.Tensor,
    site: int,
    tables: OpTables,
    rows: TokenRows,
    seen: torch.Tensor,
    pair: bool,
) -> None:
    size = delta.shape[-1]
    count = delta.numel() // size
    if count == 0:
        return
    if not (delta.is_contiguous() and stream.is_contiguous()):
        raise ValueError(f"delta and stream must be contiguous; strides {delta.stride()} and {stream.stride()}")
    sites, depth = tables.fires.shape[1:3]
    group, block, warps = norm_launch(size)
    tensors = (
        delta, stream, rows.owners, rows.positions, tables.ops, tables.fires, tables.vectors, tables.captures, rows.records,
        tables.ring, rows.flags, tables.first_fired, seen, rows.scores,
    )  # fmt: skip
    heads = tables.head_dim_at(site)
    constants = (size, sites, depth, tables.vectors.shape[1], pair, tables.aligned, heads, group, block)
    strides = rows.records.stride(0), rows.scores.stride(0)
    _pair_launch((-(-count // group), 1, 1), tensors, (*strides, count, site), constants, warps)


def edit_pair(
    delta: torch.Tensor, stream: torch.Tensor, residual_add: int, tables: OpTables, rows: TokenRows, seen: torch.Tensor
) -> None:
    """Ops and captures at a residual add; delta and stream [tokens, width] are changed in place.

    Args:
        rows: token rows, at least as many as `delta` has.
        seen: [table rows] int32, counts the rows of each owner.
    """
    _launch_pair(delta, stream, delta_site(residual_add), tables, rows, seen, True)


def edit_state(value: torch.Tensor, site: int, tables: OpTables, rows: TokenRows, seen: torch.Tensor) -> None:
    """Ops and captures of `value` [tokens, width] at a site, in place."""
    _launch_pair(value, value, site, tables, rows, seen, False)
