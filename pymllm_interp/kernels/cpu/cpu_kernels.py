"""The CPU's counterpart of triton_kernels.py, with the same names. Compiled at import (cpu_build.py).

Like the Triton kernels, they return the bits of torch's kernels for the same formula. Only the order of sums and the last bit of
``exp`` may differ. A row's result does not depend on the other rows, nor on the number of threads.

Raises (at import):
    BuildError: the kernels cannot be compiled here.
    ValueError: see `cpu_build.max_isa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from ...core.norm_kind import RMS
from .cpu_build import ISAS, load_library, max_isa

POINTER, SIZE, FLOAT, FLAG = c_void_p, c_int64, c_float, c_int
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
ATTENTION_WIDTH = 16
"""Decode passes run attention here for multiples of this as head_dim, and by torch for others."""

_library = load_library(Path(__file__).with_name("cpu_kernels.cpp"), max_isa())
_isa = _library.init(ISAS.index(max_isa()))
BFLOAT16_ISA = None if _isa < 0 else ISAS[_isa]
"""The instructions that products of bfloat16 take: one of `cpu_build.ISAS`. None: this processor has no such products."""


def _kernel(name: str, *types: Any, dtypes: dict[torch.dtype, str] = DTYPES) -> dict[torch.dtype, Any]:
    """dtype -> function. The last parameter of each is the number of threads."""
    found = {dtype: getattr(_library, f"{name}_{suffix}") for dtype, suffix in dtypes.items()}
    for function in found.values():
        function.argtypes, function.restype = (*types, c_int), None
    return found


_rms_norm = _kernel("rms_norm", *[POINTER] * 5, *[SIZE] * 5, FLOAT, FLAG)
_rope = _kernel("rope", *[POINTER] * 7, *[SIZE] * 8, FLAG)
_argmax = _kernel("argmax", *[POINTER] * 2, *[SIZE] * 3)
_silu = _kernel("silu", *[POINTER] * 2, *[SIZE] * 2, FLAG)
_attention = _kernel("decode_attention", *[POINTER] * 7, *[SIZE] * 6, FLOAT, FLOAT, POINTER)
_gemm_dtypes = {torch.float32: "f32"} if BFLOAT16_ISA is None else DTYPES
_gemm = _kernel("gemm", *[POINTER] * 4, *[SIZE] * 3, dtypes=_gemm_dtypes)
_decode_layer = _kernel("decode_layer", *[POINTER] * 24, *[SIZE] * 9, *[FLOAT] * 3, dtypes=_gemm_dtypes)


# -- norm ------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: int = RMS) -> torch.Tensor:
    """x [..., size] -> the same shape in fresh memory. `kind` is RMS, RMS_OFFSET or RMS_ONCE."""
    size = x.shape[-1]
    if weight.shape[0] != size:
        raise RuntimeError(f"the norm's weight has {weight.shape[0]} elements, and the input has {size}")
    inner, outer_stride, inner_stride = 1, size, 0
    if not x.is_contiguous():
        if x.dim() == 3 and x.stride(2) == 1:  # [tokens, heads, head_dim], a slice of a merged product
            inner, (outer_stride, inner_stride, _) = x.shape[1], x.stride()
        else:
            x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    address = x.data_ptr()
    _rms_norm[x.dtype](
        address, None, weight.data_ptr(), None, out.data_ptr(), x.numel() // size, size, inner, outer_stride, inner_stride,
        eps, kind, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, kind: int = RMS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta, its norm), both fresh memory; h and delta [..., size]."""
    h, delta, size = h.contiguous(), delta.contiguous(), h.shape[-1]
    total, out = torch.empty_like(h), torch.empty_like(h)
    _rms_norm[h.dtype](
        h.data_ptr(), delta.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(), h.numel() // size, size, 1, size,
        0, eps, kind, torch.get_num_threads(),
    )  # fmt: skip
    return total, out


# -- rope ------------------------------------------------------------------------


def rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] rotated by a `rotation` of layers/rope.py; fresh memory."""
    return _launch_rope(x, cos, signed_sin, None, None, None, 0)


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor | None = None,
    by_head: bool = False,
) -> torch.Tensor:
    """Rotate q and k, and write k and v to `slots` of the caches. Returns q in `out`, contiguous, or in fresh memory.

    qkv is [tokens, heads + 2 * kv_heads, head_dim]; the caches are [slots, kv_heads, head_dim], in its dtype. Without cos and
    signed_sin nothing is rotated. `by_head`: q, k and v of each head follow each other.
    """
    return _launch_rope(qkv, cos, signed_sin, k_cache, v_cache, slots, k_cache.shape[1], out, by_head)


def _launch_rope(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor | None,
    kv_heads: int,
    out: torch.Tensor | None = None,
    by_head: bool = False,
) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    if cos is None or signed_sin is None:
        cos = signed_sin = x.new_empty(tokens, 1, 0)
    turned = cos.shape[2]
    if cos.shape[:2] != (tokens, 1) or turned > head_dim:
        raise RuntimeError(f"the rotation has shape {list(cos.shape)}, and the input has {list(x.shape)}")
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, signed_sin = _in_rows(cos, signed_sin)
    out = x.new_empty(tokens, heads - 2 * kv_heads, head_dim) if out is None else out
    caches = [None if tensor is None else tensor.data_ptr() for tensor in (k_cache, v_cache, slots)]
    _rope[x.dtype](
        x.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(), out.data_ptr(), *caches, tokens, heads - 2 * kv_heads, kv_heads,
        head_dim, turned, x.stride(0), x.stride(1), cos.stride(0), by_head, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _in_rows(cos: torch.Tensor, signed_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation with each row in one piece, and the same distance of rows in both."""
    if cos.stride(2) == 1 and cos.stride() == signed_sin.stride():
        return cos, signed_sin
    return cos.contiguous(), signed_sin.contiguous()


