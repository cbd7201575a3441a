"""Captures of a corpus on disk: `LM.harvest` writes a folder, `open_harvest` reads it. States for another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.extras import lazy_names

if TYPE_CHECKING:
    from .feed.handles import HandleError, StatesHandle, open_handle, share_states
    from .progress import HarvestError
    from .reader import Harvest, open_harvest

__all__ = ["HandleError", "Harvest", "HarvestError", "StatesHandle", "open_handle", "open_harvest", "share_states"]
_HANDLES = dict.fromkeys(("HandleError", "StatesHandle", "open_handle", "share_states"), "feed.handles")
__getattr__ = lazy_names(
    __name__, {"Harvest": "reader", "HarvestError": "progress", "open_harvest": "reader", **_HANDLES}
)
