"""Bars: one number for each of some names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..utils.arguments import is_whole, shown
from .figure import Plot, axis, check_labels, graph_objects, matrix


def attribution_bars(values: Any, labels: Sequence[Any], *, most: int = 30, title: str = "") -> Plot:
    """Attributions of heads, layers, features or tokens: those with the largest magnitude, in their order.

    Args:
        values: [n].
        labels: [n].
        most: bars that are shown.

    Raises:
        ValueError: shapes that do not fit, or ``most < 1``.
    """
    found = matrix(values, "values", 1)
    names = check_labels(labels, len(found), "labels", "the values")
    if not is_whole(most) or most < 1:
        raise ValueError(f"most={shown(most)}: expected a whole number of at least 1")
    kept = sorted(found.nan_to_num(0.0).abs().topk(min(most, len(found))).indices.tolist())
    numbers = found[kept].tolist()
    go = graph_objects()
    colours = ["#b2182b" if number >= 0 else "#2166ac" for number in numbers]
    bars = go.Bar(
        x=list(range(len(kept))), y=numbers, marker_color=colours, hovertemplate="%{x}<br>%{y:.4g}<extra></extra>"
    )
    figure = go.Figure(bars)
    figure.update_xaxes(**axis([names[i] for i in kept], ""))
    figure.update_layout(title=title, height=360, width=max(400, 120 + 32 * len(kept)))
    return Plot(figure)
