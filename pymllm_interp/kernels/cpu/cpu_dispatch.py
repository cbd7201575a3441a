"""Selects between the CPU's compiled kernels and plain torch."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

DTYPES = frozenset((torch.float32, torch.bfloat16))


def cpu_kernels_for(x: torch.Tensor, *others: torch.Tensor) -> ModuleType | None:
    """`cpu_kernels`, for tensors of one dtype on a CPU, without gradients; else None: use plain torch.

    None, too, if the kernels cannot be compiled.
    """
    if torch.is_grad_enabled() or x.dtype not in DTYPES or not x.is_cpu:
        return None
    for other in others:
        if other.dtype is not x.dtype:
            return None
    return cpu_kernels()


@cache
def cpu_kernels() -> ModuleType | None:
    """The module `cpu_kernels`; None if it cannot be compiled."""
    try:
        from . import cpu_kernels
    except ImportError as error:
        logger.warning("plain torch is used in place of compiled kernels: %s", error)
        return None
    return cpu_kernels
