"""transformers' linear layers, standard RMSNorm and rotation in native kernels.

A module keeps its class and its place. An `nn.Linear` runs `layers.linear.LinearForward`. A norm with the code of
`LlamaRMSNorm.forward` runs `layers.norm.rms_norm`. An attention with Llama's `apply_rotary_pos_emb` in its file runs its code
with that name bound to `layers.rope.apply_rope`. The last two round as transformers' formulas do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama

from ...core.current_pass import current_batch
from ...layers.linear import LinearForward
from ...layers.norm import rms_norm
from ...layers.rope import apply_rope, rotation_of

ROTATE = "apply_rotary_pos_emb"


def fuse_parts(model: nn.Module) -> None:
    """Run the kernels in the model's modules. Calls of a block on other states run transformers' code."""
    for module in model.modules():
        forward: Any = inspect.unwrap(type(module).forward)  # transformers wraps it to rename parameters
        if not isinstance(forward, FunctionType) or "forward" in vars(module):
            continue
        if type(module) is nn.Linear:
            # Under a separate name, too: traces wrap `forward`.
            module._linear_forward = module.forward = LinearForward(module)  # pyright: ignore
        elif _same_code(forward, modeling_llama.LlamaRMSNorm.forward):
            module.forward = _Norm(module)  # pyright: ignore[reportAttributeAccessIssue]
        elif _has_standard_rotation(forward):
            module.forward = MethodType(_with_kernel(forward), module)  # pyright: ignore[reportAttributeAccessIssue]


class _Norm:
    """The forward of a norm."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own: Any = type(module).forward

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self._module.weight
        if current_batch() is None or torch.is_grad_enabled() or weight.dtype != hidden_states.dtype:
            return self._own(self._module, hidden_states)
        return rms_norm(hidden_states, weight, self._module.variance_epsilon)


def _same_code(function: Any, other: Any) -> bool:
    ours, theirs = function.__code__, other.__code__
    return (ours.co_code, ours.co_names) == (theirs.co_code, theirs.co_names)


def _has_standard_rotation(forward: FunctionType) -> bool:
    """Whether a forward rotates whole heads as Llama's does."""
    names, found = forward.__globals__, ROTATE in forward.__code__.co_names
    return found and all(
        isinstance(names.get(name), FunctionType) and _same_code(names[name], getattr(modeling_llama, name))
        for name in (ROTATE, "rotate_half")
    )


def _with_kernel(forward: FunctionType) -> FunctionType:
    """The same code, in which `apply_rotary_pos_emb` is the kernel."""
    names = {**forward.__globals__, ROTATE: _rotation(forward.__globals__[ROTATE])}
    bound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__, bound.__module__ = forward.__kwdefaults__, forward.__module__
    return bound


def _rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k [1, heads, tokens, head_dim], rotated by cos and sin [1, tokens, head_dim]."""
        batch = current_batch()
        standard = unsqueeze_dim == 1 and q.shape[0] == 1 and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if batch is None or torch.is_grad_enabled() or not standard or cos.dtype != q.dtype:
            return own(q, k, cos, sin, unsqueeze_dim)
        rotation = rotation_of(batch, cos, sin)
        rotated = (apply_rope(x[0].transpose(0, 1), *rotation).transpose(0, 1).unsqueeze(0) for x in (q, k))
        return tuple(rotated)  # pyright: ignore[reportReturnType]

    return apply_rotary_pos_emb
