"""pymllm-interp: an LLM serving runtime that a researcher can reach into.

Names are imported when they are first used, so that `pymllm-interp --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.output import RequestOutput
    from .core.request import SamplingParams
    from .engine.lm import LM
    from .runner.interp_model_runner import InterpModelRunner
    from .runner.model_runner import ModelRunner

_HOMES = {
    "LM": "engine.lm",
    "InterpModelRunner": "runner.interp_model_runner",
    "ModelRunner": "runner.model_runner",
    "RequestOutput": "core.output",
    "SamplingParams": "core.request",
}

__all__ = ["LM", "InterpModelRunner", "ModelRunner", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