# -- activation --------------------------------------------------------------------


def silu(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] -> the same shape."""
    return _launch_silu(x, x.shape[-1], False)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]: ``silu(gate) * up``, with silu rounded before the product."""
    return _launch_silu(gate_up, gate_up.shape[-1] // 2, True)


def _launch_silu(x: torch.Tensor, size: int, gated: bool) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], size)
    if out.numel():
        _silu[x.dtype](x.data_ptr(), out.data_ptr(), out.numel() // size, size, gated, torch.get_num_threads())
    return out


# -- argmax ------------------------------------------------------------------------


def argmax(x: torch.Tensor) -> torch.Tensor:
    """x [rows, size], last dim contiguous -> [rows] int32: the largest, the first of equals; a NaN counts as largest."""
    rows, size = x.shape
    out = x.new_empty(rows, dtype=torch.int32)
    _argmax[x.dtype](x.data_ptr(), out.data_ptr(), rows, size, x.stride(0), torch.get_num_threads())
    return out


# -- attention ---------------------------------------------------------------------


def decode_attention(
    q: torch.Tensor,  # [requests, heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    table: torch.Tensor,  # [rows, positions] int32, slots
    table_rows: torch.Tensor,  # [requests] int64
    lens: torch.Tensor,  # [requests] int32
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: torch.Tensor | None = None,  # [heads] float32
) -> torch.Tensor:
    """Attention of one query for each request: [requests, heads * head_dim]. All are contiguous; q, K and V have one dtype."""
    requests, heads, head_dim = q.shape
    out = q.new_empty(requests, heads * head_dim)
    _attention[q.dtype](
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), table.data_ptr(), table_rows.data_ptr(), lens.data_ptr(),
        out.data_ptr(), requests, heads, k_cache.shape[1], head_dim, table.stride(0), window or 0, scale, cap or 0.0,
        _address(sinks), torch.get_num_threads(),
    )  # fmt: skip
    return out


# -- a layer -----------------------------------------------------------------------


def decode_layer(
    h: torch.Tensor,  # [1, requests, hidden]
    delta: torch.Tensor | None,  # [1, requests, hidden]
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor,
    lens: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor],
    head_norms: tuple[torch.Tensor, torch.Tensor] | None,
    products: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    eps: float,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decoder layer with one query for each request: the kernels above, one after the other.

    Args:
        h, delta: the hidden state is their sum.
        cos, signed_sin: a `rotation` of layers/rope.py, two halves of one tensor.
        slots, table, table_rows, lens: see `rope_and_write` and `decode_attention`.
        norms: weights of the norms before attention and MLP.
        head_norms: weights of the norms of each head of q and k.
        products: weight and bias of q, k and v together, of o, of gate and up together, and of down.

    Returns:
        (h, delta) of the next layer, both fresh memory.
    """
    h, total, out = h.contiguous(), torch.empty_like(h), torch.empty_like(h)
    (_, requests, hidden), (_, kv_heads, head_dim) = h.shape, k_cache.shape
    assert len(lens) == len(table_rows) == len(slots) == requests, "one query for each request, without padding"
    cos, signed_sin = _in_rows(cos, signed_sin)
    addresses = [address for pair in products for address in (pair[0].data_ptr(), _address(pair[1]))]
    q_norm, k_norm = head_norms or (None, None)
    _decode_layer[h.dtype](
        h.data_ptr(), _address(delta), total.data_ptr(), out.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(),
        k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(), table.data_ptr(), table_rows.data_ptr(), lens.data_ptr(),
        norms[0].data_ptr(), _address(q_norm), _address(k_norm), norms[1].data_ptr(), *addresses,
        requests, hidden, products[1][0].shape[1] // head_dim, kv_heads, head_dim, products[3][0].shape[1], cos.stride(0),
        table.stride(0), window or 0, eps, scale, cap or 0.0, torch.get_num_threads(),
    )  # fmt: skip
    return total, out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# -- products ----------------------------------------------------------------------


def has_gemm(dtype: torch.dtype) -> bool:
    """Whether this processor has a `gemm` of the dtype: of bfloat16 those with AVX2."""
    return dtype in _gemm


def gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in], contiguous weight [out, in], bias [out] -> [..., out]. Sums in float32."""
    n, k = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], n)
    address = None if bias is None else bias.data_ptr()
    _gemm[x.dtype](
        x.data_ptr(), weight.data_ptr(), address, out.data_ptr(), x.numel() // k, n, k, torch.get_num_threads()
    )
    return out
