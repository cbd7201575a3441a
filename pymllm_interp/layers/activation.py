"""What stands between a feed-forward block's products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import kernels_for


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``, float32 inside; fresh memory.

    On CUDA a kernel of ours, not torch's: `gated` computes it too, and the last bit of an exponential is a matter of who
    computes it.
    """
    if (kernels := kernels_for(x)) is not None:
        return kernels.silu(x)
    return F.silu(x)


def gated(gate_up: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]: ``act(gate) * up``; one kernel on CUDA where `act` is `silu`."""
    if act is silu and (kernels := kernels_for(gate_up)) is not None:
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    # Contiguous, as `gate_proj` serves it: exp's last bit depends on where a CPU's vectors begin.
    return act(gate.contiguous()) * up


class SiLU(nn.Module):
    """`silu`, as a module of the tree."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return silu(input)
