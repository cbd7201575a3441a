# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false
# As in triton_kernels.py.
"""Triton kernels for the gated delta rule (Yang et al., 2025). States are read and written in place, by the slot of each request.

layers/delta.py has the same in torch. Rows are [tokens, channels] with a contiguous last dim. Slot 0 is padding's: several rows may
write to it at once, and no request reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launcher, grid_wait, launch_dependents
from .triton_norm import norm_launch, normalize

CONV_BLOCK, CONV_WARPS = 256, 4
"""Channels and warps per program of a convolution."""
CONV_ROWS = 16
"""Rows per program of a prompt's convolution."""
VALUE_BLOCK, STEP_WARPS, SCAN_WARPS = 32, 8, 4
"""Columns of a head's state per program of `delta_step` and `delta_scan`, and warps of each."""
GATE_BLOCK, GATE_WARPS = 1024, 4


@triton.jit
def _silu(x, dtype: tl.constexpr):
    """`x` float32, rounded to `dtype` before and after."""
    rounded = x.to(dtype).to(tl.float32)
    return (rounded / (1.0 + tl.exp(-rounded))).to(dtype)


# -- convolution ---------------------------------------------------------------------


@triton.jit
def _conv_step(
    x, state, weight, slots, out, X_STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    first = state + tl.load(slots + row).to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
    before = ()
    for tap in tl.static_range(TAPS - 1):
        before += (tl.load(first + tap * CHANNELS, mask=mask, other=0.0),)
    last = tl.load(weight + channel * TAPS + TAPS - 1, mask=mask, other=0.0).to(tl.float32)
    grid_wait(PDL)
    new = tl.load(x + row * X_STRIDE + channel, mask=mask, other=0.0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS - 1):
        total += before[tap].to(tl.float32) * tl.load(weight + channel * TAPS + tap, mask=mask, other=0.0).to(
            tl.float32
        )
    total += new.to(tl.float32) * last
    for tap in tl.static_range(TAPS - 2):
        tl.store(first + tap * CHANNELS, before[tap + 1], mask=mask)
    tl.store(first + (TAPS - 2) * CHANNELS, new.to(state.dtype.element_ty), mask=mask)
    tl.store(out + row * CHANNELS + channel, _silu(total, out.dtype.element_ty), mask=mask)


_conv_step_launch = Launcher(_conv_step, pdl=True, enable_fp_fusion=False)


def conv_step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One row of each request through the causal convolution and silu: x [rows, channels] -> the same shape, in fresh memory.

    Args:
        state: [slots, taps - 1, channels], the inputs before; the rows' slots are written.
        weight: [channels, 1, taps].
        slots: [rows] int64.
    """
    rows, channels = x.shape
    out = x.new_empty(rows, channels)
    if rows:
        constants = (x.stride(0), channels, weight.shape[-1], CONV_BLOCK)
        grid = (rows, -(-channels // CONV_BLOCK), 1)
        _conv_step_launch(grid, (x, state, weight, slots, out), (), constants, CONV_WARPS)
    return out


@triton.jit(do_not_specialize=["rows"])
def _conv_rows(
    x, state, weight, firsts, sources, out, rows, X_STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out` has all rows of the first KEYS channels, then of the next KEYS, then of the other channels."""
    launch_dependents(PDL)
    grid_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (channel < CHANNELS)
    first = tl.load(firsts + row, mask=row < rows, other=0)
    slot = tl.load(sources + row, mask=row < rows, other=-1).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1) + tap
        own = mask & (source >= first)
        value = tl.load(x + source.to(tl.int64) * X_STRIDE + channel, mask=own, other=0.0).to(tl.float32)
        kept = mask & (source < first) & (slot >= 0)
        place = (slot * (TAPS - 1) + (source - first + TAPS - 1)) * CHANNELS + channel
        value += tl.load(state + place, mask=kept, other=0.0).to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + tap, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    first_channel = tl.where(channel < 2 * KEYS, channel // tl.maximum(KEYS, 1) * KEYS, 2 * KEYS)
    width = tl.where(channel < 2 * KEYS, KEYS, CHANNELS - 2 * KEYS)
    target = first_channel.to(tl.int64) * rows + row.to(tl.int64) * width + channel - first_channel
    tl.store(out + target, _silu(total, out.dtype.element_ty), mask=mask)


@triton.jit
def _conv_keep(
    x, state, starts, slots, continued, X_STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of each request to its slot."""
    launch_dependents(PDL)
    grid_wait(PDL)
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    first, stop = tl.load(starts + request), tl.load(starts + request + 1)
    has_state = channel * 0 + tl.load(continued + request) > 0
    at = state + tl.load(slots + request).to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
    kept = ()
    for tap in tl.static_range(TAPS - 1):
        source = channel * 0 + stop - (TAPS - 1) + tap
        own = mask & (source >= first)
        value = tl.load(x + source * X_STRIDE + channel, mask=own, other=0.0)
        old = mask & (source < first) & has_state
        before = tl.load(at + (source - first + TAPS - 1) * CHANNELS, mask=old, other=0.0)
        kept += (tl.where(source >= first, value, before.to(value.dtype)),)
    for tap in tl.static_range(TAPS - 1):
        tl.store(at + tap * CHANNELS, kept[tap].to(state.dtype.element_ty), mask=mask)


_conv_rows_launch = Launcher(_conv_rows, pdl=True, enable_fp_fusion=False)
_conv_keep_launch = Launcher(_conv_keep, pdl=True, enable_fp_fusion=False)


def conv_prompts(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    continued: torch.Tensor,
    firsts: torch.Tensor,
    sources: torch.Tensor,
    keys: int = 0,
) -> list[torch.Tensor]:
    """All rows of several requests through the convolution and silu: x [rows, channels] -> three contiguous parts of the channels.

    Args:
        keys: channels of the first part, and of the second one; 0: all channels are in the third.
        state, weight: see `conv_step`.
        starts: [requests + 1] int64, the first row of each request, and the number of rows.
        slots: [requests] int64.
        continued: [requests] int32, whether the slot has inputs from before.
        firsts: [rows] int64, the first row of the row's request.
        sources: [rows] int64, the slot of the row's request; -1 without earlier inputs.
    """
    rows, channels = x.shape
    out = x.new_empty(rows * channels)
    if rows:
        blocks, shape = -(-channels // CONV_BLOCK), (x.stride(0), channels, weight.shape[-1])
        tensors = (x, state, weight, firsts, sources, out)
        constants = (*shape, keys, CONV_ROWS, CONV_BLOCK)
        _conv_rows_launch((-(-rows // CONV_ROWS), blocks, 1), tensors, (rows,), constants, CONV_WARPS)
        tensors = (x, state, starts, slots, continued)
        _conv_keep_launch((len(slots), blocks, 1), tensors, (), (*shape, CONV_BLOCK), CONV_WARPS)
    widths = [keys, keys, channels - 2 * keys]
    parts = out.split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]


# -- delta rule ----------------------------------------------------------------------


@triton.jit
def _delta_token(
    memory, qkv, b, a, row, head, key, column, rate, shift, QKV_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """(columns of a head's state behind a token, the token's output)."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    key_head = head // (HEADS // KEY_HEADS)
    source = qkv + row * QKV_STRIDE
    q = tl.load(source + key_head * KEY_DIM + key, mask=key < KEY_DIM, other=0.0).to(tl.float32)
    k = tl.load(source + (KEY_HEADS + key_head) * KEY_DIM + key, mask=key < KEY_DIM, other=0.0).to(tl.float32)
    values = source + 2 * KEY_HEADS * KEY_DIM + head * DIM + column
    v = tl.load(values, mask=column < DIM, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0, keep_dims=True) + 1e-6) * SCALE
    k = k * tl.rsqrt(tl.sum(k * k, axis=0, keep_dims=True) + 1e-6)
    step = tl.load(a + row * A_STRIDE + head).to(tl.float32) + shift
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    beta = tl.load(b + row * B_STRIDE + head).to(tl.float32)
    beta = (1.0 / (1.0 + tl.exp(-beta))).to(dtype).to(tl.float32)
    memory = memory * tl.exp(rate * step)
    delta = (v - tl.sum(memory * k, axis=0, keep_dims=True)) * beta
    memory = memory + k * delta
    return memory, tl.sum(memory * q, axis=0, keep_dims=True)


@triton.jit
def _delta_step(
    qkv, b, a, decay, bias, state, slots, out, QKV_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr, SCALE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK columns of a head's state [KEY_DIM, DIM]."""
    launch_dependents(PDL)
    dtype: tl.constexpr = qkv.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, KEY_BLOCK)[:, None]
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (key < KEY_DIM) & (column < DIM)
    slot = tl.load(slots + row).to(tl.int64)
    at = state + ((slot * HEADS + head) * KEY_DIM + key) * DIM + column
    memory = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(decay + head).to(tl.float32))
    shift = tl.load(bias + head).to(tl.float32)
    grid_wait(PDL)
    memory, read = _delta_token(
        memory, qkv, b, a, row, head, key, column, rate, shift, QKV_STRIDE, B_STRIDE, A_STRIDE, KEY_HEADS, HEADS, KEY_DIM,
        DIM, SCALE,
    )  # fmt: skip
    tl.store(at, memory.to(state.dtype.element_ty), mask=inside)
    tl.store(out + (row * HEADS + head) * DIM + column, read.to(dtype), mask=column < DIM)


