"""Pictures of figures, drawn by matplotlib: a browser, which plotly's own need, is not."""

from __future__ import annotations

import base64
import re
from html import unescape
from importlib import import_module
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.extras import install_command

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes of pictures."""
COLUMNS = 4
"""Heatmaps in a row."""
PIXELS = 100
"""Pixels of a figure's inch."""


def draw(figure: Any, path: str | Path) -> None:
    """Write a picture of a plotly figure. Text in an .svg and a .pdf file stays text.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: a trace that is neither a heatmap nor bars.
    """
    drawn = picture_of(figure)
    with import_module("matplotlib").rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
        drawn.savefig(path, dpi=2 * PIXELS)


def picture_of(figure: Any) -> Any:
    """A plotly figure as matplotlib's `Figure`.

    Raises:
        As `draw`.
    """
    try:
        matplotlib_figure = import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"pictures need matplotlib: {install_command('plot')}; a page needs nothing: plot.save('figure.html')",
            name=error.name,
        ) from error
    traces, layout = list(figure.data), figure.layout
    if wrong := {trace.type for trace in traces} - {"heatmap", "bar"}:
        raise ValueError(
            f"pictures are drawn of heatmaps and bars, and this figure has {', '.join(sorted(wrong))}: "
            "plot.figure.write_image(path) draws it, for which plotly needs kaleido and Chrome"
        )
    rows, columns = ceil(len(traces) / COLUMNS), min(len(traces), COLUMNS)
    drawn = matplotlib_figure(
        figsize=((layout.width or 700) / PIXELS, (layout.height or 450) / PIXELS), layout="constrained"
    )
    places = drawn.subplots(rows, columns, squeeze=False).ravel()
    image = None
    for place, trace in zip(places, traces, strict=False):
        if trace.type == "heatmap":
            image = _heatmap(place, trace, layout)
        else:
            place.bar(trace.x, trace.y, color=trace.marker.color)
            place.axhline(0, color="black", linewidth=0.8)
        _set_axes(place, trace, layout)
    for place in places[len(traces) :]:
        place.set_axis_off()
    for place, note in zip(places, layout.annotations if len(traces) > 1 else (), strict=False):
        place.set_title(unescape(note.text), parse_math=False)
    if image is not None:
        drawn.colorbar(image, ax=places[: len(traces)])
    if layout.title.text:
        drawn.suptitle(unescape(layout.title.text), parse_math=False)
    return drawn


def image_source(image: Any) -> str:
    """A Pillow image as a data URL."""
    file = BytesIO()
    image.convert("RGB").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _pixels(source: str) -> Any:
    return import_module("PIL.Image").open(BytesIO(base64.b64decode(source.partition(",")[2])))


def _heatmap(place: Any, trace: Any, layout: Any) -> Any:
    shared = trace.coloraxis is not None
    scale = layout.coloraxis if shared else trace
    least, most = (scale.cmin, scale.cmax) if shared else (scale.zmin, scale.zmax)
    values = np.array(trace.z, dtype=float)
    rows, columns = values.shape
    for below in layout.images:
        place.imshow(_pixels(below.source), extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), aspect="auto")
    image = place.imshow(
        values, cmap=_colours(scale.colorscale), vmin=least, vmax=most, aspect="auto", alpha=trace.opacity
    )
    if trace.texttemplate is not None:
        for row, texts in enumerate(trace.text):
            for column, text in enumerate(texts):
                dark = sum(image.cmap(image.norm(values[row, column]))[:3]) < 1.5
                place.text(
                    column, row, unescape(text), ha="center", va="center", fontsize=7, color="white" if dark else "black",
                    parse_math=False,
                )  # fmt: skip
    return image


def _set_axes(place: Any, trace: Any, layout: Any) -> None:
    """Labels at the ticks, and the direction of the rows."""
    across, down = (
        layout[name[0] + "axis" + name[1:]] for name in (getattr(trace, "xaxis", None) or "x", trace.yaxis or "y")
    )
    place.set_xticks(across.tickvals or [], [unescape(label) for label in across.ticktext or ()], parse_math=False)
    place.tick_params(axis="x", labelrotation=90 if len(across.ticktext or ()) > 8 else 0)
    place.set_xlabel(across.title.text or "")
    place.set_ylabel(down.title.text or "")
    if down.ticktext is not None:
        place.set_yticks(down.tickvals, [unescape(label) for label in down.ticktext], parse_math=False)
    if layout.images:
        place.set_axis_off()
    elif trace.type == "heatmap" and down.autorange != "reversed":
        place.invert_yaxis()


def _colours(scale: Any) -> Any:
    """plotly's colour scale as matplotlib's."""
    stops = [(place, _colour(colour)) for place, colour in scale]
    return import_module("matplotlib.colors").LinearSegmentedColormap.from_list("plotly", stops)


def _colour(text: str) -> Any:
    """ "rgb(5, 10, 172)" as matplotlib takes it; other notations are common to both."""
    numbers = re.fullmatch(r"rgb\((\d+), *(\d+), *(\d+)\)", text)
    return text if numbers is None else tuple(int(number) / 255 for number in numbers.groups())
