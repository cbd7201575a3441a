"""pymllm-interp: an LLM serving runtime that a researcher can reach into.

Names are imported when they are first used, so that `pymllm-interp --help` does not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.completion import RequestOutput
    from .core.sampling_params import SamplingParams
    from .core.structured.structured_outputs import StructuredOutputs
    from .core.structured.token_constraint import ConstraintError
    from .harvest.reader import Harvest, open_harvest
    from .harvest.result import HarvestError
    from .hooks.captures.activations import Activations, CaptureError
    from .hooks.captures.lens_files import JacobianLens, TunedLens
    from .hooks.captures.reductions.features import Features
    from .hooks.captures.reductions.lens import Lens
    from .hooks.captures.spec import Capture, Project
    from .hooks.interventions.knockout import Knockout
    from .hooks.interventions.op import Gate
    from .hooks.interventions.projections import Ablate, Clamp
    from .hooks.interventions.set_feature import SetFeature
    from .hooks.interventions.specs import Patch, Scale, Steer
    from .hooks.positions import Generated
    from .hooks.saes.sae import SAE
    from .hooks.site import Site
    from .hooks.traces.syntax.async_trace import SavedSteps
    from .lm import LM
    from .runner.interp_model_runner import InterpModelRunner
    from .runner.model_runner import ModelRunner
    from .sampling.bitmasks import allow_only
    from .toolkit.contrast import ControlVectors, contrast

__version__ = "0.1.0"

_HOMES = {
    "LM": "lm",
    "Ablate": "hooks.interventions.projections",
    "Activations": "hooks.captures.activations",
    "Capture": "hooks.captures.spec",
    "CaptureError": "hooks.captures.activations",
    "Clamp": "hooks.interventions.projections",
    "ConstraintError": "core.structured.token_constraint",
    "ControlVectors": "toolkit.contrast",
    "Features": "hooks.captures.reductions.features",
    "Gate": "hooks.interventions.op",
    "Generated": "hooks.positions",
    "Harvest": "harvest.reader",
    "HarvestError": "harvest.result",
    "InterpModelRunner": "runner.interp_model_runner",
    "JacobianLens": "hooks.captures.lens_files",
    "Knockout": "hooks.interventions.knockout",
    "Lens": "hooks.captures.reductions.lens",
    "ModelRunner": "runner.model_runner",
    "Patch": "hooks.interventions.specs",
    "Project": "hooks.captures.spec",
    "RequestOutput": "client.completion",
    "SAE": "hooks.saes.sae",
    "SamplingParams": "core.sampling_params",
    "SavedSteps": "hooks.traces.syntax.async_trace",
    "Scale": "hooks.interventions.specs",
    "SetFeature": "hooks.interventions.set_feature",
    "Site": "hooks.site",
    "Steer": "hooks.interventions.specs",
    "StructuredOutputs": "core.structured.structured_outputs",
    "TunedLens": "hooks.captures.lens_files",
    "allow_only": "sampling.bitmasks",
    "contrast": "toolkit.contrast",
    "open_harvest": "harvest.reader",
}

__all__ = [
    "LM", "SAE", "Ablate", "Activations", "Capture", "CaptureError", "Clamp", "ConstraintError",
    "ControlVectors", "Features", "Gate", "Generated", "Harvest", "HarvestError", "InterpModelRunner", "JacobianLens", "Knockout",
    "Lens", "ModelRunner", "Patch", "Project", "RequestOutput", "SamplingParams", "SavedSteps", "Scale", "SetFeature", "Site",
    "Steer", "StructuredOutputs", "TunedLens", "allow_only", "contrast", "open_harvest",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    if "torch" not in sys.modules:
        import_module(".utils.busy_cores", __name__).share_cores()  # most names import torch
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
