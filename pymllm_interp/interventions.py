"""Interventions: declared edits of a model's states, for ``lm.generate(..., interventions=[...])`` and all calls like it."""

from .hooks.interventions.knockout import Knockout
from .hooks.interventions.op import Gate
from .hooks.interventions.patch_kv import PatchKV
from .hooks.interventions.projections import Ablate, Clamp
from .hooks.interventions.reconstruct import Reconstruct
from .hooks.interventions.set_feature import SetFeature
from .hooks.interventions.specs import Patch, Scale, Steer
from .hooks.monitors.monitor import Monitor
from .hooks.monitors.probe import FeatureProbe, Probe
from .hooks.positions import Generated

__all__ = [
    "Ablate", "Clamp", "FeatureProbe", "Gate", "Generated", "Knockout", "Monitor", "Patch", "PatchKV", "Probe", "Reconstruct",
    "Scale", "SetFeature", "Steer",
]  # fmt: skip
