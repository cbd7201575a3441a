# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""A Triton kernel for declared ops and captures in front of somebody else's norm, in place.

The norm gets the delta and the stream, and adds them. A row with an edited sum becomes (0, the edited sum), which the norm adds
exactly. Rows without an owner are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core.model_spec import delta_site
from .edit_codes import OpTables, TokenRows
from .edit_ops import MAX_REGISTERS, _apply_site
from .launch import Launcher
from .triton_norm import norm_launch


@triton.jit(do_not_specialize=["count", "record_stride", "site"])
def _pair_kernel(
    delta, stream, owners, positions, ops, fires, vectors, captures, records, ring, flags, first_fired, seen, record_stride,
    count, site,
    SIZE: tl.constexpr, SITES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, PAIR: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ops and captures of `delta` at `site`. With PAIR then ops and captures of ``stream + delta`` at the next site."""
    dtype: tl.constexpr = delta.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < count
    owner = tl.load(owners + row, mask=inside, other=-1)
    if tl.max(owner) >= 0:
        column = tl.arange(0, BLOCK)[None, :]
        owned = inside & (owner >= 0)
        mask = owned & (column < SIZE)
        source = row * SIZE + column
        position = tl.load(positions + row, mask=inside, other=0).to(tl.int32)
        before = tl.load(delta + source, mask=mask, other=0.0).to(tl.float32)
        value = _apply_site(
            before, owner, position, site, ops, fires, vectors, captures, records, record_stride, ring, flags, first_fired, vectors,
            row, column, mask, inside, SIZE, SITES, DEPTH, WIDTH, dtype, 0, True, ALIGNED, 0, 0,
        )  # fmt: skip
        if PAIR:
            state = tl.load(stream + source, mask=mask, other=0.0).to(tl.float32)
            total = (state + value).to(dtype).to(tl.float32)
            edited = _apply_site(
                total, owner, position, site, ops, fires, vectors, captures, records, record_stride, ring, flags, first_fired,
                vectors, row, column, mask, inside, SIZE, SITES, DEPTH, WIDTH, dtype, 1, True, ALIGNED, 0, 0,
            )  # fmt: skip
            changed = tl.max((mask & (edited != total)).to(tl.int32), axis=1, keep_dims=True) > 0
            tl.store(stream + source, edited.to(dtype), mask=mask & changed)
            value = tl.where(changed, 0.0, value)
        tl.store(delta + source, value.to(dtype), mask=mask)
        tl.atomic_add(seen + owner, 1, mask=owned)


_pair_launch = Launcher(_pair_kernel, enable_fp_fusion=False, maxnreg=MAX_REGISTERS)


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
    _, sites, depth = tables.fires.shape
    group, block, warps = norm_launch(size)
    tensors = (
        delta, stream, rows.owners, rows.positions, tables.ops, tables.fires, tables.vectors, tables.captures, rows.records,
        tables.ring, rows.flags, tables.first_fired, seen,
    )  # fmt: skip
    constants = (size, sites, depth, tables.vectors.shape[1], pair, tables.aligned, group, block)
    _pair_launch((-(-count // group), 1, 1), tensors, (rows.records.stride(0), count, site), constants, warps)


def edit_pair(
    delta: torch.Tensor, stream: torch.Tensor, residual_add: int, tables: OpTables, rows: TokenRows, seen: torch.Tensor
) -> None:
    """Ops and captures at a residual add; delta and stream [tokens, width] are changed in place.

    Args:
        rows: of at least as many token rows.
        seen: [table rows] int32, counts the rows of each owner.
    """
    _launch_pair(delta, stream, delta_site(residual_add), tables, rows, seen, True)


def edit_state(value: torch.Tensor, site: int, tables: OpTables, rows: TokenRows, seen: torch.Tensor) -> None:
    """Ops and captures of `value` [tokens, width] at a site, in place."""
    _launch_pair(value, value, site, tables, rows, seen, False)
