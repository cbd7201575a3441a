"""pymllm-interp: an LLM serving runtime that a researcher can reach into."""

from __future__ import annotations

from .core.output import RequestOutput
from .core.request import SamplingParams
from .engine.lm import LM
from .runner.interp_model_runner import InterpModelRunner
from .runner.model_runner import ModelRunner

__all__ = ["LM", "InterpModelRunner", "ModelRunner", "RequestOutput", "SamplingParams"]
