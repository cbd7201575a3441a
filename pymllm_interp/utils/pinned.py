"""Gigabytes of pinned host memory. Threads touch its pages first: cudaHostAlloc clears them in one thread, at 2 GB/s."""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

THREADS, PART = 8, 256 << 20


def pinned_memory(size: int) -> Tensor:
    """Zeros uint8 [size] in pinned memory, which is freed with the tensor and its views.

    Raises:
        MemoryError: the system has too little memory, or CUDA cannot pin it.
    """
    try:
        pages = mmap.mmap(-1, size)
    except OSError as error:
        raise MemoryError(f"no host memory for {size:,} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(Tensor.zero_, memory.split(PART)))
    cudart: Any = torch.cuda.cudart()
    if status := int(cudart.cudaHostRegister(memory.data_ptr(), len(pages), 0)):
        raise MemoryError(f"CUDA cannot pin {size:,} bytes of host memory: error {status}")
    weakref.finalize(pages, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
