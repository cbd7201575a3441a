# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false
# Launches pass options that are not in the kernel's signature, and plain numbers for `constexpr` parameters.
"""Triton kernels and their launches. The public functions and the torch references are in norm.py, rope.py and so on.

Every kernel returns the same bits as torch's kernels for the same formula, except for the order of sums and the last bit of
``exp`` and ``rsqrt``:

- Intermediate results that torch would write to memory are rounded to the model's dtype.
- `enable_fp_fusion` is off: a fused multiply-add skips the rounding of the product.
- The fused and the module-by-module pass use the same kernel, with a flag. Block sizes depend on the width of a row and not
  on the number of rows, so that the sums of a row have one order in every batch.

Numbers that a model fixes (widths, strides, heads) are compile-time constants. Numbers that change from pass to pass are not,
so that a new batch size compiles nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core.launch import Launcher, grid_wait, launch_dependents

NORM_BLOCK = 2048
"""Elements per program of `rms_norm`: as many whole rows as fit, at least one."""
NORM_WARP = 512
"""Elements per warp of `rms_norm`."""
ROPE_HEADS, ROPE_WARPS = 16, 4
"""Heads and warps per program of `rope`."""
SILU_BLOCK, SILU_WARPS = 1024, 4
GEMV_BLOCKS = 4096, 2048
"""Elements of a weight's row that a program loads at a time: the first that divides the row, else the last."""
GEMV_WARP = 512
"""Elements per warp of `gemv`."""


