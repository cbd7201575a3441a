"""Experiments over an `LM`: `LM.patch_sweep`, `LM.attribute`, `LM.circuit` and `LM.verbalize`. `contrast` makes control vectors,
and `loss_recovered` measures an SAE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.extras import lazy_names

if TYPE_CHECKING:
    from .alignment import AlignedSubspace
    from .circuits.circuit import Circuit
    from .contrasts import ControlVectors, contrast
    from .edges.scores import EdgeScores
    from .sae_loss import LossRecovered, loss_recovered
    from .verbalize import Readings, fve

__all__ = [
    "AlignedSubspace", "Circuit", "ControlVectors", "EdgeScores", "LossRecovered", "Readings", "contrast", "fve", "loss_recovered",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "AlignedSubspace": "alignment",
        "Circuit": "circuits.circuit",
        "EdgeScores": "edges.scores",
        **dict.fromkeys(("ControlVectors", "contrast"), "contrasts"),
        **dict.fromkeys(("LossRecovered", "loss_recovered"), "sae_loss"),
        **dict.fromkeys(("Readings", "fve"), "verbalize"),
    },
)
