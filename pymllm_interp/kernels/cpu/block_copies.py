"""Copies of many blocks of host memory in one call, without the GIL."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from ctypes import c_char, c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch

from .cpu_build import ISAS, BuildError, load_library

logger = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""Fewest bytes that a thread copies."""
CopyBlocks = Callable[[np.ndarray, np.ndarray, np.ndarray, int], None]
"""(addresses to copy to, addresses to copy from, bytes of each block; most threads). Blocks do not overlap."""


@functools.cache
def load_block_copies() -> CopyBlocks:
    """The function, compiled at the first call on a machine; `copy_by_torch` without a compiler."""
    try:
        function = load_library(Path(__file__).with_name("block_copies.cpp"), ISAS[-1]).copy_blocks
    except (BuildError, OSError) as error:
        logger.info("captured states are copied by torch, which takes the GIL more often: %s", error)
        return copy_by_torch
    function.argtypes, function.restype = (c_void_p, c_void_p, c_void_p, c_int64, c_int64), None

    def copy_blocks(to: np.ndarray, source: np.ndarray, sizes: np.ndarray, threads: int) -> None:
        to, source, sizes = (np.ascontiguousarray(each, dtype=np.int64) for each in (to, source, sizes))
        wanted = int(min(threads, max(1, sizes.sum() // PART_BYTES)))
        addresses = (each.__array_interface__["data"][0] for each in (to, source, sizes))
        function(*addresses, to.size, wanted)

    return copy_blocks


def copy_by_torch(to: np.ndarray, source: np.ndarray, sizes: np.ndarray, threads: int) -> None:
    """Copy blocks by one call of torch, which takes the GIL once, on one thread."""
    addresses = [(each, size) for each, size in zip(to.ravel().tolist(), sizes.ravel().tolist(), strict=True) if size]
    if addresses:
        sources = zip(source.ravel().tolist(), sizes.ravel().tolist(), strict=True)
        torch._foreach_copy_(list(_tensors(addresses)), list(_tensors([each for each in sources if each[1]])))


def _tensors(blocks: list[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Tensors of the blocks (address, bytes)."""
    return (torch.frombuffer((c_char * size).from_address(at), dtype=torch.uint8) for at, size in blocks)
