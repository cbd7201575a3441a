"""A matrix by token as an HTML table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import torch


def html_table(title: str, rows: Sequence[Any], tokens: Sequence[str], values: torch.Tensor) -> str:
    """A table of values [rows, tokens]: red above 0, blue below.

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
    hue = "178,24,43" if share >= 0 else "38,102,172"
    return f'<td style="background:rgba({hue},{abs(share):.2f})">{value:+.2f}</td>'
