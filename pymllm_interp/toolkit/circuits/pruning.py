"""Influence of nodes on the targets, and the graph that carries most of it.

The definitions follow "Circuit Tracing" (Ameisen et al., 2025) and the package circuit-tracer. Rows are normalised by the sum of
their magnitudes, and influence runs along all paths from the targets. Matrices have the rows of nodes with inputs only, so that
memory is linear in the kept features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 1 << 16
"""Columns of weights at once."""
MAX_PATH = 1000
"""Most edges of a path."""


class PrunedGraph(NamedTuple):
    """Kept parts of a graph.

    Attributes:
        nodes: [nodes] bool.
        edges: [rows, nodes] bool.
        scores: [nodes] float32, the share of all influence that nodes up to this one have, the most influential first.
    """

    nodes: Tensor
    edges: Tensor
    scores: Tensor


def normalized(weights: Tensor, least: float = 1e-10) -> Tensor:
    """Magnitudes [rows, nodes] over their sums by row."""
    found = weights.abs()
    return found.div_(found.sum(1, keepdim=True).clamp(min=least))


def influence(weights: Tensor, row_nodes: Tensor, of_nodes: Tensor, least: float = 1e-10) -> Tensor:
    """Influence [nodes] along all paths that end at weighted nodes. No copy of the weights is made.

    Args:
        weights: [rows, nodes], direct effects.
        row_nodes: [rows] int64, the node of each row.
        of_nodes: [nodes], the weights.
        least: least sum of a row.

    Raises:
        ValueError: NaN, or a graph with a cycle.
    """
    parts = weights.split(COLUMNS, dim=1)
    sums = sum((part.abs().sum(1) for part in parts), torch.zeros(len(weights))).clamp(min=least)
    # Only nodes with rows pass influence on. Their own square is small.
    inner, paths = weights[:, row_nodes].abs() / sums[:, None], of_nodes[row_nodes]
    total = paths
    for _ in range(MAX_PATH):
        if not paths.any():
            return torch.cat([(total / sums) @ part.abs() for part in parts])
        paths = paths @ inner
        total = total + paths
    raise ValueError(f"paths of over {MAX_PATH} edges: the effects have a NaN, or the graph has a cycle")


def prune(
    weights: Tensor,
    row_nodes: Tensor,
    of_nodes: Tensor,
    features: int,
    always: int,
    node_threshold: float,
    edge_threshold: float,
) -> PrunedGraph:
    """Nodes with this share of all influence, then edges with this share of the rest.

    Args:
        weights: [rows, nodes], direct effects.
        of_nodes: [nodes], the targets' weights.
        features: number of features, which are the first nodes and need inputs.
        always: nodes from this one on are kept.
    """
    found = influence(weights, row_nodes, of_nodes)
    nodes = found >= threshold_of(found, node_threshold)
    nodes[always:] = True
    kept = torch.where(nodes[row_nodes][:, None] & nodes, weights, 0.0)
    passed = (influence(kept, row_nodes, of_nodes) + of_nodes)[row_nodes]
    scores = normalized(kept).mul_(passed[:, None])
    del kept
    edges = scores >= threshold_of(scores[scores > 0], edge_threshold)
    feature_rows = row_nodes < features
    while True:
        before = nodes.clone()
        nodes[:always] &= edges.any(0)[:always]
        nodes[row_nodes[feature_rows]] &= edges[feature_rows].any(1)
        edges &= nodes[row_nodes][:, None] & nodes
        if torch.equal(before, nodes):
            break
    order = found.argsort(descending=True)
    shares = torch.zeros_like(found)
    shares[order] = found[order].cumsum(0) / found.sum()
    return PrunedGraph(nodes, edges, shares)


def threshold_of(scores: Tensor, share: float) -> Tensor:
    """The smallest score among the largest ones that together have this share of the sum."""
    ordered = scores.flatten().sort(descending=True).values
    if not len(ordered):
        return torch.tensor(torch.inf)
    shares = ordered.cumsum(0).div_(ordered.sum())
    return ordered[min(int(torch.searchsorted(shares, share)), len(ordered) - 1)]
