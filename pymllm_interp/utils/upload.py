"""Host values to the device without waiting for it, and as bytes."""

from __future__ import annotations

import numpy as np
import torch

ALIGNMENT = 16


def upload(device: torch.device | str, *host: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The arrays on `device`, in fresh memory: to CUDA in one copy, whatever their number.

    The copy goes through pinned memory. From pageable memory it would wait for all work of the stream.
    """
    tensors = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x.detach() for x in host]
    if torch.device(device).type != "cuda":
        return tuple(tensor.to(device, copy=True) for tensor in tensors)
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    packed = pinned.numpy()
    for tensor, offset in zip(tensors, offsets, strict=True):
        # By NumPy, which takes a fraction of torch's time for small arrays; it has no bfloat16.
        array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
        packed[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    arena = pinned.to(device, non_blocking=True)
    typed = {dtype: arena.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}

    def found(tensor: torch.Tensor, offset: int) -> torch.Tensor:
        flat = typed[tensor.dtype].as_strided((tensor.numel(),), (1,), offset // tensor.itemsize)
        return flat if tensor.ndim == 1 else flat.view(tensor.shape)

    return tuple(found(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers in row order as bytes, [nbytes] uint8: a view where they lie so."""
    flat = tensor.contiguous()
    # A tensor of one number may have a stride of zero, as `expand` makes it. It is contiguous, and `view(dtype)` refuses it.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
