"""The largest logits of each row."""

from __future__ import annotations

import torch


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest logits of each row, in descending order.

    Args:
        logits: [rows, vocab].

    Returns:
        ([rows, k], [rows, k] int64, [rows] float32: the log of the sum of exponentials).
    """
    if logits.is_cuda and logits.get_device() == torch.cuda.current_device():
        from ..kernels import triton_top_k

        return triton_top_k.top_k(logits.contiguous(), k)
    values, indexes = logits.topk(k, dim=-1)
    return values, indexes, logits.float().logsumexp(-1)