_delta_step_launch = Launcher(_delta_step, pdl=True)


@triton.jit
def _delta_scan(
    qkv, b, a, decay, bias, state, starts, slots, continued, out, QKV_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr, SCALE: tl.constexpr, STEPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_delta_step` over all tokens of a request, one after the other. STEPS: each request has one, and a state."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, KEY_BLOCK)[:, None]
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (key < KEY_DIM) & (column < DIM)
    slot = tl.load(slots + request).to(tl.int64)
    at = state + ((slot * HEADS + head) * KEY_DIM + key) * DIM + column
    first, stop = request, request + 1
    known = inside
    if not STEPS:
        first, stop = tl.load(starts + request), tl.load(starts + request + 1)
        known = inside & (tl.load(continued + request) > 0)
    memory = tl.load(at, mask=known, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(decay + head).to(tl.float32))
    shift = tl.load(bias + head).to(tl.float32)
    for row in range(first, stop):
        memory, read = _delta_token(
            memory, qkv, b, a, row, head, key, column, rate, shift, QKV_STRIDE, HEADS, HEADS, KEY_HEADS, HEADS, KEY_DIM, DIM, SCALE,
        )  # fmt: skip
        memory = memory.to(state.dtype.element_ty).to(tl.float32)  # as it is stored between passes
        tl.store(out + (row * HEADS + head) * DIM + column, read.to(dtype), mask=column < DIM)
    tl.store(at, memory.to(state.dtype.element_ty), mask=inside)


_delta_scan_launch = Launcher(_delta_scan, enable_fp_fusion=False)


def delta_scan(
    qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, decay: torch.Tensor, bias: torch.Tensor, state: torch.Tensor,
    slots: torch.Tensor, starts: torch.Tensor | None = None, continued: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`delta_step` for requests with any number of rows, token by token: [rows, heads, dim], in fresh memory.

    Args:
        starts: [requests + 1] int64, the first row of each request, and the number of rows; None: each has one.
        continued: [requests] int32, whether the slot has a state from before; with `starts`.
    """
    rows, (heads, key_dim, dim) = len(qkv), state.shape[1:]
    out = qkv.new_empty(rows, heads, dim)
    if rows:
        key_heads = (qkv.shape[1] - heads * dim) // (2 * key_dim)
        block = min(VALUE_BLOCK, triton.next_power_of_2(dim))
        sizes = (qkv.stride(0), key_heads, heads, key_dim, dim, key_dim**-0.5, starts is None)
        constants = (*sizes, triton.next_power_of_2(key_dim), block)
        tensors = (qkv, b.contiguous(), a.contiguous(), decay, bias, state, slots if starts is None else starts, slots)
        tensors = (*tensors, slots if continued is None else continued, out)
        _delta_scan_launch((len(slots), heads, -(-dim // block)), tensors, (), constants, SCAN_WARPS)
    return out


def delta_step(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One row of each request through the gated delta rule: [rows, heads, dim], in fresh memory.

    Args:
        qkv: [rows, 2 * key_heads * key_dim + heads * dim] after the convolution.
        b, a: [rows, heads], before their sigmoid and softplus.
        decay, bias: [heads], `A_log` and `dt_bias`.
        state: [slots, heads, key_dim, dim]; the rows' slots are written.
        slots: [rows] int64.
    """
    rows, (heads, key_dim, dim) = len(qkv), state.shape[1:]
    out = qkv.new_empty(rows, heads, dim)
    if rows:
        key_heads = (qkv.shape[1] - heads * dim) // (2 * key_dim)
        block = min(VALUE_BLOCK, triton.next_power_of_2(dim))
        strides = (qkv.stride(0), b.stride(0), a.stride(0))
        constants = (*strides, key_heads, heads, key_dim, dim, key_dim**-0.5, triton.next_power_of_2(key_dim), block)
        tensors = (qkv, b, a, decay, bias, state, slots, out)
        _delta_step_launch((rows, heads, -(-dim // block)), tensors, (), constants, STEP_WARPS)
    return out


# -- norm with a gate ------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x, gate, weight, out, rows, eps, GATE_STRIDE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < SIZE)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    grid_wait(PDL)
    value = tl.load(x + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + eps)
    normed = (weights * (value * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    z = tl.load(gate + row // HEADS * GATE_STRIDE + row % HEADS * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (normed * (z / (1.0 + tl.exp(-z)))).to(dtype), mask=mask)


_gated_norm_launch = Launcher(_gated_norm, pdl=True, enable_fp_fusion=False)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head of x [tokens, heads, size], times silu of `gate` [tokens, heads, size]; fresh memory.

    The heads of a token of `gate` lie side by side.
    """
    x = x.contiguous()
    tokens, heads, size = x.shape
    out = torch.empty_like(x)
    if tokens:
        per_program, block, warps = norm_launch(size)
        constants = (gate.stride(0), heads, size, per_program, block)
        grid = (-(-tokens * heads // per_program), 1, 1)
        _gated_norm_launch(grid, (x, gate, weight, out), (tokens * heads, eps), constants, warps)
    return out


# -- attention with a gate ---------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _split_gated(
    x, q_weight, k_weight, out, rows, eps, X_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row is a head of q, k or v. The heads of q have their gates between them."""
    launch_dependents(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < SIZE)
    token, head = row // (HEADS + 2 * KV_HEADS), row % (HEADS + 2 * KV_HEADS)
    of_q = tl.load(q_weight + column, mask=column < SIZE, other=0.0)
    of_k = tl.load(k_weight + column, mask=column < SIZE, other=0.0)
    grid_wait(PDL)
    place = tl.where(head < HEADS, 2 * head, head + HEADS)
    raw = tl.load(x + token * X_STRIDE + place * SIZE + column, mask=mask, other=0.0)
    weights = tl.where(head < HEADS, of_q, of_k)
    normed = normalize(raw.to(tl.float32), weights, weights, eps, column, SIZE, KIND, dtype)
    tl.store(out + row * SIZE + column, tl.where(head < HEADS + KV_HEADS, normed, raw), mask=mask)


_split_gated_launch = Launcher(_split_gated, pdl=True, enable_fp_fusion=False)


def split_gated(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, kv_heads: int, eps: float, kind: int
) -> torch.Tensor:
    """q, k and v out of a product with gates, [tokens, heads + 2 * kv_heads, size]. q and k are normalised. In fresh memory.

    Args:
        x: [tokens, (2 * heads + 2 * kv_heads) * size]: each head of q with its gate behind it, then k, then v.
        kind: kind of the norms (core/norm_kind.py).
    """
    tokens, size = len(x), len(q_weight)
    out = x.new_empty(tokens, heads + 2 * kv_heads, size)
    if rows := tokens * out.shape[1]:
        per_program, block, warps = norm_launch(size)
        constants = (x.stride(0), heads, kv_heads, size, kind, per_program, block)
        _split_gated_launch(
            (-(-rows // per_program), 1, 1), (x, q_weight, k_weight, out), (rows, eps), constants, warps
        )
    return out


@triton.jit
def _open_gate(
    x, gate, out, GATE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < HEADS * SIZE
    source = gate + token * GATE_STRIDE + place // SIZE * HEAD_STRIDE + place % SIZE
    opened = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-opened))).to(dtype).to(tl.float32)
    at = token * (HEADS * SIZE) + place
    tl.store(out + at, (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * opened).to(dtype), mask=mask)


_open_gate_launch = Launcher(_open_gate, pdl=True, enable_fp_fusion=False)


def open_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``, in fresh memory: x [tokens, heads * size], gate [tokens, heads, size] with a contiguous last dim."""
    x, (tokens, heads, size) = x.contiguous(), gate.shape
    out = torch.empty_like(x)
    if tokens:
        constants = (gate.stride(0), gate.stride(1), heads, size, GATE_BLOCK)
        _open_gate_launch((tokens, -(-heads * size // GATE_BLOCK), 1), (x, gate, out), (), constants, GATE_WARPS)
    return out
