"""`StreamNorm`: a model's norm of the stream as a function, its frozen linear part, and the transpose of its Jacobian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.norm_kind import LAYER, RMS_OFFSET


class StreamNorm:
    """A norm of rows [..., hidden], in float32.

    Args:
        module: RMSNorm or LayerNorm, native or of transformers; None: the identity.

    Attributes:
        bias: [hidden] float32, or None.

    Raises:
        NotImplementedError: a module of another kind.
    """

    bias: Tensor | None

    def __init__(self, module: nn.Module | None) -> None:
        self._is_identity, self.bias = module is None, None
        if module is None:
            return
        name, kind = type(module).__name__, getattr(module, "kind", None)
        eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-5))  # OLMo's norm has no attribute
        if not name.endswith("Norm") or not isinstance(eps, float):
            raise NotImplementedError(f"{name} is neither an RMSNorm nor a LayerNorm")
        self._eps = eps
        self._centered = kind == LAYER or (kind is None and not name.endswith("RMSNorm"))
        weight, bias = (getattr(module, part, None) for part in ("weight", "bias"))
        is_offset = kind == RMS_OFFSET or (kind is None and name.startswith(("Gemma", "VaultGemma")))
        self._gain: Any = 1.0 if weight is None else weight.float() + (1.0 if is_offset else 0.0)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x."""
        found = self.frozen(x, x)
        return found if self._is_identity or self.bias is None else found + self.bias

    def frozen(self, x: Tensor, part: Tensor) -> Tensor:
        """The share of the output, less the bias, that a summand `part` of x makes with the scale of x."""
        if self._is_identity:
            return part.float()
        return self._gain * self._less_mean(part.float()) * self._scale(self._less_mean(x.float()))

    def constant(self, rows: Tensor) -> Tensor:
        """Products of the bias with rows [n, hidden]: [n] float32."""
        return rows.new_zeros(len(rows), dtype=torch.float32) if self.bias is None else rows.float() @ self.bias

    def back(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradient at x from the gradient at the output, through the scale, too."""
        if self._is_identity:
            return grad.float()
        x, up = self._less_mean(x.float()), self._gain * grad.float()
        scale = self._scale(x)
        down = scale * up - scale**3 * x * (x * up).mean(-1, keepdim=True)
        return self._less_mean(down)

    def _less_mean(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self._centered else x

    def _scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)
