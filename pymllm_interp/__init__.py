"""pymllm-interp: an LLM serving runtime that a researcher can reach into.

Names are imported when they are first used, so that `pymllm-interp --help` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .utils.arguments import warn_renamed
from .utils.extras import lazy_names

if TYPE_CHECKING:
    from .client.completion import RequestOutput
    from .core.sampling_params import SamplingParams
    from .hooks.captures.activations import Activations
    from .hooks.captures.spec import Capture
    from .hooks.interventions.op import Gate
    from .hooks.interventions.projections import Ablate, Clamp
    from .hooks.interventions.specs import Patch, Scale, Steer
    from .hooks.saes.sae import SAE
    from .lm import LM

__version__ = "0.1.0"

__all__ = [
    "LM", "SAE", "Ablate", "Activations", "Capture", "Clamp", "Gate", "Patch", "RequestOutput", "SamplingParams", "Scale",
    "Steer",
]  # fmt: skip

_HOMES = {
    "LM": "lm",
    "RequestOutput": "client.completion",
    "SamplingParams": "core.sampling_params",
    **dict.fromkeys(("Ablate", "Clamp", "Gate", "Patch", "Scale", "Steer"), "interventions"),
    **dict.fromkeys(("SAE", "Activations", "Capture"), "captures"),
}
_MOVED = {
    **dict.fromkeys(("Generated", "Knockout", "SetFeature"), "interventions"),
    **dict.fromkeys(
        ("CaptureError", "Features", "JacobianLens", "Lens", "Project", "SavedSteps", "Site", "TunedLens"), "captures"
    ),
    **dict.fromkeys(("ControlVectors", "contrast"), "toolkit"),
    **dict.fromkeys(("Harvest", "HarvestError", "open_harvest"), "harvest"),
    **dict.fromkeys(("InterpModelRunner", "ModelRunner"), "runner"),
    **dict.fromkeys(("ConstraintError", "StructuredOutputs", "allow_only"), "sampling"),
}
_ELSEWHERE = {
    **dict.fromkeys(("FeatureProbe", "Monitor", "PatchKV", "Probe", "Reconstruct"), "interventions"),
    "loss_recovered": "toolkit",
}
_find = lazy_names(__name__, _HOMES | _MOVED, _ELSEWHERE)


def __getattr__(name: str) -> Any:
    found = _find(name)
    if name in _MOVED:
        warn_renamed(f"pymllm_interp.{name}", f"from pymllm_interp.{_MOVED[name]} import {name}")
    globals()[name] = found  # so a name that moved warns once
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
