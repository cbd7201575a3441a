"""Sizes of records, and slices of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...kernels.edit_codes import ALIGNED
from ..positions import progressions


def size_in(width: int, dtype: torch.dtype, of: torch.dtype) -> int:
    """Elements of dtype `of` that hold `width` values."""
    return -(-width * dtype.itemsize // of.itemsize)


def selected(runs: Sequence[torch.Tensor], records: np.ndarray) -> Iterator[torch.Tensor]:
    """Some of the records, [n, elements] each."""
    start = 0
    for run in runs:
        begin, end = np.searchsorted(records, (start, start + len(run)))
        for piece in _slices(records[begin:end] - start):
            yield run[piece]
        start += len(run)


def aligned(size: int) -> int:
    """The size, rounded up to whole `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def _slices(rows: np.ndarray) -> list[slice]:
    """Slices that select `rows`, integers in ascending order."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return [slice(int(rows[0]), int(rows[-1]) + 1)]
    return [slice(run.start, run.stop, run.step) for run in progressions(rows.tolist())]
