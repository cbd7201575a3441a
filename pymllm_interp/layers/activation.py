"""Activation functions of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..core.unsupported import UnsupportedModelError
from . import invariant
from .dispatch import kernels_for, triton_kernels_for

Activation = Callable[[torch.Tensor], torch.Tensor]


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``, computed in float32; fresh memory.

    On CUDA this is a native kernel, as in `gated`: two implementations of exp differ in the last bit.
    """
    if (kernels := kernels_for(x)) is not None:
        return kernels.silu(x)
    return F.silu(x)


def gelu(x: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """GELU (Hendrycks and Gimpel, 2016), computed in float32; `tanh`: by its approximation. On CUDA as `silu`."""
    if (kernels := triton_kernels_for(x)) is not None:
        return kernels.gelu(x, tanh)
    return F.gelu(x, approximate="tanh" if tanh else "none")


gelu_tanh = partial(gelu, tanh=True)
FUNCTIONS: dict[str, Activation] = {
    "silu": silu, "gelu": gelu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh,
}  # fmt: skip
"""Names in configs -> functions with kernels."""


INVARIANT: dict[Activation, Activation] = {gelu: invariant.gelu, gelu_tanh: partial(invariant.gelu, tanh=True)}
"""Functions with last bits that depend on the place in the batch, on a CPU -> the functions of batch-invariant mode."""


def activation(name: str) -> Activation:
    """The function of a config's name: native, or else transformers'.
    Raises UnsupportedModelError: in batch-invariant mode, a function of transformers."""
    if (function := FUNCTIONS.get(name)) is None:
        return _of_transformers(name)
    return INVARIANT.get(function, function) if invariant.invariant_device() == "cpu" else function


def _of_transformers(name: str) -> nn.Module:
    if invariant.invariant_device() is not None and name not in ("relu", "relu2"):
        raise UnsupportedModelError(f"batch_invariant=True: the activation function {name!r} is not batch-invariant")
    from transformers.activations import ACT2FN  # which imports much else

    return ACT2FN[name]


def gated(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]: ``act(gate) * up``; one kernel if `act` has one."""
    if act is silu and (kernels := kernels_for(gate_up)) is not None:
        return kernels.silu_mul(gate_up)
    if (act is gelu or act is gelu_tanh) and (kernels := triton_kernels_for(gate_up)) is not None:
        return kernels.gelu_mul(gate_up, act is gelu_tanh)
    gate, up = gate_up.chunk(2, dim=-1)
    # Contiguous, as the output of `gate_proj`: the last bit of exp depends on the alignment of the CPU's vectors.
    return act(gate.contiguous()) * up


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)``; fresh memory."""
    if (kernels := triton_kernels_for(x)) is not None:
        return kernels.softcap(x, cap)
    return torch.tanh(x / cap) * cap


class SiLU(nn.Module):
    """Module of the SiLU function."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return silu(input)


class GELU(nn.Module):
    """Module of the GELU function, exact or with tanh."""

    def __init__(self, tanh: bool = False) -> None:
        super().__init__()
        self._function = activation("gelu_new" if tanh else "gelu")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._function(input)


def activation_module(name: str) -> nn.Module:
    """Module of an activation function by its name."""
    function = FUNCTIONS.get(name)
    if function is None:
        return _of_transformers(name)
    return SiLU() if function is silu else GELU(function is gelu_tanh)
