"""Host values to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch

ALIGNMENT = 16


def upload(device: torch.device | str, *host: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The arrays on `device`, in fresh memory: to CUDA in one copy, whatever their number.

    The copy goes through pinned memory. From pageable memory it would wait for all work of the stream.
    """
    tensors = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in host]
    if torch.device(device).type != "cuda":
        return tuple(tensor.to(device, copy=True) for tensor in tensors)
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for tensor, offset in zip(tensors, offsets, strict=True):
        pinned[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    arena = pinned.to(device, non_blocking=True)
    return tuple(
        arena[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    )
