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
    from .hooks.intervention import Ablate, Capture, Clamp, Gate, Generated, Patch, Scale, Steer
    from .hooks.site import Site
    from .runner.interp_model_runner import InterpModelRunner
    from .runner.model_runner import ModelRunner

__version__ = "0.1.0"

_HOMES = {
    "LM": "engine.lm",
    "Ablate": "hooks.intervention",
    "Capture": "hooks.intervention",
    "Clamp": "hooks.intervention",
    "Gate": "hooks.intervention",
    "Generated": "hooks.intervention",
    "InterpModelRunner": "runner.interp_model_runner",
    "ModelRunner": "runner.model_runner",
    "Patch": "hooks.intervention",
    "RequestOutput": "core.output",
    "SamplingParams": "core.request",
    "Scale": "hooks.intervention",
    "Site": "hooks.site",
    "Steer": "hooks.intervention",
}

__all__ = [
    "LM", "Ablate", "Capture", "Clamp", "Gate", "Generated", "InterpModelRunner", "ModelRunner", "Patch", "RequestOutput",
    "SamplingParams", "Scale", "Site", "Steer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
