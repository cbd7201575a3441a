# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
# As in triton_kernels.py.
"""`moe.expert_product` with quantised weights: MXFP4 (codes of 4 bits, a power of 2 for each 32 inputs) and FP8.

A program multiplies a tile of one expert's entries with some rows of its weight, which it dequantises in registers. Weights in
MXFP4 are exact in bfloat16. Scales of FP8 multiply the float32 sum of their inputs. Sums have one order in every batch.

A byte of MXFP4 has an input of each half of 64 (`QuantizedWeight.pair` is 32). So one scale belongs to all low codes of a block,
and one to all high codes. Both kinds of codes are multiplied with neighbouring inputs. The scales of two blocks are one word
(`words_of`): single bytes cannot be copied ahead of the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents
from .moe import Sorted, Tiling, gated
from .quantized import _decoded_float
from .quantized_blocks import BLOCK_K, EXPERT_PAIR

TILINGS = (Tiling(16, 64, 128, 4, 4), Tiling(32, 64, 128, 4, 4), Tiling(64, 64, 128, 4, 3), Tiling(128, 64, 128, 8, 3))
"""As `moe.TILINGS`. FP8 with groups of fewer inputs has steps of a group."""

DECODE: tl.constexpr = tl.constexpr("""
{
.reg .b32 byte, sign, rest, power;
mov.b32 power, 0x7E807E80;
prmt.b32 byte, $4, 0, 0x1404;
and.b32 sign, byte, 0x80008000;
shr.u32 rest, byte, 6;
and.b32 rest, rest, 0x01C001C0;
or.b32 rest, rest, sign;
mul.rn.bf16x2 rest, rest, power;
mul.rn.bf16x2 $2, rest, $7;
shl.b32 sign, byte, 4;
and.b32 sign, sign, 0x80008000;
shr.u32 rest, byte, 2;
and.b32 rest, rest, 0x01C001C0;
or.b32 rest, rest, sign;
mul.rn.bf16x2 rest, rest, power;
mul.rn.bf16x2 $0, rest, $5;
prmt.b32 byte, $4, 0, 0x3424;
and.b32 sign, byte, 0x80008000;
shr.u32 rest, byte, 6;
and.b32 rest, rest, 0x01C001C0;
or.b32 rest, rest, sign;
mul.rn.bf16x2 rest, rest, power;
mul.rn.bf16x2 $3, rest, $8;
shl.b32 sign, byte, 4;
and.b32 sign, sign, 0x80008000;
shr.u32 rest, byte, 2;
and.b32 rest, rest, 0x01C001C0;
or.b32 rest, rest, sign;
mul.rn.bf16x2 rest, rest, power;
mul.rn.bf16x2 $1, rest, $6;
}
""")
"""Four bytes -> four low and four high codes in bfloat16, times their scales.

