"""`Plot`: a plotly figure as HTML or as a picture, and checks of its functions' arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..utils.arguments import shown
from ..utils.extras import install_command
from .picture import PICTURES, draw


class Plot:
    """A figure that a notebook shows.

    The first figure that a notebook shows brings plotly's JavaScript, about 5 MB. Those after it use the same.

    Attributes:
        figure: plotly's `Figure`, to change further.
    """

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def html(self, whole_page: bool = False) -> str:
        """HTML with plotly's JavaScript in it, about 5 MB.

        Args:
            whole_page: adds ``<html>`` and ``<body>``.
        """
        return self.figure.to_html(full_html=whole_page, include_plotlyjs=True, include_mathjax=False)

    def save(self, path: str | Path) -> None:
        """Write a page that any browser opens without a network (.html), or a picture (.png, .svg, .pdf).

        matplotlib draws the pictures: data, colours, labels and titles of the figures that `plots` makes. Further changes of
        `figure` are drawn by ``figure.write_image(path)``, for which plotly needs kaleido and Chrome.

        Raises:
            ValueError: another suffix, or a picture of a figure with other traces than heatmaps and bars.
            ModuleNotFoundError: a picture without matplotlib.
        """
        suffix = Path(path).suffix.lower()
        if suffix in PICTURES:
            draw(self.figure, path)
        elif suffix in (".html", ".htm"):
            Path(path).write_text(self.html(whole_page=True), encoding="utf-8")
        else:
            raise ValueError(f"{path}: the suffix says what is written: .html, {', '.join(PICTURES)}")

    def _repr_html_(self) -> str:
        if javascript_is_needed():
            return self.html()
        return self.figure.to_html(full_html=False, include_plotlyjs=False, include_mathjax=False) + REMARK

    def __repr__(self) -> str:
        title = self.figure.layout.title.text
        kinds = ", ".join(dict.fromkeys(trace.type for trace in self.figure.data))
        return f"Plot({kinds}{f': {title}' if title else ''})"


def graph_objects() -> Any:
    """plotly's `graph_objects`.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    try:
        return import_module("plotly.graph_objects")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"plots need plotly: {install_command('plot')}", name=error.name) from error


def matrix(values: Any, what: str, *dims: int) -> torch.Tensor:
    """Values as a float tensor on the CPU.

    Args:
        dims: allowed numbers of dimensions.

    Raises:
        ValueError: another number of dimensions, nothing in it, or no real numbers.
    """
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what}: expected numbers, not {shown(values)}: {error}") from None
    if tensor.is_complex():
        raise ValueError(f"{what} are complex numbers: expected real ones, such as their .abs()")
    tensor = tensor.float()
    if tensor.dim() not in dims or tensor.numel() == 0:
        allowed = " or ".join(map(str, dims))
        raise ValueError(f"{what} has shape {list(tensor.shape)}; expected {allowed} dimensions, none of them empty")
    return tensor


def check_labels(labels: Sequence[Any], count: int, what: str, of: str) -> list[str]:
    """Labels as text of a figure: plotly reads HTML's tags, which a token may look like.

    Raises:
        ValueError: not as many as `of` has.
    """
    if isinstance(labels, str) or len(labels) != count:
        got = repr(labels) if isinstance(labels, str) else str(len(labels))
        raise ValueError(f"{what}: expected {count}, one for each of {of}; got {got}")
    return [escape(str(label).replace("\n", "\\n"), quote=False) for label in labels]


def axis(labels: Sequence[str], title: str) -> dict[str, Any]:
    """An axis with a label at each whole number. Labels may repeat, as tokens do."""
    return {"title": title, "tickmode": "array", "tickvals": list(range(len(labels))), "ticktext": list(labels)}


REMARK = """<script>
if (!window.Plotly) {
  const remark = document.createElement("p");
  remark.textContent = "This figure needs plotly's JavaScript, which the first figure of the notebook has. Run all cells again.";
  document.currentScript.before(remark);
}
</script>"""
"""Shown instead of a figure if the JavaScript was not loaded."""


class _Cell(NamedTuple):
    """The run of a cell.

    Attributes:
        shell: the IPython shell.
        cell: its id, or None if the front end gives no id.
        run: IPython's count of runs.
    """

    shell: Any
    cell: str | None
    run: int


_carrier: _Cell | None = None
"""The cell with the JavaScript in its output."""


def javascript_is_needed() -> bool:
    """Whether a figure that is shown now must bring the JavaScript.

    The first figure of a notebook must. So must the first one of the same cell when it is run again: its output is replaced.
    Outside a notebook each figure must.
    """
    global _carrier
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return True
    now = _Cell(shell, _cell_id(shell), shell.execution_count)
    known = _carrier
    if (
        known is not None
        and known.shell is shell
        and (now.cell is None or now.cell != known.cell or now.run == known.run)
    ):
        return False
    _carrier = now
    return True


def _cell_id(shell: Any) -> str | None:
    """The id of the cell that runs."""
    parent = getattr(shell, "parent_header", None) or {}  # the whole message in ipykernel's shell
    return (parent.get("metadata") or {}).get("cellId")
