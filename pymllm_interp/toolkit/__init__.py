"""Experiments over an `LM`: `LM.patch_sweep`, `LM.attribute` and `LM.verbalize`; `contrast` makes control vectors."""

from .contrasts import ControlVectors, contrast
from .verbalize import Readings, fve

__all__ = ["ControlVectors", "Readings", "contrast", "fve"]
