"""A step's input rows in one launch; `input_batch._lay_out` is the same in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from .launch import Launcher

BLOCK, WARPS = 128, 4


class InputTensors(Protocol):
    """The input buffers that the kernel writes, by token row (`input_batch.InputBuffers`)."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    rows: torch.Tensor
    op_rows: torch.Tensor
    seq_lens: torch.Tensor


@triton.jit(do_not_specialize=["count", "width"])
def _kernel(
    tokens, last_sampled_tokens, edited, req_to_token, input_ids, positions, out_cache_loc, table_rows, op_rows, seq_lens,
    count, width, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    token_id = tl.load(tokens + at, mask=inside, other=0)
    position = tl.load(tokens + count + at, mask=inside, other=0)
    row = tl.load(tokens + 2 * count + at, mask=inside, other=0)
    sampled = tl.load(last_sampled_tokens + row, mask=inside & (token_id < 0), other=0)
    has_ops = tl.load(edited + row, mask=inside, other=0)
    slot = tl.load(req_to_token + row * width + position, mask=inside, other=0)
    tl.store(input_ids + at, tl.where(token_id < 0, sampled, token_id), mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(out_cache_loc + at, slot.to(tl.int64), mask=inside)
    tl.store(table_rows + at, row, mask=inside)
    tl.store(op_rows + at, tl.where(has_ops != 0, row, -1), mask=inside)
    tl.store(seq_lens + at, (position + 1).to(tl.int32), mask=inside)


_launch = Launcher(_kernel)


def lay_out(
    buffers: InputTensors,
    tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    edited: torch.Tensor,
    req_to_token: torch.Tensor,
) -> None:
    """Fill the buffers' first rows: tokens [3, rows] int64, contiguous, as `InputBuffers.lay_out` describes them.

    last_sampled_tokens [table rows] int64; edited [table rows] int32; req_to_token [table rows, positions] int32.
    """
    count = tokens.shape[1]
    tensors = (
        tokens, last_sampled_tokens, edited, req_to_token, buffers.input_ids, buffers.positions, buffers.out_cache_loc,
        buffers.rows, buffers.op_rows, buffers.seq_lens,
    )  # fmt: skip
    _launch((-(-count // BLOCK), 1, 1), tensors, (count, req_to_token.shape[1]), (BLOCK,), WARPS)
