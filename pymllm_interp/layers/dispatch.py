"""Which tensors Triton's kernels take."""

from __future__ import annotations

from types import ModuleType

import torch


def kernels_for(x: torch.Tensor) -> ModuleType | None:
    """`triton_kernels` for tensors on the current CUDA device, in passes without gradients; None for all others: plain torch.

    Triton is imported here, at first use: a CPU needs none. It launches on the current device, whatever its arguments' is.
    """
    if not x.is_cuda or torch.is_grad_enabled() or x.get_device() != torch.cuda.current_device():
        return None
    from . import triton_kernels

    return triton_kernels
