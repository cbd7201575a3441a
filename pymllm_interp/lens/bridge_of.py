"""The `Bridge` of an `LM`, for the methods of TransformerLens' cache. Its library is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..client.calls.model import ClientModel
from ..utils.extras import library_of_extra

if TYPE_CHECKING:
    from .bridge import Bridge


def bridge_of(lm: ClientModel) -> Bridge:
    """A new `Bridge` over `lm`.

    Raises:
        ModuleNotFoundError: transformer-lens is not installed.
        TypeError: an `LM` of a server.
    """
    with library_of_extra("the method of TransformerLens' ActivationCache", "transformer_lens", "lens"):
        from .bridge import Bridge
    return Bridge(lm)
