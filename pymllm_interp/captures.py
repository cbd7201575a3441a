"""Captures: declared reads of a model's states, for ``lm.generate(..., capture=[...])``, their reductions and their results."""

from .hooks.captures.activations import Activations, CaptureError
from .hooks.captures.lens_files import JacobianLens, TunedLens
from .hooks.captures.reductions.features import Features
from .hooks.captures.reductions.lens import Lens
from .hooks.captures.spec import Capture, Project
from .hooks.saes.sae import SAE
from .hooks.site import Site
from .hooks.traces.syntax.async_trace import SavedSteps

__all__ = [
    "SAE", "Activations", "Capture", "CaptureError", "Features", "JacobianLens", "Lens", "Project", "SavedSteps", "Site",
    "TunedLens",
]  # fmt: skip
