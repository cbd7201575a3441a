"""Selects between Triton kernels, the CPU's kernels and plain torch."""

from __future__ import annotations

from types import ModuleType

import torch

from ..kernels.cpu.cpu_dispatch import cpu_kernels_for

_kernels: ModuleType | None = None


def kernels_for(x: torch.Tensor, *others: torch.Tensor) -> ModuleType | None:
    """`triton_kernels_for` a CUDA tensor; on a CPU, `cpu_kernels_for` x and the others. None: use plain torch."""
    return triton_kernels_for(x) if x.is_cuda else cpu_kernels_for(x, *others)


def triton_kernels_for(x: torch.Tensor) -> ModuleType | None:
    """`triton_kernels` for a tensor on the current CUDA device without gradients; else None.

    Triton is imported at first use: it is not needed on a CPU. It always launches on the current device.
    """
    global _kernels
    if not x.is_cuda or torch.is_grad_enabled() or x.get_device() != torch.cuda.current_device():
        return None
    if _kernels is None:  # an import statement takes as long as this whole function, even of a loaded module
        from ..kernels import triton_kernels

        _kernels = triton_kernels
    return _kernels
