"""Host values to the device without waiting for it."""

from __future__ import annotations

import torch


def upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`host`, a tensor on the CPU, on `device`.

    Through pinned memory: from pageable memory the copy to CUDA would wait for all work that the stream still has to do.
    """
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
