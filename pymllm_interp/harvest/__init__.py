"""Captures of a corpus on disk: `LM.harvest` writes a folder, `open_harvest` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.extras import lazy_names

if TYPE_CHECKING:
    from .reader import Harvest, open_harvest
    from .result import HarvestError

__all__ = ["Harvest", "HarvestError", "open_harvest"]
__getattr__ = lazy_names(__name__, {"Harvest": "reader", "HarvestError": "result", "open_harvest": "reader"})
