"""Running out of memory, as an error that says what to lower and holds no memory itself.

The error that torch raises keeps memory: its traceback has the frames of the failed call, with their tensors. A caller
or notebook that keeps the error has no room for the next try.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
SIGNS = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Substrings of untyped out-of-memory errors of torch: host memory, pinned memory, and libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a device or of the host could not be had."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error) for sign in SIGNS)


def within_memory(function: Callable[[], T], advice: str) -> T:
    """Call `function`, and add advice to an out-of-memory error.
    Raises torch.OutOfMemoryError: it found no memory: `advice`, then what torch said."""
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    # Out here, so that it has no context: `error` would be in it.
    raise torch.OutOfMemoryError(f"{advice}\n{reason}")
