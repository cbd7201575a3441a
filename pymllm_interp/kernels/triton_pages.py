# pyright: reportCallIssue=false, reportArgumentType=false
"""Lists the KV pages of a batch in one launch. `flashinfer_backend._fill_kv_indices` is the same in plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
SPLITS = 4
"""Programs per request: a long context has thousands of pages."""


# One compiled kernel: where prompt rows follow an odd number of decode rows, addresses are no multiples of 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["out", "kv_indptr", "rows"])
def _kernel(out, kv_indptr, rows, req_to_token, width, page_size, splits: tl.constexpr, block: tl.constexpr):
    request = tl.program_id(0)
    first = tl.load(kv_indptr + request)
    count = tl.load(kv_indptr + request + 1) - first
    table = req_to_token + tl.load(rows + request) * width
    for start in range(tl.program_id(1) * block, count, splits * block):
        at = start + tl.arange(0, block)
        slot = tl.load(table + at * page_size, mask=at < count, other=0)
        tl.store(out + first + at, slot // page_size, mask=at < count)


def fill_kv_indices(
    out: torch.Tensor, kv_indptr: torch.Tensor, rows: torch.Tensor, req_to_token: torch.Tensor, page_size: int
) -> None:
    """Write the pages of all requests, concatenated.

    Args:
        out: [pages] int32 or longer.
        kv_indptr: [batch + 1] int32, start of each request's pages in `out`.
        rows: [batch] int64, rows of `req_to_token` [table rows, positions] int32.
    """
    _kernel[(len(rows), SPLITS)](
        out, kv_indptr, rows, req_to_token, req_to_token.shape[1], page_size, splits=SPLITS, block=BLOCK
    )
