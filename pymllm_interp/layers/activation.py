"""Activation functions of the MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import kernels_for


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``, computed in float32; fresh memory.

    On CUDA this is our kernel and not torch's, because two implementations of exp differ in the last bit and `gated` uses
    ours.
    """
    if (kernels := kernels_for(x)) is not None:
        return kernels.silu(x)
    return F.silu(x)


def gated(gate_up: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]: ``act(gate) * up``; one kernel where `act` is `silu`."""
    if act is silu and (kernels := kernels_for(gate_up)) is not None:
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    # Contiguous, as the output of `gate_proj`: the last bit of exp depends on the alignment of the CPU's vectors.
    return act(gate.contiguous()) * up


class SiLU(nn.Module):
    """`silu` as a module."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return silu(input)
