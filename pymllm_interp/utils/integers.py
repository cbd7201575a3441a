"""Memory of tensors as NumPy sees it: NumPy has no bfloat16."""

from __future__ import annotations

import numpy as np
import torch

INTEGERS = {2: torch.int16, 4: torch.int32}
"""Itemsize -> integer dtype in which NumPy views the values."""


def as_integers(values: torch.Tensor) -> np.ndarray:
    """The same memory, as integers of the same width."""
    return values.view(INTEGERS[values.dtype.itemsize]).numpy()


def as_numbers(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of such integers, in `dtype` or float32."""
    if dtype is torch.bfloat16:  # the upper half of a float32
        return (values.astype(np.int32) << 16).view(np.float32)
    return values.view(np.float16 if dtype is torch.float16 else np.float32)
