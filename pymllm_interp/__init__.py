"""pymllm-interp: an LLM serving runtime that a researcher can reach into.

Names are imported when they are first used, so that `pymllm-interp --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.output import RequestOutput
    from .core.request import SamplingParams
    from .engine.harvest import HarvestError
    from .engine.lm import LM
    from .hooks.capture import Activations, CaptureError
    from .hooks.harvest import Harvest, open_harvest
    from .hooks.intervention import Ablate, Capture, Clamp, Gate, Generated, Patch, Project, Scale, Steer
    from .hooks.site import Site
    from .runner.interp_model_runner import InterpModelRunner
    from .runner.model_runner import ModelRunner

__version__ = "0.1.0"

_HOMES = {
    "LM": "engine.lm",
    "Ablate": "hooks.intervention",
    "Activations": "hooks.capture",
    "Capture": "hooks.intervention",
    "CaptureError": "hooks.capture",
    "Clamp": "hooks.intervention",
    "Gate": "hooks.intervention",
    "Generated": "hooks.intervention",
    "Harvest": "hooks.harvest",
    "HarvestError": "engine.harvest",
    "InterpModelRunner": "runner.interp_model_runner",
    "ModelRunner": "runner.model_runner",
    "Patch": "hooks.intervention",
    "Project": "hooks.intervention",
    "RequestOutput": "core.output",
    "SamplingParams": "core.request",
    "Scale": "hooks.intervention",
    "Site": "hooks.site",
    "Steer": "hooks.intervention",
    "open_harvest": "hooks.harvest",
}

__all__ = [
    "LM", "Ablate", "Activations", "Capture", "CaptureError", "Clamp", "Gate", "Generated", "Harvest", "HarvestError",
    "InterpModelRunner", "ModelRunner", "Patch", "Project", "RequestOutput", "SamplingParams", "Scale", "Site", "Steer",
    "open_harvest",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
