"""A matrix by token, as an HTML table and as a plotly figure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import torch


def html_table(title: str, rows: Sequence[Any], tokens: Sequence[str], values: torch.Tensor) -> str:
    """A table of values [rows, tokens]: blue above 0, red below.

    Args:
        rows, tokens: labels.
    """
    largest = values.abs().max().item() or 1.0
    header = "".join(f"<th>{html.escape(repr(token)[1:-1])}</th>" for token in tokens)
    body = "".join(
        f"<tr><th>{html.escape(str(label))}</th>{''.join(_colored(value / largest, value) for value in row)}</tr>"
        for label, row in zip(rows, values.tolist(), strict=True)
    )
    return f"<table><caption>{html.escape(title)}</caption><tr><th></th>{header}</tr>{body}</table>"


def _colored(share: float, value: float) -> str:
    hue = "38,102,172" if share >= 0 else "178,24,43"
    return f'<td style="background:rgba({hue},{abs(share):.2f})">{value:+.2f}</td>'


def figure(title: str, rows: Sequence[Any], tokens: Sequence[str], values: torch.Tensor, axis: str) -> Any:
    """A heatmap of values [rows, tokens], a plotly figure.

    Args:
        axis: what the rows are.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("plots need plotly; run: pip install 'pymllm-interp[plot]'") from error
    labels = [f"{token!r} {place}" for place, token in enumerate(tokens)]
    heatmap = go.Heatmap(z=values.tolist(), x=labels, y=list(rows), colorscale="RdBu", zmid=0)
    return go.Figure(heatmap, {"title": title, "xaxis_title": "token", "yaxis_title": axis})
