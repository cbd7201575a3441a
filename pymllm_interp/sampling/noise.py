"""Counter-based sampling noise: a pure function of a request's key.

The key is (seed, sample index, generated index). The noise does not depend on batch, row, preemption or device.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

_Ints = TypeVar("_Ints", torch.Tensor, np.ndarray)
"""int64: products wrap."""
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: _Ints, bits: int) -> _Ints:
    """Logical shift: `>>` on int64 copies the sign bit down."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: _Ints) -> _Ints:
    """The finaliser of SplitMix64, a bijection of 64 bits; int64 products wrap, as the algorithm requires."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _bits(seeds: _Ints, sample_indices: _Ints, gen_indices: _Ints) -> _Ints:
    stream = _mix(_mix(seeds) + (sample_indices + 1) * _GOLDEN)
    return _shift_right(_mix(stream + (gen_indices + 1) * _GOLDEN), 11)


def uniform_noise(
    seeds: torch.Tensor,  # [rows] int64
    sample_indices: torch.Tensor,  # [rows] int64
    gen_indices: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """One number in [0, 1) for each row, with 53 random bits.

    A request's numbers are a SplitMix64 stream. Its state is a hash of the request's seed and sample index.

    Returns:
        [rows] float64, bit-equal on every device.
    """
    return _bits(seeds, sample_indices, gen_indices).to(torch.float64) * 2.0**-53


def host_noise(keys: np.ndarray) -> np.ndarray:
    """`uniform_noise` of keys [3, rows] int64 on the host: [rows] float64. On a device it takes 26 launches."""
    return _bits(*keys).astype(np.float64) * 2.0**-53
