# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Codes of quantised weights as numbers, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decoded(codes, zero, KIND: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """Codes uint8 -> DTYPE, exactly, without the scale. `zero`, float32, broadcasts against the codes."""
    if KIND == "uint4" and DTYPE == tl.bfloat16:  # the code is the low bits of a bfloat16 from 128 to 143
        return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128.0).to(tl.bfloat16)
    return _decoded_float(codes, zero, KIND).to(DTYPE)


@triton.jit
def _decoded_float(codes, zero, KIND: tl.constexpr):
    """Variant of `_decoded` in float32."""
    if KIND == "fp8":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "fp4":
        code = codes.to(tl.int32)
        low = code & 7
        normal = ((((low >> 1) + 126) << 23) | ((low & 1) << 22)).to(tl.float32, bitcast=True)
        size = tl.where(low < 2, low.to(tl.float32) * 0.5, normal)
        return tl.where(code >= 8, -size, size)
    else:  # the code is the low bits of a float of 2^23: a conversion is slower
        return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)
