"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..core.current_pass import current_site_ops
from ..core.forward_batch import SiteOps
from .dispatch import kernels_for, triton_kernels_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / rms(x)`` over the last dim, as in transformers: float32 inside, rounded to x's dtype before the weight."""
    if (kernels := kernels_for(x, weight)) is not None:
        return kernels.rms_norm(x, weight, eps)
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def add_rms_norm(
    h: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h', `rms_norm` of h') with ``h' = h + delta`` in h's dtype. Without a delta, h' is h itself.

    h and delta are [..., size]; neither is written to.
    """
    if delta is None:
        return h, rms_norm(h, weight, eps)
    if (kernels := kernels_for(h, delta, weight)) is not None:
        return kernels.add_rms_norm(h, delta, weight, eps)
    h = h + delta
    return h, rms_norm(h, weight, eps)


def norm_heads(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, kv_heads: int, eps: float
) -> torch.Tensor:
    """qkv [tokens, heads + 2 * kv_heads, head_dim] with each head of q and k normalised; the heads of v are unchanged.

    On CUDA `qkv` is written in place and returned. Do not use it afterwards.
    """
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if (kernels := triton_kernels_for(qkv)) is not None:
        kernels.rms_norm_(q, q_weight, eps)
        kernels.rms_norm_(k, k_weight, eps)
        return qkv
    return torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v), dim=1)


class RMSNorm(nn.Module):
    """x [..., size] -> [..., size].

    Args:
        final: it is the model's final norm, with a site at its output.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: str, *, final: bool = False) -> None:
        super().__init__()
        self.final = final
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), False)
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden_states, self.weight, self.variance_epsilon)
        site_ops = current_site_ops() if self.final else None
        return normed if site_ops is None else site_ops.at(site_ops.final_site, normed)

    def after_add(
        self, h: torch.Tensor, delta: torch.Tensor | None, site_ops: SiteOps | None = None, residual_add: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_rms_norm` in a fused pass, with the ops and captures of the residual add (core/model_spec.py)."""
        if site_ops is None or delta is None:
            return add_rms_norm(h, delta, self.weight, self.variance_epsilon)
        return site_ops.add_rms_norm(residual_add, h, delta, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"
