"""Division of quantised weights into blocks, and the group sizes that kernels support. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_K = 128
PART_WIDTH = 1024
"""Inputs of a part at least."""
EXPERT_GROUP = 32
"""Inputs of a scale of MXFP4, in the kernel for experts."""
MIN_BLOCK_K = {8: 16, 4: 32}
"""Bits of a code -> inputs of a block at least. Tensor cores take 16; a byte of 4-bit codes has two."""


class Tile(NamedTuple):
    """Tile of `few_rows` and `many_rows`: rows and channels of a block, warps, stages."""

    rows: int
    channels: int
    warps: int
    stages: int


def divided(width: int, parts: int, block: int) -> tuple[int, int]:
    """(parts, inputs of each) for this many inputs.

    Args:
        width: inputs.
        parts: maximum number of parts; at least one.
        block: the inputs of a part are a multiple of it.
    """
    parts = max(1, min(parts, width // PART_WIDTH))
    part = -(-width // (parts * block)) * block
    return -(-width // part), part


def has_expert_kernel(kind: str, width: int, group_size: int) -> bool:
    """Whether a kernel for experts takes weights of this kind and shape: `fp4_experts`, or `quantized_experts` for FP8."""
    if kind == "fp4":
        return group_size == EXPERT_GROUP and width % EXPERT_GROUP == 0
    depth = min(group_size, BLOCK_K)
    return (
        kind == "fp8"
        and depth >= MIN_BLOCK_K[8]
        and not (depth & depth - 1)
        and group_size % depth == 0 == width % depth
    )


def block_of(bits: int, width: int, group_size: int) -> int | None:
    """Inputs of a block of `few_rows`; None: no kernel takes these groups.

    Args:
        bits: bits of a code.
        width: inputs.
        group_size: inputs of a scale.
    """
    block = BLOCK_K
    while (group_size < width and group_size % block) or (bits == 4 and width % block):
        block //= 2
    return block if block >= MIN_BLOCK_K[bits] else None
