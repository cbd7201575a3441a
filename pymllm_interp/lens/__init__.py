"""Other libraries' names over an `LM`: TransformerLens' `RemoteBridge` and nnterp's `StandardizedTransformer`.

from pymllm_interp import lens

bridge = lens.Bridge(lm)
logits, cache = bridge.run_with_cache("The Eiffel Tower is in", names_filter="blocks.3.hook_resid_post")

Each needs its library: ``pip install "pymllm-interp[lens]"``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bridge import Bridge
    from .nnterp import StandardizedLM

__all__ = ["Bridge", "StandardizedLM"]
_HOMES = {"Bridge": ("bridge", "transformer_lens"), "StandardizedLM": ("nnterp", "nnterp")}
"""Name -> its file, and the package that it needs."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    home, package = _HOMES[name]
    try:
        return getattr(import_module(f".{home}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f'pymllm_interp.lens.{name} needs {package}: pip install "pymllm-interp[lens]"', name=error.name
        ) from error
