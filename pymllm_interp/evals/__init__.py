"""Evaluation harnesses over an `LM`, with interventions: lm-eval's `LM` and inspect-ai's model provider.

from pymllm_interp import evals

model = evals.HarnessLM(lm, interventions=[Steer("resid_post.12", vector, scale=4.0)])
results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy"])

Each needs its library: ``pip install -e ".[evals]"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.extras import names_of_extra

if TYPE_CHECKING:
    from .harness import HarnessLM
    from .inspect import EngineAPI

__all__ = ["EngineAPI", "HarnessLM"]
__getattr__ = names_of_extra(
    __name__, "evals", {"EngineAPI": ("inspect", "inspect_ai"), "HarnessLM": ("harness", "lm_eval")}
)
