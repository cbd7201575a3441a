"""Evaluation harnesses over an `LM`, with interventions: lm-eval's `LM` and inspect-ai's model provider.

from pymllm_interp import evals

model = evals.HarnessLM(lm, interventions=[Steer("resid_post.12", vector, scale=4.0)])
results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy"])

Each needs its library: ``pip install "pymllm-interp[evals]"``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .harness import HarnessLM
    from .inspect import EngineAPI

__all__ = ["EngineAPI", "HarnessLM"]
_HOMES = {"EngineAPI": ("inspect", "inspect_ai"), "HarnessLM": ("harness", "lm_eval")}
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
        needed = package.replace("_", "-")
        raise ModuleNotFoundError(
            f'pymllm_interp.evals.{name} needs {needed}: pip install "pymllm-interp[evals]"', name=error.name
        ) from error