A byte is moved to the upper half of 16 bits. A code's sign becomes the sign. Its other bits become the last two bits of the
exponent and the first of the mantissa. That number, which may be subnormal, is 2^126 times too small.
"""


@triton.jit
def _decoded_pairs(code, word, FIRST: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr):
    """(low, high) codes in `dtype`, times their scales.

    `code` is [rows, columns] uint8, `word` [rows] int32. Byte FIRST of a word scales low codes, the next one high codes.
    """
    low_power, high_power = (word >> (8 * FIRST)) & 0xFF, (word >> (8 * FIRST + 8)) & 0xFF
    if PACKED:
        low_scale = (low_power << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
        high_scale = (high_power << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
        code, low_scale = tl.broadcast(code, low_scale)
        code, high_scale = tl.broadcast(code, high_scale)
        return tl.inline_asm_elementwise(
            DECODE, "=r,=r,=r,=r,r,r,r,r,r", [code, low_scale, high_scale], (tl.bfloat16, tl.bfloat16), True, 4
        )
    low_scale = (low_power << 23).to(tl.float32, bitcast=True)[:, None]
    high_scale = (high_power << 23).to(tl.float32, bitcast=True)[:, None]
    low, high = _decoded_float(code & 15, 0.0, "fp4") * low_scale, _decoded_float(code >> 4, 0.0, "fp4") * high_scale
    return low.to(dtype), high.to(dtype)


@triton.jit
def _fp4_block(sums, code_at, word, known, low, high, FIRST: tl.constexpr, PACKED: tl.constexpr):
    """`sums` [rows, entries] plus the product of a block of codes with both halves of its inputs [inputs / 2, entries]."""
    code = tl.load(code_at, mask=known[:, None], other=0)
    first, second = _decoded_pairs(code, word, FIRST, PACKED, low.dtype)
    sums = tl.dot(first, low, sums, input_precision="ieee")
    return tl.dot(second, high, sums, input_precision="ieee")


@triton.jit
def _fp8_step(sums, code_at, scale_at, known, values):
    """`sums` [rows, entries] plus the product of codes with inputs [inputs, entries] of one scale."""
    code = tl.load(code_at, mask=known[:, None], other=0)
    weight = code.to(tl.float8e4nv, bitcast=True).to(values.dtype)
    scale = tl.load(scale_at, mask=known, other=0.0).to(tl.float32)
    return sums + tl.dot(weight, values, input_precision="ieee") * scale[:, None]


@triton.jit(do_not_specialize=["num_entries", "alpha", "limit"])
def _codes_product(
    x, codes, scales, bias, scores, order, owners, out, num_entries, alpha, limit, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr, TOP_K: tl.constexpr, GATE: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    parts: tl.constexpr = (N + CHANNELS - 1) // CHANNELS
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    entry = tl.load(order + tile * ENTRIES + tl.arange(0, ENTRIES)).to(tl.int64)
    real = entry < num_entries
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < N
    # Rows of gate and up: next to each other, or all of gate before all of up.
    step: tl.constexpr = 2 if GATE == "clamped" else 1
    to_up: tl.constexpr = 1 if GATE == "clamped" else N
    first = expert * (N if GATE == "" else 2 * N) + channel * step
    sums = tl.zeros((CHANNELS, ENTRIES), tl.float32)
    up_sums = tl.zeros((CHANNELS, ENTRIES), tl.float32)
    row = entry // TOP_K
    if KIND == "fp4":
        half = tl.arange(0, DEPTH // 4)
        x_at = x + row[None, :] * K + half[:, None]
        code_at = codes + first[:, None] * (K // 2) + half[None, :]
        rows: tl.constexpr = N if GATE == "" else 2 * N
        chunks: tl.constexpr = (K + DEPTH - 1) // DEPTH
        word_at = scales + expert * (chunks * rows) + channel * step
        for start in range(0, K, DEPTH):
            word = tl.load(word_at, mask=known, other=0)
            up_word = tl.load(word_at + to_up, mask=known, other=0) if GATE != "" else word
            word_at += rows
            for block in tl.static_range(2):  # the last step may have one block
                at = start + block * (DEPTH // 2)
                inside = at + tl.arange(0, 1) < K
                mask, there = real[None, :] & inside[:, None], known & inside
                low = tl.load(x_at + at, mask=mask, other=0.0)
                high = tl.load(x_at + at + DEPTH // 4, mask=mask, other=0.0)
                sums = _fp4_block(sums, code_at + at // 2, word, there, low, high, 2 * block, PACKED)
                if GATE != "":
                    up_at = code_at + to_up * (K // 2) + at // 2
                    up_sums = _fp4_block(up_sums, up_at, up_word, there, low, high, 2 * block, PACKED)
    else:
        groups: tl.constexpr = (K + GROUP - 1) // GROUP
        inputs = tl.arange(0, DEPTH)
        x_at = x + row[None, :] * K + inputs[:, None]
        code_at = codes + first[:, None] * K + inputs[None, :]
        scale_at = scales + first * groups
        for start in range(0, K, DEPTH):
            values = tl.load(x_at + start, mask=real[None, :], other=0.0)
            sums = _fp8_step(sums, code_at + start, scale_at + start // GROUP, known, values)
            if GATE != "":
                up_at, up_scale_at = code_at + to_up * K + start, scale_at + to_up * groups + start // GROUP
                up_sums = _fp8_step(up_sums, up_at, up_scale_at, known, values)
    if BIASED:
        sums += tl.load(bias + first, mask=known, other=0.0).to(tl.float32)[:, None]
        if GATE != "":
            up_sums += tl.load(bias + first + to_up, mask=known, other=0.0).to(tl.float32)[:, None]
    value = gated(sums, up_sums, alpha, limit, GATE, dtype)
    if SCALED:
        score = tl.load(scores + entry, mask=real, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * score[None, :]).to(dtype)
    where = out + entry[None, :] * N + channel[:, None]
    tl.store(where, value, mask=known[:, None] & real[None, :])


_launches = {stages: Launcher(_codes_product, pdl=True, num_stages=stages) for stages in {t.stages for t in TILINGS}}


def expert_product(
    x: torch.Tensor, kind: str, codes: torch.Tensor, scales: torch.Tensor, group_size: int, experts: int, by_expert: Sorted,
    entries: int, gate: str, scores: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    clamp: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:  # fmt: skip
    """`moe.expert_product` with a weight of codes.

    Args:
        kind, codes, scales, group_size: of a `QuantizedWeight` [experts * rows, in]; see `has_expert_kernel`.
        experts: number of experts.
    """
    rows, width = codes.shape[0] // experts, x.shape[-1]
    channels = rows // 2 if gate else rows
    out = torch.empty(entries, channels, dtype=x.dtype, device=x.device)
    tiling = by_expert.tiling
    depth = 4 * EXPERT_PAIR if kind == "fp4" else min(group_size, BLOCK_K)
    grid = (len(by_expert.owners) * triton.cdiv(channels, tiling.channels), 1, 1)
    packed = x.is_cuda and x.dtype is torch.bfloat16
    form = channels, width, group_size, kind, packed, entries // len(x), gate, bias is not None, scores is not None
    others = x if bias is None else bias, x if scores is None else scores
    tensors = x, codes.view(torch.uint8), scales, *others, by_expert.order, by_expert.owners, out
    constants = (*form, tiling.entries, tiling.channels, depth)
    _launches[tiling.stages](grid, tensors, (entries, *clamp), constants, tiling.warps)
    return out
