# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false
# Launches pass options that are not in the kernel's signature, and plain numbers for `constexpr` parameters.
"""Triton kernels and their launches. The public functions and the torch references are in norm.py, rope.py and so on.

Every kernel returns the same bits as torch's kernels for the same formula. Exceptions are the order of sums and the last bit of
``exp`` and ``rsqrt``:

- Intermediate results that torch would write to memory are rounded to the model's dtype.
- `enable_fp_fusion` is off: a fused multiply-add skips the rounding of the product.
- The fused and the module-by-module pass use the same kernel, with a flag. Block sizes depend on the width of a row, not on the
  number of rows. So the sums of a row have one order in every batch.

Numbers that a model fixes (widths, strides, heads) are compile-time constants. Numbers that change from pass to pass are not,
so that a new batch size compiles nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launcher, grid_wait, launch_dependents
from .triton_activation import gelu, gelu_mul, silu, silu_mul, softcap
from .triton_norm import add_layer_norm, add_rms_norm, layer_norm, norm_launch, rms_norm, rms_norm_

__all__ = [
    "add_layer_norm", "add_rms_norm", "gelu", "gelu_mul", "gemv", "layer_norm", "norm_launch", "rms_norm", "rms_norm_", "rope",
    "rope_and_write", "silu", "silu_mul", "softcap",
]  # fmt: skip

ROPE_HEADS, ROPE_WARPS = 16, 4
"""Heads and warps per program of `rope`."""
GEMV_BLOCKS = 4096, 2048
"""Elements of a weight's row that a program loads at a time: the first divisor, else the last."""
GEMV_WARP = 512
"""Elements per warp of `gemv`."""


# -- rope ------------------------------------------------------------------------


@triton.jit
def _turn(x, other, cos, signed_sin, dtype: tl.constexpr, product: tl.constexpr):
    straight = (x.to(tl.float32) * cos).to(product)
    crossed = (other.to(tl.float32) * signed_sin).to(product)
    return (straight.to(tl.float32) + crossed.to(tl.float32)).to(dtype)


@triton.jit
def _stored(values, scale, dtype: tl.constexpr):
    """Values as a cache of `dtype` stores them: for FP8 (E4M3), divided by a scale and rounded. Larger ones become 448."""
    if dtype == tl.float8e4nv:
        values = tl.div_rn(values.to(tl.float32), tl.full([1, 1], 1.0, tl.float32) * scale)
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    return values.to(dtype)


