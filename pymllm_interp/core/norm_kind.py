"""Kinds of norms. Kernels are compiled for one kind; layers/norm.py has the modules."""

from __future__ import annotations

from typing import Any, Protocol

import torch

RMS = 0
"""``weight * x / rms(x)``, rounded before the weight multiplies (Llama)."""
RMS_OFFSET = 1
"""``x / rms(x) * (1 + weight)``, rounded once (Gemma)."""
LAYER = 2
"""``(x - mean(x)) / std(x) * weight + bias``, rounded once."""
RMS_ONCE = 3
"""``weight * x / rms(x)``, rounded once (gpt-oss)."""


class Norm(Protocol):
    """A norm over the last dim, as the ops of a pass see it."""

    # fmt: off
    kind: int
    eps:  float
    # fmt: on

    @property
    def kernel_weight(self) -> torch.Tensor:
        """Weight [size] as kernels read it; for LayerNorm, weight and bias [2, size]."""
        ...

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [..., size], without ops."""
        ...

    def add_normalize(self, h: torch.Tensor, delta: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(``h + delta``, its norm), without ops."""
        ...
