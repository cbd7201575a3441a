"""Counter-based sampling noise: a pure function of a request's key.

The key is (seed, sample index, generated index). The noise does not depend on batch, row, preemption or device.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's `>>` on int64 copies the sign bit down."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64, a bijection of 64 bits; int64 products wrap, as the algorithm requires."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


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
    stream = _mix(_mix(seeds) + (sample_indices + 1) * _GOLDEN)
    bits = _mix(stream + (gen_indices + 1) * _GOLDEN)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53
