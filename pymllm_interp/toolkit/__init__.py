"""Experiments over an `LM`. Their calls are `LM.patch_sweep` and `LM.attribute`; `contrast` makes control vectors."""

from .contrasts import ControlVectors, contrast

__all__ = ["ControlVectors", "contrast"]