@triton.jit(do_not_specialize=["k_scale", "v_scale"])
def _rope(
    x, cos, signed_sin, out, k_cache, v_cache, slots, k_scale, v_scale, X_STRIDE: tl.constexpr, X_HEAD_STRIDE: tl.constexpr,
    TURN_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TURNED: tl.constexpr,
    BY_HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads into `out` and the next KV_HEADS heads into `k_cache`; copy the last KV_HEADS heads to `v_cache`.

    The first TURNED channels of a head are rotated, and the others copied. With BY_HEAD q, k and v of each head follow each
    other.
    """
    launch_dependents(PDL)
    grid_wait(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    product: tl.constexpr = tl.float32 if cos.dtype.element_ty == tl.float32 else dtype
    half: tl.constexpr = TURNED // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    place = head
    if BY_HEAD:
        place = head % HEADS * 3 + head // HEADS
    if TURNED < HEAD_DIM:
        rest = TURNED + tl.arange(0, REST_BLOCK)[None, :]
        there = (head < HEADS + 2 * KV_HEADS) & (rest < HEAD_DIM)
        kept = tl.load(x + token * X_STRIDE + place * X_HEAD_STRIDE + rest, mask=there)
        tl.store(out + (token * HEADS + head) * HEAD_DIM + rest, kept, mask=there & (head < HEADS))
        if KV_HEADS > 0:
            first_head = tl.load(slots + token).to(tl.int64) * KV_HEADS
            is_key = there & (head >= HEADS) & (head < HEADS + KV_HEADS)
            is_value = there & (head >= HEADS + KV_HEADS)
            key = k_cache + (first_head + head - HEADS) * HEAD_DIM + rest
            value = v_cache + (first_head + head - HEADS - KV_HEADS) * HEAD_DIM + rest
            tl.store(key, _stored(kept, k_scale, k_cache.dtype.element_ty), mask=is_key)
            tl.store(value, _stored(kept, v_scale, v_cache.dtype.element_ty), mask=is_value)
    if TURNED == 0:
        return
    column = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS + 2 * KV_HEADS) & (column < half)
    source = x + token * X_STRIDE + place * X_HEAD_STRIDE + column
    first, second = tl.load(source, mask=mask), tl.load(source + half, mask=mask)
    angle = token * TURN_STRIDE + column
    cos_first = tl.load(cos + angle, mask=column < half).to(tl.float32)
    cos_second = tl.load(cos + angle + half, mask=column < half).to(tl.float32)
    sin_first = tl.load(signed_sin + angle, mask=column < half).to(tl.float32)
    sin_second = tl.load(signed_sin + angle + half, mask=column < half).to(tl.float32)
    turned_first = _turn(first, second, cos_first, sin_first, dtype, product)
    turned_second = _turn(second, first, cos_second, sin_second, dtype, product)
    target = out + (token * HEADS + head) * HEAD_DIM + column
    tl.store(target, turned_first, mask=mask & (head < HEADS))
    tl.store(target + half, turned_second, mask=mask & (head < HEADS))
    if KV_HEADS > 0:
        row = tl.load(slots + token).to(tl.int64) * KV_HEADS
        is_key = mask & (head >= HEADS) & (head < HEADS + KV_HEADS)
        key = k_cache + (row + head - HEADS) * HEAD_DIM + column
        tl.store(key, _stored(turned_first, k_scale, k_cache.dtype.element_ty), mask=is_key)
        tl.store(key + half, _stored(turned_second, k_scale, k_cache.dtype.element_ty), mask=is_key)
        is_value = mask & (head >= HEADS + KV_HEADS)
        value = v_cache + (row + head - HEADS - KV_HEADS) * HEAD_DIM + column
        tl.store(value, _stored(first, v_scale, v_cache.dtype.element_ty), mask=is_value)
        tl.store(value + half, _stored(second, v_scale, v_cache.dtype.element_ty), mask=is_value)


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
    turned: int | None = None,
    by_head: bool = False,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    out = x.new_empty(tokens, heads - 2 * kv_heads, head_dim) if out is None else out
    if cos.stride(-1) != 1 or signed_sin.stride() != cos.stride():
        cos, signed_sin = cos.contiguous(), signed_sin.contiguous()
    if tokens:
        turned = head_dim if turned is None else turned
        head_block = min(ROPE_HEADS, 1 << (heads - 1).bit_length())
        half_block = 1 << max(turned // 2 - 1, 0).bit_length()
        rest_block = 1 << max(head_dim - turned - 1, 0).bit_length()
        strides = (x.stride(0), x.stride(1), cos.stride(0))
        shape = (heads - 2 * kv_heads, kv_heads, head_dim, turned, by_head)
        tensors = (x, cos, signed_sin, out, k_cache, v_cache, slots)
        constants = (*strides, *shape, head_block, half_block, rest_block)
        _rope_launch((tokens, -(-heads // head_block), 1), tensors, kv_scales, constants, ROPE_WARPS)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], last dim contiguous, rotated by a `rotation` of layers/rope.py; fresh memory.

    Products are rounded to the dtype of x, or not at all by a `rotation` in float32.
    """
    return _launch_rope(x, cos, signed_sin, x, x, x, 0, turned=cos.shape[-1])


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor | None = None,
    by_head: bool = False,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Rotate q and k, and write k and v to `slots` of the caches. Returns q in `out`, contiguous, or in fresh memory.

    qkv is [tokens, heads + 2 * kv_heads, head_dim] with a contiguous last dim; the caches are [slots, kv_heads, head_dim]. Without
    cos and signed_sin nothing is rotated. `by_head`: q, k and v of each head follow each other. Caches in FP8 get k and v
    divided by `kv_scales`.
    """
    kv_heads = k_cache.shape[1]
    if cos is None or signed_sin is None:
        return _launch_rope(qkv, qkv, qkv, k_cache, v_cache, slots, kv_heads, out, 0, by_head, kv_scales)
    return _launch_rope(qkv, cos, signed_sin, k_cache, v_cache, slots, kv_heads, out, cos.shape[-1], by_head, kv_scales)


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
