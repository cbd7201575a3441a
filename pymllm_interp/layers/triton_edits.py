# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Declared ops and captures of rows that a Triton program holds in registers; `layers/table_edits.py` says what the tables hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import table_edits as codes
from .edits import added_site
from .triton_kernels import norm_launch

ADD, PROJECT_OUT, CLAMP = tl.constexpr(codes.ADD), tl.constexpr(codes.PROJECT_OUT), tl.constexpr(codes.CLAMP)
SCALE, PATCH = tl.constexpr(codes.SCALE), tl.constexpr(codes.PATCH)
PRESERVE, MATCH = tl.constexpr(codes.PRESERVE), tl.constexpr(codes.MATCH)
FIELDS, NUMBERS = tl.constexpr(codes.FIELDS), tl.constexpr(codes.NUMBERS)


@triton.jit
def _apply_ops(
    value, owner, position, site, counts, fields, numbers, fires, vectors, column, mask, inside,
    SIZE: tl.constexpr, SITES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`value` [rows, block] float32 after the ops that each row's owner [rows, 1] has at `site`, rounded after each."""
    span: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH  # rows of the pool that a vector takes
    place = owner * SITES + site
    count = tl.load(counts + place, mask=inside & (owner >= 0), other=0)
    for k in range(0, tl.max(count)):
        op = place * DEPTH + k
        live = inside & (k < count)
        field = fields + op * FIELDS
        number = numbers + op * NUMBERS
        start = tl.load(field + 3, mask=live, other=0)
        stop = tl.load(field + 4, mask=live, other=0)
        step = tl.load(field + 5, mask=live, other=1)
        live = live & (position >= start) & (position < stop) & ((position - start) % step == 0)
        if tl.max(live.to(tl.int32)) > 0:
            code = tl.load(field, mask=live, other=0)
            first = tl.load(field + 1, mask=live, other=0).to(tl.int64)
            rank = tl.load(field + 2, mask=live, other=0)
            probe_row = tl.load(field + 6, mask=live, other=-1).to(tl.int64)
            mode = tl.load(field + 7, mask=live, other=0)
            a = tl.load(number, mask=live, other=0.0)
            b = tl.load(number + 1, mask=live, other=0.0)
            gated = live & (probe_row >= 0)
            if tl.max(gated.to(tl.int32)) > 0:
                probe = tl.load(vectors + probe_row * WIDTH + column, mask=gated & mask, other=0.0)
                dot = tl.sum(value * probe, axis=1, keep_dims=True)
                threshold = tl.load(number + 2, mask=gated, other=0.0)
                live = live & ((probe_row < 0) | (dot > threshold))
                tl.atomic_add(fires + op, 1, mask=gated & live)
            edited = value
            adds = live & (code == ADD)
            if tl.max(adds.to(tl.int32)) > 0:
                vector = tl.load(vectors + first * WIDTH + column, mask=adds & mask, other=0.0)
                norm = tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True))
                moved = value + tl.where(mode == MATCH, a * norm, a) * vector
                after = tl.sqrt(tl.sum(moved * moved, axis=1, keep_dims=True))
                moved = tl.where((mode == PRESERVE) & (after > 0.0), moved * (norm / after), moved)
                edited = tl.where(adds, moved, edited)
            projects = live & (code == PROJECT_OUT)
            if tl.max(projects.to(tl.int32)) > 0:
                for j in range(0, tl.max(tl.where(projects, rank, 0))):
                    now = projects & (j < rank)
                    vector = tl.load(vectors + (first + j * span) * WIDTH + column, mask=now & mask, other=0.0)
                    edited = edited - tl.sum(value * vector, axis=1, keep_dims=True) * vector
            clamps = live & (code == CLAMP)
            if tl.max(clamps.to(tl.int32)) > 0:
                vector = tl.load(vectors + first * WIDTH + column, mask=clamps & mask, other=0.0)
                along = tl.sum(value * vector, axis=1, keep_dims=True)
                wanted = tl.minimum(tl.maximum(along, a), b)
                edited = tl.where(clamps & (wanted != along), edited + (wanted - along) * vector, edited)
            edited = tl.where(live & (code == SCALE), value * a, edited)
            patches = live & (code == PATCH)
            if tl.max(patches.to(tl.int32)) > 0:
                # A rank of 2 has a vector for each position, in the order of the window's.
                source = first + tl.where(rank == 2, (position - start) // step, 0).to(tl.int64) * span
                vector = tl.load(vectors + source * WIDTH + column, mask=patches & mask, other=0.0)
                edited = tl.where(patches, vector, edited)
            value = tl.where(live, edited.to(dtype).to(tl.float32), value)
    return value


@triton.jit
def _capture(
    value, owner, row, site, offsets, blocks, block_stride, ring, column, mask, inside, SITES: tl.constexpr,
):  # fmt: skip
    """Store `value` [rows, block], rounded, in the ring where the row's owner captures `site` and the row's block holds it."""
    wanted = inside & (owner >= 0)
    offset = tl.load(offsets + owner * SITES + site, mask=wanted, other=-1).to(tl.int64)
    wanted = wanted & (offset >= 0)
    if tl.max(wanted.to(tl.int32)) > 0:
        first = tl.load(blocks + row, mask=wanted, other=0) + offset
        stop = tl.load(blocks + block_stride + row, mask=wanted, other=0)
        tl.store(ring + first + column, value.to(ring.dtype.element_ty), mask=wanted & (first < stop) & mask)


@triton.jit(do_not_specialize=["count", "block_stride", "site"])
def _capture_kernel(
    h, owners, offsets, blocks, block_stride, ring, count, site,
    SIZE: tl.constexpr, SITES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Captures of `h` at `site`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < count
    mask = inside & (column < SIZE)
    owner = tl.load(owners + row, mask=inside, other=-1)
    if tl.max(owner) >= 0:
        value = tl.load(h + row * SIZE + column, mask=mask, other=0.0)
        _capture(value, owner, row, site, offsets, blocks, block_stride, ring, column, mask, inside, SITES)


@triton.jit(do_not_specialize=["count", "block_stride", "site"])
def _edit_kernel(
    h, delta, weight, total, out, owners, positions, counts, fields, numbers, fires, vectors, offsets, blocks, block_stride,
    ring, count, eps, site, SIZE: tl.constexpr, SITES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ops on `h` at `site`; with NORM ops and captures of delta there, of h + delta at the next site, and with LAST of the norm
    after that."""
    dtype: tl.constexpr = h.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < count
    mask = inside & (column < SIZE)
    source = row * SIZE + column
    owner = tl.load(owners + row, mask=inside, other=-1)
    # Where nobody declared anything nothing more is read: the owners come with the states, and cost no time of their own.
    owned = tl.max(owner) >= 0
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int32)
    value = tl.load(h + source, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        added = tl.load(delta + source, mask=mask, other=0.0).to(tl.float32)
        if owned:
            added = _apply_ops(
                added, owner, position, site, counts, fields, numbers, fires, vectors, column, mask, inside, SIZE, SITES,
                DEPTH, WIDTH, dtype,
            )  # fmt: skip
            _capture(added, owner, row, site, offsets, blocks, block_stride, ring, column, mask, inside, SITES)
        value = (value + added).to(dtype).to(tl.float32)
        if owned:
            value = _apply_ops(
                value, owner, position, site + 1, counts, fields, numbers, fires, vectors, column, mask, inside, SIZE,
                SITES, DEPTH, WIDTH, dtype,
            )  # fmt: skip
            _capture(value, owner, row, site + 1, offsets, blocks, block_stride, ring, column, mask, inside, SITES)
        tl.store(total + source, value.to(dtype), mask=mask)
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + eps)
        normed = (value * scale).to(dtype).to(tl.float32)
        weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
        value = (weights * normed).to(dtype).to(tl.float32)
        if LAST:
            if owned:
                value = _apply_ops(
                    value, owner, position, site + 2, counts, fields, numbers, fires, vectors, column, mask, inside, SIZE,
                    SITES, DEPTH, WIDTH, dtype,
                )  # fmt: skip
                _capture(value, owner, row, site + 2, offsets, blocks, block_stride, ring, column, mask, inside, SITES)
    elif owned:
        value = _apply_ops(
            value, owner, position, site, counts, fields, numbers, fires, vectors, column, mask, inside, SIZE, SITES,
            DEPTH, WIDTH, dtype,
        )  # fmt: skip
    tl.store(out + source, value.to(dtype), mask=mask)


def _launch(
    h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, out: torch.Tensor, eps: float,
    site: int, edits: codes.TableEdits, norm: bool,
) -> None:  # fmt: skip
    size = h.shape[-1]
    count = h.numel() // size
    if count == 0:
        return
    tables = edits.tables
    _, sites, depth = tables.fires.shape
    rows, block, warps = norm_launch(size)
    _edit_kernel[(-(-count // rows),)](
        h, delta, weight, total, out, edits.rows, edits.positions, tables.counts, tables.fields, tables.numbers, tables.fires,
        tables.vectors, tables.offsets, edits.blocks, edits.blocks.stride(0), tables.ring, count, eps, site, size, sites, depth,
        tables.vectors.shape[1], norm, norm and site + 2 == edits.final_site, rows, block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def capture(value: torch.Tensor, site: int, edits: codes.TableEdits) -> None:
    """Store the rows of value [1, tokens, width] in the ring for the requests that capture `site`."""
    value, size = value.contiguous(), value.shape[-1]
    count = value.numel() // size
    if count == 0:
        return
    tables = edits.tables
    rows, block, warps = norm_launch(size)
    _capture_kernel[(-(-count // rows),)](
        value, edits.rows, tables.offsets, edits.blocks, edits.blocks.stride(0), tables.ring, count, site,
        size, tables.offsets.shape[1], rows, block, num_warps=warps,
    )  # fmt: skip


def edit(value: torch.Tensor, site: int, edits: codes.TableEdits) -> torch.Tensor:
    """value [1, tokens, width] after the ops at `site`; fresh memory."""
    value = value.contiguous()
    out = torch.empty_like(value)
    _launch(value, value, value, value, out, 0.0, site, edits, norm=False)
    return out


def edit_add_rms_norm(
    h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, place: int, edits: codes.TableEdits
) -> tuple[torch.Tensor, torch.Tensor]:
    """`triton_kernels.add_rms_norm` with the ops and captures of the place; h and delta [1, tokens, width]."""
    h, delta = h.contiguous(), delta.contiguous()
    total, out = torch.empty_like(h), torch.empty_like(h)
    _launch(h, delta, weight, total, out, eps, added_site(place), edits, norm=True)
    return total, out
