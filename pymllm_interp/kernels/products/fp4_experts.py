# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
# As in triton_kernels.py.
"""`moe.expert_product` with weights in MXFP4, in the tiles of layers/quantization/expert_tiles.py.

A program multiplies a tile of one expert's entries with some blocks of 64 rows of its weight. It dequantises them in registers.
Codes times scales are exact in bfloat16. Sums have one order in every batch.

The weight is the left factor of the products: on Hopper that one may come from registers. A thread decodes two
neighbouring words into eight pairs of bfloat16. A pair has the same input of both words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents
from .moe import Sorted, Tiling, gated
from .quantized_codes import _decoded_float

TILINGS = (
    Tiling(16, 64, 128, 4, 3),
    Tiling(32, 128, 128, 4, 3),
    Tiling(64, 128, 128, 4, 3),
    Tiling(128, 128, 128, 8, 3),
)
"""Tilings, see `moe.TILINGS`. Channels are whole blocks of 64. The fastest of 2 to 12 for gpt-oss-20b on an H100."""

_HALF = """
and.b32 t, {half}, 0x81C081C0;
mul.rn.bf16x2 {a}, t, {first};
shl.b32 t, {half}, 3;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 {b}, t, {first};
shl.b32 t, {half}, 6;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 {c}, t, {second};
shl.b32 t, {half}, 1;
and.b32 t, t, 0x80008000;
shr.u32 u, {half}, 5;
lop3.b32 t, u, 0x01000100, t, 0xEA;
shr.u32 u, {half}, 4;
lop3.b32 t, u, 0x00C000C0, t, 0xEA;
mul.rn.bf16x2 {d}, t, {second};
"""
"""Lower or upper halves of two words -> four pairs. The first two have one scale, the others the next one."""
DECODE: tl.constexpr = tl.constexpr(
    "{\n.reg .b32 low, high, t, u;\nprmt.b32 low, $8, $9, 0x5410;\nprmt.b32 high, $8, $9, 0x7632;\n"
    + _HALF.format(half="low", a="$0", b="$1", c="$2", d="$3", first="$10", second="$12")
    + _HALF.format(half="high", a="$4", b="$5", c="$6", d="$7", first="$14", second="$16")
    + "}\n"
)
CONSTRAINTS: tl.constexpr = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 10))


@triton.jit
def _plain_value(word, scale_word, NUMBER: tl.constexpr, dtype: tl.constexpr):
    """Input NUMBER of words [rows, words], times its scale, without PTX."""
    half = (word >> (16 * (NUMBER // 4))) & 0xFFFF
    if NUMBER % 4 == 3:
        code = ((half >> 14) & 1) << 3 | ((half >> 13) & 1) << 2 | ((half >> 10) & 3)
    else:
        code = ((half >> (15 - 3 * (NUMBER % 4))) & 1) << 3 | ((half >> (6 - 3 * (NUMBER % 4))) & 7)
    exponent = (scale_word >> (8 * (NUMBER // 2))) & 0xFF
    scale = ((exponent - 126) << 23).to(tl.float32, bitcast=True)
    return (_decoded_float(code, 0.0, "fp4") * scale[:, None]).to(dtype)


@triton.jit
def _pair_scale(scale_word, NUMBER: tl.constexpr):
    """Scale NUMBER of scale words [rows] as both halves of a word, [rows, 1]."""
    return (((scale_word >> (8 * NUMBER)) & 0xFF) * 0x00800080)[:, None]


@triton.jit
def _values(word, scale_word, PTX: tl.constexpr, dtype: tl.constexpr):
    """Eight tensors [rows, words] in `dtype`: the inputs of each word."""
    if PTX:
        word, first = tl.broadcast(word, _pair_scale(scale_word, 0))
        word, second = tl.broadcast(word, _pair_scale(scale_word, 1))
        word, third = tl.broadcast(word, _pair_scale(scale_word, 2))
        word, fourth = tl.broadcast(word, _pair_scale(scale_word, 3))
        return tl.inline_asm_elementwise(
            DECODE, CONSTRAINTS, [word, first, second, third, fourth], (tl.bfloat16,) * 8, True, 2
        )
    return (
        _plain_value(word, scale_word, 0, dtype), _plain_value(word, scale_word, 1, dtype),
        _plain_value(word, scale_word, 2, dtype), _plain_value(word, scale_word, 3, dtype),
        _plain_value(word, scale_word, 4, dtype), _plain_value(word, scale_word, 5, dtype),
        _plain_value(word, scale_word, 6, dtype), _plain_value(word, scale_word, 7, dtype),
    )  # fmt: skip


@triton.jit
def _inputs(x_at, start, inputs, real, NUMBER: tl.constexpr, K: tl.constexpr):
    """Inputs [16, entries] that belong to input NUMBER of the words."""
    at = start + 16 * NUMBER
    return tl.load(x_at + at, mask=real[None, :] & (at + inputs < K)[:, None], other=0.0)


@triton.jit
def _add_step(sums, word_at, scale_at, x, PTX: tl.constexpr, dtype: tl.constexpr):
    """`sums` [rows, entries] plus the product of a tile with `x`, eight tensors [16, entries]."""
    values = _values(tl.load(word_at), tl.load(scale_at), PTX, dtype)
    for number in tl.static_range(8):
        sums = tl.dot(values[number], x[number], sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_entries", "alpha", "limit", "unit"])
def _fp4_product(
    x, words, scales, bias, scores, order, owners, out, num_entries, alpha, limit, unit, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    parts: tl.constexpr = 1 if GATE == "" else 2
    steps: tl.constexpr = (K + 127) // 128
    blocks: tl.constexpr = (N + 63) // 64
    groups: tl.constexpr = (blocks + BLOCKS - 1) // BLOCKS
    tile, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    entry = tl.load(order + tile * ENTRIES + tl.arange(0, ENTRIES)).to(tl.int64)
    real = entry < num_entries
    own = tl.arange(0, 64 * BLOCKS)
    channel = group * (64 * BLOCKS) + own
    known = channel < N
    # The last program's second block may not exist: it reads the last one again.
    block = tl.minimum(group * BLOCKS + own // 64, blocks - 1)
    row_at = (expert * blocks + block) * (steps * parts * 64) + own % 64
    word_at = words + row_at[:, None] * 16 + tl.arange(0, 16)[None, :]
    scale_at = scales + row_at
    inputs = tl.arange(0, 16)
    x_at = x + (entry // TOP_K)[None, :] * K + inputs[:, None]
    sums = tl.zeros((64 * BLOCKS, ENTRIES), tl.float32)
    up_sums = tl.zeros((64 * BLOCKS, ENTRIES), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = step * 128
        values = (
            _inputs(x_at, at, inputs, real, 0, K), _inputs(x_at, at, inputs, real, 1, K),
            _inputs(x_at, at, inputs, real, 2, K), _inputs(x_at, at, inputs, real, 3, K),
            _inputs(x_at, at, inputs, real, 4, K), _inputs(x_at, at, inputs, real, 5, K),
            _inputs(x_at, at, inputs, real, 6, K), _inputs(x_at, at, inputs, real, 7, K),
        )  # fmt: skip
        sums = _add_step(sums, word_at, scale_at, values, PTX, dtype)
        if GATE != "":
            up_sums = _add_step(up_sums, word_at + 64 * 16, scale_at + 64, values, PTX, dtype)
        word_at += parts * 64 * 16
        scale_at += parts * 64
    sums, up_sums = sums * unit, up_sums * unit
    step_of: tl.constexpr = 2 if GATE == "clamped" else 1
    if BIASED:
        bias_at = bias + expert * (N * parts) + channel * step_of
        sums += tl.load(bias_at, mask=known, other=0.0).to(tl.float32)[:, None]
        if GATE != "":
            to_up: tl.constexpr = 1 if GATE == "clamped" else N
            up_sums += tl.load(bias_at + to_up, mask=known, other=0.0).to(tl.float32)[:, None]
    value = gated(sums, up_sums, alpha, limit, GATE, dtype)
    if SCALED:
        score = tl.load(scores + entry, mask=real, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * score[None, :]).to(dtype)
    tl.store(out + entry[None, :] * N + channel[:, None], value, mask=known[:, None] & real[None, :])


_launch = Launcher(_fp4_product, pdl=True)


def expert_product(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, shift: int, rows: int, by_expert: Sorted, entries: int,
    gate: str, scores: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    clamp: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:  # fmt: skip
    """`moe.expert_product` with a weight in MXFP4.

    Args:
        words, scales, shift, rows: see `ExpertTiles`. Rows of a "clamped" gate are interleaved; rows of "silu" are not.
    """
    channels = rows // 2 if gate else rows
    out = torch.empty(entries, channels, dtype=x.dtype, device=x.device)
    tiling = by_expert.tiling
    blocks = tiling.channels // 64
    groups = triton.cdiv(triton.cdiv(channels, 64), blocks)
    ptx = x.is_cuda and x.dtype is torch.bfloat16
    form = channels, x.shape[-1], entries // len(x), gate, bias is not None, scores is not None, ptx
    others = x if bias is None else bias, x if scores is None else scores
    tensors = x, words, scales, *others, by_expert.order, by_expert.owners, out
    constants = (*form, tiling.entries, blocks, tiling.stages)
    grid = len(by_expert.owners) * groups, 1, 1
    _launch(grid, tensors, (entries, *clamp, 2.0**shift), constants, tiling.warps)
    return out
