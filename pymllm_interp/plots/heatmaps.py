"""Heatmaps over layers, positions, heads and features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from ..utils.arguments import shown
from .figure import Plot, axis, check_labels, graph_objects, matrix
from .picture import COLUMNS, image_source

_CELL = 28
"""Pixels of a row of a heatmap."""


def attention_patterns(
    pattern: Any,
    tokens: Sequence[str],
    *,
    site: str | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[Any] | None = None,
    title: str = "",
) -> Plot:
    """Attention weights: a heatmap for each head, from the row's token to the column's.

    Args:
        pattern: the activations of a request that captured a pattern. Or weights [heads, queries, keys], or [queries, keys] of one
            head, in the order of transformers and TransformerLens. A captured tensor is [positions, heads, keys].
        tokens: [keys].
        site: the captured pattern, if there are several.
        positions: [queries] of the queries among the tokens. None: each token is a query, and attends to no later one.
            Activations know theirs.
        heads: names of the heads; None: their numbers.

    Raises:
        ValueError: shapes that do not fit, or weights that may be in the order of a capture.
    """
    if isinstance(pattern, Mapping):
        pattern, positions = _captured(pattern, site)
    elif site is not None:
        raise ValueError(f"site={site!r} names a pattern of activations; pattern is a {type(pattern).__name__}")
    weights = matrix(pattern, "pattern", 2, 3)
    weights = weights if weights.dim() == 3 else weights[None]
    count, _, keys = weights.shape
    labels = check_labels(tokens, keys, "tokens", "the pattern's keys")
    asking = [labels[i] for i in _query_positions(weights, positions)]
    names = check_labels(range(count) if heads is None else heads, count, "heads", "the pattern's heads")
    go, columns = graph_objects(), min(count, COLUMNS)
    rows = math.ceil(count / columns)
    figure = import_module("plotly.subplots").make_subplots(
        rows, columns, subplot_titles=[f"head {name}" for name in names], shared_xaxes="all", shared_yaxes="all"
    )
    for i, head in enumerate(weights.tolist()):
        text = [[f"{a} → {b}" for b in labels] for a in asking]
        trace = go.Heatmap(z=head, text=text, coloraxis="coloraxis", hovertemplate="%{text}<br>%{z:.4f}<extra></extra>")
        figure.add_trace(trace, i // columns + 1, i % columns + 1)
    figure.update_xaxes(**axis(labels, ""))
    figure.update_yaxes(**axis(asking, ""), autorange="reversed")
    side = max(220, 14 * keys)
    figure.update_layout(
        title=title,
        coloraxis={"colorscale": "Blues", "cmin": 0, "cmax": 1},
        height=120 + rows * side,
        width=160 + columns * side,
    )
    return Plot(figure)


def _captured(activations: Mapping[str, Any], site: str | None) -> tuple[torch.Tensor, list[int]]:
    """A captured pattern as [heads, queries, keys], and the positions of its queries."""
    found = [name for name in activations if name.startswith("pattern.")]
    if site is None and len(found) != 1:
        raise ValueError(
            f"site: expected the name of one captured pattern; there is {', '.join(found) or 'no pattern'}"
        )
    name = site or found[0]
    rows, positions = activations[name], getattr(activations, "positions", None)
    if positions is None or rows.dim() != 3:
        raise ValueError(
            f"{name}: expected activations with [positions, heads, keys]; got {type(activations).__name__}"
        )
    return rows.transpose(0, 1), positions[name].tolist()


def _query_positions(weights: torch.Tensor, positions: Sequence[int] | None) -> list[int]:
    """The position of each query of weights [heads, queries, keys].

    Raises:
        ValueError: they do not fit, or the weights may have the queries first, as captures have.
    """
    _, queries, keys = weights.shape
    capture = "A capture has [positions, heads, keys]: pass the activations, or captured.transpose(0, 1) with their positions."
    if positions is None:
        if queries != keys:
            raise ValueError(
                f"pattern has {queries} queries and {keys} keys; expected [heads, queries, keys] with a query for each key, or "
                f"positions=[...] of the queries. {capture}"
            )
        if weights.triu(1).any():
            raise ValueError(
                f"pattern attends to later tokens. {capture} For a model that attends both ways: positions=range({keys})"
            )
        return list(range(keys))
    found = [int(position) for position in positions]
    if len(found) != queries or any(not -keys <= position < keys for position in found):
        raise ValueError(f"positions={found}: expected {queries}, one for each query, below the {keys} keys. {capture}")
    return [position % keys for position in found]


def lens_heatmap(
    words: Sequence[Sequence[str]],
    values: Any,
    tokens: Sequence[str],
    *,
    layers: Sequence[Any] | None = None,
    title: str = "",
) -> Plot:
    """A lens: in each cell the token that a layer predicts after a position; the colour is its probability.

    Args:
        words: [layers][positions], the predicted tokens.
        values: [layers, positions], their probabilities.
        tokens: [positions], the prompt's.
        layers: names of the layers; None: their numbers.

    Raises:
        ValueError: shapes that do not fit.
    """
    found = matrix(values, "values", 2)
    text = [check_labels(row, found.shape[1], "words", "the positions") for row in words]
    names = _rows(layers, found.shape[0])
    check_labels(text, found.shape[0], "words", "the layers")
    labels = check_labels(tokens, found.shape[1], "tokens", "the positions")
    return _heatmap(found, names, labels, text, title, "layer", {"colorscale": "Viridis", "zmin": 0, "zmax": 1})


def sweep_heatmap(
    values: Any,
    tokens: Sequence[str],
    *,
    layers: Sequence[Any] | None = None,
    title: str = "",
    centre: float = 0.0,
    rows: str = "layer",
) -> Plot:
    """A score for each layer and position: patch sweeps, attributions. Blue is below `centre`, red above.

    Args:
        values: [layers, positions].
        tokens: [positions].
        layers: names of the layers; None: their numbers.
        centre: the score without a patch.
        rows: axis label of the rows.

    Raises:
        ValueError: shapes that do not fit.
    """
    found = matrix(values, "values", 2)
    labels = check_labels(tokens, found.shape[1], "tokens", "the positions")
    reach = (found - centre).nan_to_num(0.0).abs().max().item() or 1.0
    colours = {"colorscale": "RdBu_r", "zmin": centre - reach, "zmax": centre + reach}
    return _heatmap(found, _rows(layers, found.shape[0]), labels, None, title, rows, colours)


def image_heatmap(values: Any, image: Any, *, title: str = "", opacity: float = 0.6) -> Plot:
    """A score for each patch of an image, over the image. Blue is below 0, red above.

    Args:
        values: [rows, columns] of the patches, from the image's upper left.
        image: a Pillow image.
        opacity: opacity of the scores: 0 shows the image without them.

    Raises:
        ValueError: values of another shape, another kind of image, or an opacity outside of 0 to 1.
    """
    found = matrix(values, "values", 2)
    if not hasattr(image, "convert"):
        raise ValueError(f"image={shown(image)}: expected a Pillow image, such as PIL.Image.fromarray(pixels)")
    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity={opacity}: expected 0 to 1")
    (rows, columns), go = found.shape, graph_objects()
    reach = found.nan_to_num(0.0).abs().max().item() or 1.0
    hover = "row %{y}, column %{x}<br>%{z:.4g}<extra></extra>"
    figure = go.Figure(
        go.Heatmap(z=found.tolist(), colorscale="RdBu_r", zmin=-reach, zmax=reach, opacity=opacity, hovertemplate=hover)
    )
    place = {"x": -0.5, "y": -0.5, "sizex": columns, "sizey": rows, "sizing": "stretch", "xref": "x", "yref": "y"}
    figure.add_layout_image(source=image_source(image), layer="below", **place)
    figure.update_xaxes(range=[-0.5, columns - 0.5], visible=False)
    figure.update_yaxes(range=[rows - 0.5, -0.5], visible=False)
    width = 500
    figure.update_layout(title=title, width=width + 160, height=140 + round(width * image.height / image.width))
    return Plot(figure)


def feature_activations(
    values: Any,
    indexes: Any,
    tokens: Sequence[str],
    *,
    names: Mapping[int, str] | None = None,
    most: int = 20,
    title: str = "",
) -> Plot:
    """Activations of an SAE's strongest features by token: one row a feature.

    Args:
        values: [positions, top_k] as `Features` captures them.
        indexes: [positions, top_k], the features' ids.
        tokens: [positions].
        names: names of features by id, such as `SAE.feature_names`; features without one have their ids.
        most: features that are shown, those with the largest values.

    Raises:
        ValueError: shapes that do not fit, or ``most < 1``.
    """
    found, ids = matrix(values, "values", 2), matrix(indexes, "indexes", 2).long()
    if found.shape != ids.shape:
        raise ValueError(f"values has shape {list(found.shape)} and indexes {list(ids.shape)}; expected the same")
    if most < 1:
        raise ValueError(f"most={most}: expected at least 1")
    labels = check_labels(tokens, found.shape[0], "tokens", "the positions")
    strongest: dict[int, float] = {}
    for feature, value in zip(ids.flatten().tolist(), found.flatten().tolist(), strict=True):
        strongest[feature] = max(value, strongest.get(feature, 0.0))
    shown = sorted((f for f, value in strongest.items() if value > 0), key=lambda f: -strongest[f])[:most]
    if not shown:
        raise ValueError("no feature is active at these tokens")
    rows = found.new_zeros(len(shown), found.shape[0])
    for row, feature in enumerate(shown):
        rows[row] = (found * (ids == feature)).amax(1)
    shown = check_labels([_named(f, names or {}) for f in shown], len(shown), "names", "the features")
    return _heatmap(rows, shown, labels, None, title, "feature", {"colorscale": "Oranges", "zmin": 0})


def _named(feature: int, names: Mapping[int, str]) -> str:
    """A feature's id, with its name if it has one."""
    return f"{feature} {names[feature]}" if names.get(feature) else str(feature)


def _rows(names: Sequence[Any] | None, count: int) -> list[str]:
    return check_labels(range(count) if names is None else names, count, "layers", "the rows")


def _heatmap(
    values: Any,
    rows: list[str],
    columns: list[str],
    text: list[list[str]] | None,
    title: str,
    row: str,
    colours: dict[str, Any],
) -> Plot:
    written = {"text": text, "texttemplate": "%{text}"} if text is not None else {}
    hover = f"{row} %{{customdata[0]}}<br>%{{customdata[1]}}<br>%{{z:.4g}}<extra></extra>"
    names = [[[name, f"{i} {label}"] for i, label in enumerate(columns)] for name in rows]
    go = graph_objects()
    figure = go.Figure(go.Heatmap(z=values.tolist(), customdata=names, hovertemplate=hover, **written, **colours))
    figure.update_xaxes(**axis(columns, ""))
    figure.update_yaxes(**axis(rows, row), autorange="reversed" if row == "feature" else True)
    figure.update_layout(title=title, height=140 + _CELL * len(rows), width=max(400, 160 + 70 * len(columns)))
    return Plot(figure)
