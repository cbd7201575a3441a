# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""The largest logits of each row, and the log of its sum of exponentials, with the logits read once.

A kernel makes each block's maximum and sum of exponentials. The k largest logits are in the k blocks with the largest maxima. Only
these blocks go to torch's own top-k, which reads its input several times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _blocks(logits, largest, total, stride, vocab, blocks, BLOCK: tl.constexpr):
    """The maximum of a block, NaN if it has one, and the sum of exp(value - maximum)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(value, axis=0)
    top = tl.where(tl.max((value != value).to(tl.int32), axis=0) > 0, float("nan"), top)
    below = tl.where(value == top, 0.0, value - top)  # -inf less -inf is NaN
    tl.store(largest + row * blocks + block, top)
    tl.store(total + row * blocks + block, tl.sum(tl.exp(below), axis=0))


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest logits of each row, in descending order.

    Args:
        logits: [rows, vocab], any float dtype, last dim contiguous.

    Returns:
        ([rows, k] in the logits' dtype, [rows, k] int64, [rows] float32: the log of the sum of exponentials).
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    largest, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    if rows:
        _blocks[(rows, blocks)](logits, largest, sums, logits.stride(0), vocab, blocks, BLOCK)
    total = torch.logsumexp(largest + sums.log(), -1)
    if k >= blocks:
        values, indexes = logits.topk(k, dim=-1)
        return values, indexes, total
    first = largest.topk(k, dim=-1, sorted=False).indices.mul_(BLOCK)
    place = (first[..., None] + torch.arange(BLOCK, device=logits.device)).flatten(1)
    some = logits.gather(1, place.clamp(max=vocab - 1)).masked_fill_(place >= vocab, float("-inf"))
    values, indexes = some.topk(k, dim=-1)
    return values, place.gather(1, indexes), total
