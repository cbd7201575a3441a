"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / rms(x)`` over the last dim: float32 inside, rounded to x's dtype before the weight, as transformers does."""
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x [..., size] -> [..., size]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), False)
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"