# -- norm ------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, delta, weight, total, out, rows, eps, SIZE: tl.constexpr, INNER: tl.constexpr, OUTER_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr, ADD: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < SIZE)
    source = row // INNER * OUTER_STRIDE + row % INNER * INNER_STRIDE + column
    # Keep the norm's weights in the L2 cache: the large weights pass through it once a step.
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0, eviction_policy="evict_last")
    grid_wait(PDL)
    value = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        summed = (value + tl.load(delta + source, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + source, summed, mask=mask)
        value = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    target = source if IN_PLACE else row * SIZE + column
    tl.store(out + target, (weights.to(tl.float32) * normed).to(dtype), mask=mask)


_rms_norm_launch = Launcher(_rms_norm, pdl=True, enable_fp_fusion=False)


def _launch_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    add: bool,
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if rows == 0:
        return
    inner, outer_stride, inner_stride = 1, size, 0
    if not x.is_contiguous():  # [tokens, heads, head_dim], a slice of a merged product
        inner, (outer_stride, inner_stride, _) = x.shape[1], x.stride()
    per_program, block, warps = norm_launch(size)
    constants = (size, inner, outer_stride, inner_stride, add, out is x, per_program, block)
    _rms_norm_launch((-(-rows // per_program), 1, 1), (x, delta, weight, total, out), (rows, eps), constants, warps)


def norm_launch(size: int) -> tuple[int, int, int]:
    """(rows per program, elements per row, warps) for kernels that sum over rows of `size`: all sums have the same order."""
    block = 1 << (size - 1).bit_length()
    rows = max(1, NORM_BLOCK // block)
    return rows, block, min(16, max(1, block * rows // NORM_WARP))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] -> the same shape in fresh memory. x is contiguous, or [tokens, heads, size] with a contiguous last dim."""
    if not x.is_contiguous() and (x.dim() != 3 or x.stride(2) != 1):
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_norm(x, x, weight, x, out, eps, False)
    return out


def rms_norm_(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """`rms_norm` in place: x [tokens, heads, size], last dim contiguous."""
    _launch_norm(x, x, weight, x, x, eps, False)


def add_rms_norm(
    h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta, its norm), both fresh memory; h and delta [..., size]."""
    h, delta = h.contiguous(), delta.contiguous()
    total, out = torch.empty_like(h), torch.empty_like(h)
    _launch_norm(h, delta, weight, total, out, eps, True)
    return total, out


# -- rope ------------------------------------------------------------------------


@triton.jit
def _turn(x, other, cos, signed_sin, dtype: tl.constexpr):
    straight = (x.to(tl.float32) * cos).to(dtype)
    crossed = (other.to(tl.float32) * signed_sin).to(dtype)
    return (straight.to(tl.float32) + crossed.to(tl.float32)).to(dtype)


@triton.jit
def _rope(
    x, cos, signed_sin, out, k_cache, v_cache, slots, X_STRIDE: tl.constexpr, X_HEAD_STRIDE: tl.constexpr,
    TURN_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads into `out` and the next KV_HEADS heads into `k_cache`; copy the last KV_HEADS heads to `v_cache`."""
    launch_dependents(PDL)
    grid_wait(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS + 2 * KV_HEADS) & (column < half)
    source = x + token * X_STRIDE + head * X_HEAD_STRIDE + column
    first, second = tl.load(source, mask=mask), tl.load(source + half, mask=mask)
    angle = token * TURN_STRIDE + column
    cos_first = tl.load(cos + angle, mask=column < half).to(tl.float32)
    cos_second = tl.load(cos + angle + half, mask=column < half).to(tl.float32)
    sin_first = tl.load(signed_sin + angle, mask=column < half).to(tl.float32)
    sin_second = tl.load(signed_sin + angle + half, mask=column < half).to(tl.float32)
    turned_first = _turn(first, second, cos_first, sin_first, dtype)
    turned_second = _turn(second, first, cos_second, sin_second, dtype)
    target = out + (token * HEADS + head) * HEAD_DIM + column
    tl.store(target, turned_first, mask=mask & (head < HEADS))
    tl.store(target + half, turned_second, mask=mask & (head < HEADS))
    if KV_HEADS > 0:
        row = tl.load(slots + token).to(tl.int64) * KV_HEADS
        is_key = mask & (head >= HEADS) & (head < HEADS + KV_HEADS)
        key = k_cache + (row + head - HEADS) * HEAD_DIM + column
        tl.store(key, turned_first.to(k_cache.dtype.element_ty), mask=is_key)
        tl.store(key + half, turned_second.to(k_cache.dtype.element_ty), mask=is_key)
        is_value = mask & (head >= HEADS + KV_HEADS)
        value = v_cache + (row + head - HEADS - KV_HEADS) * HEAD_DIM + column
        tl.store(value, first.to(v_cache.dtype.element_ty), mask=is_value)
        tl.store(value + half, second.to(v_cache.dtype.element_ty), mask=is_value)


_rope_launch = Launcher(_rope, pdl=True, enable_fp_fusion=False)


def _launch_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_heads: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    out = x.new_empty(tokens, heads - 2 * kv_heads, head_dim) if out is None else out
    if tokens:
        head_block, half_block = min(ROPE_HEADS, 1 << (heads - 1).bit_length()), 1 << (head_dim // 2 - 1).bit_length()
        strides = (x.stride(0), x.stride(1), cos.stride(0))
        constants = (*strides, heads - 2 * kv_heads, kv_heads, head_dim, head_block, half_block)
        tensors = (x, cos, signed_sin, out, k_cache, v_cache, slots)
        _rope_launch((tokens, -(-heads // head_block), 1), tensors, (), constants, ROPE_WARPS)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], last dim contiguous, rotated by a `rotation` of layers/rope.py; fresh memory."""
    return _launch_rope(x, cos, signed_sin, x, x, x, 0)


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate q and k, and write k and v to `slots` of the caches. Returns q in `out`, contiguous, or in fresh memory.

    qkv is [tokens, heads + 2 * kv_heads, head_dim] with a contiguous last dim; the caches are [slots, kv_heads, head_dim].
    """
    return _launch_rope(qkv, cos, signed_sin, k_cache, v_cache, slots, k_cache.shape[1], out)


# -- activation --------------------------------------------------------------------


@triton.jit
def _silu(x, out, SIZE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    grid_wait(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    source = x + row * (2 * SIZE if GATED else SIZE) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    if GATED:
        value = (value.to(tl.float32) * tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + row * SIZE + column, value, mask=mask)


_silu_launch = Launcher(_silu, pdl=True, enable_fp_fusion=False)


def _launch_silu(x: torch.Tensor, size: int, gated: bool) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], size)
    if rows := out.numel() // size:
        _silu_launch((rows, -(-size // SILU_BLOCK), 1), (x, out), (), (size, gated, SILU_BLOCK), SILU_WARPS)
    return out


def silu(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] -> the same shape."""
    return _launch_silu(x, x.shape[-1], False)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]: ``silu(gate) * up``, with silu rounded before the product."""
    return _launch_silu(gate_up, gate_up.shape[-1] // 2, True)


# -- matrix times vector -----------------------------------------------------------


@triton.jit
def _gemv(x, weight, bias, out, K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    row = tl.program_id(0)
    # Unrolled, so that all loads of the row are in flight before the first product. The row is read once: evict it first.
    parts = ()
    for start in tl.static_range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        if start + BLOCK_K <= K:
            weights = tl.load(weight + row.to(tl.int64) * K + column, eviction_policy="evict_first")
        else:
            weights = tl.load(weight + row.to(tl.int64) * K + column, mask=column < K, other=0.0)
        parts += (weights,)
    grid_wait(PDL)
    total = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        if start + BLOCK_K <= K:
            values = tl.load(x + column)
        else:
            values = tl.load(x + column, mask=column < K, other=0.0)
        total += parts[start // BLOCK_K].to(tl.float32) * values.to(tl.float32)
    result = tl.sum(total, axis=0)
    if HAS_BIAS:
        result += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


_gemv_launch = Launcher(_gemv, pdl=True, enable_fp_fusion=True)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block_k: int | None = None,
    num_warps: int | None = None,
) -> torch.Tensor:
    """x [..., in] with one row, weight [out, in], bias [out], all contiguous -> [..., out]. Sums in float32."""
    n, k = weight.shape
    out = x.new_empty(*x.shape[:-1], n)
    if block_k is None:
        block_k = next((block for block in GEMV_BLOCKS if k % block == 0), GEMV_BLOCKS[-1])
    block_k = min(block_k, 1 << (k - 1).bit_length())
    tensors = (x, weight, weight if bias is None else bias, out)
    warps = num_warps or max(1, block_k // GEMV_WARP)
    _gemv_launch((n, 1, 1), tensors, (), (k, bias is not None, block_k), warps)
    return out
