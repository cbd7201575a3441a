"""Which tensors Triton's kernels take."""

from __future__ import annotations

from types import ModuleType

import torch

_kernels: ModuleType | None = None


def kernels_for(x: torch.Tensor) -> ModuleType | None:
    """`triton_kernels` for tensors on the current CUDA device, in passes without gradients; None for all others: plain torch.

    Triton is imported here, at first use: a CPU needs none. It launches on the current device, whatever its arguments' is.
    """
    global _kernels
    if not x.is_cuda or torch.is_grad_enabled() or x.get_device() != torch.cuda.current_device():
        return None
    if _kernels is None:  # an import that finds the module loaded takes as long as all of this
        from ..layers import triton_kernels

        _kernels = triton_kernels
    return _kernels
