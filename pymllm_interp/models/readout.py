"""`ModelReadout`: the norms and the head of a model as functions of rows. No op, capture or trace acts on them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.model_spec import ModelSpec
from ..hooks.site import Site
from ..layers.activation import softcap
from ..layers.linear import Linear
from ..layers.norm import NormModule


class ModelReadout:
    """Norm and head of a model (`hooks.captures.reduction.Readout`).

    Args:
        model: native, or of transformers.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self._model, self._spec = model, spec
        config: Any = model.config  # pyright: ignore[reportAssignmentType]
        self._config = getattr(config, "text_config", None) or config

    def norm(self, site: Site, rows: Tensor, gain: bool = True) -> Tensor:
        """Norm at a site, applied to rows [n, hidden] of the residual stream.
        Raises NotImplementedError: without the gain, of a norm that is neither a LayerNorm nor an RMSNorm."""
        module: Any = self._model.get_submodule(self._spec.family.point(site).module)
        if not gain:
            return self._without_gain(module, rows)
        if isinstance(module, NormModule):
            return module.normalize(rows)
        return _unhooked(module, rows)

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [n, vocab] of rows [n, hidden] of `final_norm`, scaled and soft-capped as the model's."""
        head: Any = self._model.get_submodule(self._spec.family.head)
        logits = head.project(rows[None])[0] if isinstance(head, Linear) else _unhooked(head, rows)
        config = self._config
        if self._spec.num_labels is not None:
            return logits
        if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere's
            logits = logits * factor
        for name in ("logits_scaling", "logits_mup_width_multiplier"):  # Granite's, Inkling's
            if (divisor := getattr(config, name, None)) is not None:
                logits = logits / divisor
        if (size := getattr(config, "unpadded_vocab_size", None)) is not None:  # Inkling's
            logits = logits[..., :size]
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else softcap(logits, cap)

    @staticmethod
    def _without_gain(module: Any, rows: Tensor) -> Tensor:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        name = type(module).__name__
        if eps is None or not name.endswith(("LayerNorm", "RMSNorm")):
            raise NotImplementedError(f"{name} has no form without its gain: give norm_gain=True")
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(rows.float(), rows.shape[-1:], None, None, eps).to(rows.dtype)
        return F.rms_norm(rows.float(), rows.shape[-1:], None, eps).to(rows.dtype)


def _unhooked(module: nn.Module, rows: Tensor) -> Tensor:
    """Output of a module for rows [n, hidden], without hooks: they belong to passes."""
    function = type(module).forward
    return function(module, rows[None])[0]
