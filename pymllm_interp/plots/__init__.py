"""Interactive figures by plotly, with its JavaScript in them: nothing is loaded from the network.

from pymllm_interp import plots

plots.attention_patterns(pattern, tokens)  # shows itself in a notebook
plots.sweep_heatmap(scores, tokens).save("sweep.html")

Functions take plain tensors, arrays or lists, and the tokens as strings. They need plotly: ``pip install -e ".[plot]"``.
"""

from __future__ import annotations

from .bars import attribution_bars
from .figure import Plot
from .heatmaps import attention_patterns, feature_activations, image_heatmap, lens_heatmap, sweep_heatmap

__all__ = [
    "Plot", "attention_patterns", "attribution_bars", "feature_activations", "image_heatmap", "lens_heatmap", "sweep_heatmap",
]  # fmt: skip
