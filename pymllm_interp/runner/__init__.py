"""Runners: they load a model and run the forward passes of an engine's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.extras import lazy_names

if TYPE_CHECKING:
    from .interp_model_runner import InterpModelRunner
    from .model_runner import ModelRunner

__all__ = ["InterpModelRunner", "ModelRunner"]
__getattr__ = lazy_names(__name__, {"InterpModelRunner": "interp_model_runner", "ModelRunner": "model_runner"})
