"""RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.current_pass import current_site_ops
from ..core.forward_batch import Delta, ParallelDelta, SiteOps
from ..core.norm_kind import LAYER, RMS, RMS_OFFSET, RMS_ONCE
from .dispatch import kernels_for, triton_kernels_for
from .edits.base import apply_at


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: int = RMS) -> torch.Tensor:
    """The norm of x over the last dim, as in transformers: float32 inside.

    Args:
        kind: `RMS`, `RMS_OFFSET` or `RMS_ONCE` (core/norm_kind.py).
    """
    if (kernels := kernels_for(x, weight)) is not None:
        return kernels.rms_norm(x, weight, eps, kind)
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    if kind == RMS:
        return weight * normed.to(x.dtype)
    return (normed * (weight.float() if kind == RMS_ONCE else 1.0 + weight.float())).to(x.dtype)


def add_rms_norm(
    h: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, kind: int = RMS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h', `rms_norm` of h') with ``h' = h + delta`` in h's dtype. Without a delta, h' is h itself.

    h and delta are [..., size]; neither is written to.
    """
    if delta is None:
        return h, rms_norm(h, weight, eps, kind)
    if (kernels := kernels_for(h, delta, weight)) is not None:
        return kernels.add_rms_norm(h, delta, weight, eps, kind)
    h = h + delta
    return h, rms_norm(h, weight, eps, kind)


def norm_heads(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, kv_heads: int, eps: float, kind: int = RMS
) -> torch.Tensor:
    """qkv [tokens, heads + 2 * kv_heads, head_dim] with each head of q and k normalised; the heads of v are unchanged.

    On CUDA `qkv` is written in place and returned. Do not use it afterwards.
    """
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if (kernels := triton_kernels_for(qkv)) is not None:
        kernels.rms_norm_(q, q_weight, eps, kind)
        kernels.rms_norm_(k, k_weight, eps, kind)
        return qkv
    return torch.cat((rms_norm(q, q_weight, eps, kind), rms_norm(k, k_weight, eps, kind), v), dim=1)


class NormModule(nn.Module):
    """x [..., size] -> [..., size].

    Attributes:
        kind: see core/norm_kind.py.
        output_site: the site of its output with ops that it applies; None: it applies no ops.
    """

    kind: int
    eps: float
    output_site: int | None
    weight: nn.Parameter

    @property
    def kernel_weight(self) -> torch.Tensor:
        """Weight [size] of kernels (core/norm_kind.py)."""
        return self.weight

    @abstractmethod
    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, without ops."""

    @abstractmethod
    def add_normalize(self, h: torch.Tensor, delta: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(h + delta, its norm); without a delta (h, its norm). h is not written to."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.normalize(hidden_states)
        return normed if self.output_site is None else apply_at(normed, current_site_ops(), self.output_site)

    def after_add(
        self, h: torch.Tensor, delta: Delta | None, site_ops: SiteOps | None = None, residual_add: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_normalize` in a fused pass, with the ops and captures of the residual add (core/model_spec.py)."""
        if site_ops is None or delta is None:
            return self.add_normalize(h, delta)
        return site_ops.add_norm(residual_add, h, delta, self)


class RMSNorm(NormModule):
    """RMS norm of Llama."""

    kind = RMS

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: str, *, output_site: int | None = None
    ) -> None:
        super().__init__()
        self.output_site = output_site
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), False)
        self.variance_epsilon = self.eps = eps

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.kind)

    def add_normalize(self, h: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(h, delta, self.weight, self.eps, self.kind)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class OffsetRMSNorm(RMSNorm):
    """Gemma's norm. It stores its weight less 1."""

    kind = RMS_OFFSET


class OnceRMSNorm(RMSNorm):
    """gpt-oss' norm: rounded once, after the weight has multiplied."""

    kind = RMS_ONCE


class LayerNorm(NormModule, nn.LayerNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """LayerNorm with a bias. Weight and bias are views of one tensor, which kernels read."""

    kind = LAYER

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: str, *, output_site: int | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = (size,), eps, True
        self.output_site = output_site
        self._both = torch.empty(2, size, dtype=dtype, device=device)
        self.weight, self.bias = (nn.Parameter(row, False) for row in self._both)

    @property
    def kernel_weight(self) -> torch.Tensor:
        return self._both

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        if (kernels := triton_kernels_for(x)) is not None:
            return kernels.layer_norm(x, self._both, self.eps)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def add_normalize(self, h: torch.Tensor, delta: Delta | None) -> tuple[torch.Tensor, torch.Tensor]:
        if delta is None:
            return h, self.normalize(h)
        mlp, attention = (delta.mlp, delta.attention) if isinstance(delta, ParallelDelta) else (delta, None)
        if (kernels := triton_kernels_for(h)) is not None:
            return kernels.add_layer_norm(h, mlp, self._both, self.eps, attention)
        h = h + (mlp if attention is None else mlp + attention)
        return h, self.normalize(h)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.LayerNorm:
        """An `nn.LayerNorm` with its own weights."""
        copied = nn.LayerNorm(list(self.normalized_shape), self.eps, device="meta")
        copied.weight, copied.bias = deepcopy(self.weight, memo), deepcopy(self.bias, memo)
        memo[id(self)] = copied
        return copied.train(self.training)
