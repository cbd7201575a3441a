"""`Circuit.plot`, and the server's page: the pruned graph over layers and positions, as plotly's traces."""

from __future__ import annotations

from typing import Any

from ...plots.figure import Plot, axis, check_labels, graph_objects

COLOURS = {"feature": "#2166ac", "error": "#999999", "embedding": "#1b7837", "logit": "#b2182b"}
"""Kind of a node -> its colour."""


def draw_circuit(circuit: Any, most: int) -> Plot:
    """Nodes at their layer and position, and the largest edges, see `Circuit.plot`."""
    return Plot(graph_objects().Figure(figure_of(circuit, most)))


def figure_of(circuit: Any, most: int) -> dict[str, Any]:
    """The figure's `data` and `layout` as JSON, which needs no plotly.

    Args:
        most: most edges.
    """
    nodes = circuit.nodes
    labels = check_labels(circuit.tokens, len(circuit.tokens), "tokens", "the positions")
    places, seen = {}, dict[tuple[int, int], int]()
    for node in sorted(nodes, key=lambda node: -node.influence):
        at = node.layer, node.position
        seen[at] = seen.get(at, 0) + 1
        places[node] = node.position + 0.8 * (1 - 0.5 ** (seen[at] - 1)) - 0.4, node.layer
    data = list[dict[str, Any]]()
    for name, sign, colour in (("positive", 1, "#4393c3"), ("negative", -1, "#d6604d")):
        x, y = list[Any](), list[Any]()
        for edge in circuit.edges[:most]:
            if edge.weight * sign > 0:
                (x0, y0), (x1, y1) = places[edge.source], places[edge.target]
                x += [x0, x1, None]
                y += [y0, y1, None]
        line = {"color": colour, "width": 1}
        data.append({"x": x, "y": y, "mode": "lines", "name": name, "line": line, "hoverinfo": "skip", "opacity": 0.5})
    for kind, colour in COLOURS.items():
        own = [node for node in nodes if node.kind == kind]
        size = [6 + 14 * min(node.influence * 5, 1.0) for node in own]
        data.append({
            "x": [places[node][0] for node in own], "y": [places[node][1] for node in own], "mode": "markers", "name": kind,
            "text": [_text(circuit, node, labels) for node in own], "marker": {"color": colour, "size": size},
            "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    rows = ["embeddings", *map(str, range(circuit.layers)), "logits"]
    layout = {
        "title": {"text": repr(circuit)}, "height": 240 + 40 * circuit.layers, "width": max(500, 160 + 60 * len(labels)),
        "xaxis": axis(labels, "token") | {"title": {"text": "token"}},
        "yaxis": {
            "title": {"text": "layer"}, "tickmode": "array", "tickvals": list(range(-1, circuit.layers + 1)), "ticktext": rows,
        },
    }  # fmt: skip
    return {"data": [{"type": "scatter", **trace} for trace in data], "layout": layout}


def _text(circuit: Any, node: Any, labels: list[str]) -> str:
    token = labels[node.position]
    if node.kind == "feature":
        value = f"activation {node.value:.3g}, influence {node.influence:.2%}"
        return f"feature {node.feature}, layer {node.layer}, {token!r}<br>{value}"
    if node.kind == "logit":
        (label,) = check_labels([circuit.targets[node.feature].label], 1, "target", "one node")
        return f"logit {label!r}, weight {circuit.targets[node.feature].weight:.2%}"
    return f"{node.kind}, {token!r}, influence {node.influence:.2%}"
