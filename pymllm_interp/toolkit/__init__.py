"""Experiments over an `LM`: `LM.patch_sweep`, `LM.attribute` and `LM.verbalize`; `contrast` makes control vectors, and
`loss_recovered` measures an SAE."""

from .contrasts import ControlVectors, contrast
from .loss_recovered import LossRecovered, loss_recovered
from .verbalize import Readings, fve

__all__ = ["ControlVectors", "LossRecovered", "Readings", "contrast", "fve", "loss_recovered"]
