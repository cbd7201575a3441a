"""Gigabytes of pinned host memory. Threads touch its pages first: cudaHostAlloc clears them in one thread, at 2 GB/s."""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

THREADS, PART = 8, 256 << 20


def pinned_memory(size: int) -> Tensor:
    """Zeros uint8 [size] in pinned memory, which is freed with the tensor and its views.
    Raises MemoryError: the system has too little memory, or CUDA cannot pin it."""
    try:
        pages = mmap.mmap(-1, size)
    except OSError as error:
        raise MemoryError(f"no host memory for {size:,} bytes: {error}") from None
    with suppress(AttributeError, OSError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    # NumPy's array, because a finalizer of `pages` runs after they are unmapped.
    owner = np.frombuffer(pages, np.uint8)
    memory = torch.from_numpy(owner)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(Tensor.zero_, memory.split(PART)))
    cudart: Any = torch.cuda.cudart()
    if status := int(cudart.cudaHostRegister(memory.data_ptr(), len(pages), 0)):
        with suppress(RuntimeError):  # CUDA keeps the error, and torch's next kernel raises it
            torch.ones(1, device="cuda")
        raise MemoryError(f"CUDA cannot pin {size:,} bytes of host memory: error {status}")
    weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
