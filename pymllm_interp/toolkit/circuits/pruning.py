"""Influence of nodes on the targets, and the graph that carries most of it.

The definitions follow "Circuit Tracing" (Ameisen et al., 2025) and the package circuit-tracer. Rows are normalised by the sum of
their magnitudes, and influence runs along all paths from the targets. Matrices have the rows of nodes with inputs only. They are
read in parts of `CELLS` entries and never copied, so that memory is linear in the kept features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CELLS = 1 << 23
"""Entries of weights at once."""
CELL_BYTES = 32
"""Most bytes for each of them."""
SUMS_BYTES = 8 * (8 << 16)
"""Most bytes of the sums by 16 bits of a score."""


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


def parts_of(
    weights: Tensor, rows: Tensor, nodes: Tensor | None = None, least: float = 1e-10
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some rows of weights in parts: (numbers of rows, magnitudes [part, nodes], their sums [part]).

    Args:
        weights: [rows, nodes], direct effects.
        nodes: [nodes] bool, sources that count; None: all.
        least: least sum of a row.
    """
    for part in rows.split(max(1, CELLS // weights.shape[1])):
        found = weights[part].abs_()
        if nodes is not None:
            found *= nodes
        yield part, found, found.sum(1).clamp(min=least)


def influence(
    weights: Tensor, row_nodes: Tensor, levels: Tensor, of_nodes: Tensor, least: float = 1e-10, nodes: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Influence [nodes] along all paths that end at weighted nodes.

    Effects go from lower to higher levels, so levels are computed from the top. One product over all rows gives the other nodes.

    Args:
        weights: [rows, nodes], direct effects.
        row_nodes: [rows] int64, the node of each row.
        levels: [rows] int64.
        of_nodes: [nodes], the weights.
        least: least sum of a row.
        nodes: [nodes] bool, nodes of the graph; None: all.
        sums: [rows], sums of the rows' magnitudes over these nodes; None: they are computed.

    Raises:
        ValueError: NaN or infinite effects, or a graph with a cycle.
    """
    kept = torch.arange(len(weights), device=weights.device) if nodes is None else nodes[row_nodes].nonzero()[:, 0]
    if sums is None:
        sums = torch.zeros_like(weights[:, 0])
        for part, _, of_part in parts_of(weights, kept, nodes, 0.0):
            sums[part] = of_part
    sums = sums.clamp(min=least)
    shares = torch.zeros_like(sums)
    shares[kept] = of_nodes[row_nodes[kept]]
    inner, inner_levels, cycle = row_nodes[kept], levels[kept], False
    for level in inner_levels.unique().flip(0).tolist():
        for part in kept[inner_levels == level].split(max(1, CELLS // max(1, len(kept)))):
            effects = weights[part[:, None], inner].abs_()
            cycle |= bool(effects[:, inner_levels >= level].any())
            shares[part] /= sums[part]
            shares[kept] += shares[part] @ effects
    found = torch.cat([shares @ columns.abs() for columns in weights.split(max(1, CELLS // max(1, len(weights))), 1)])
    if nodes is not None:
        found *= nodes
    if cycle or not found.isfinite().all():
        raise ValueError("effects that come back to their own level: they have a NaN, or the graph has a cycle")
    return found


def prune(
    weights: Tensor, row_nodes: Tensor, levels: Tensor, of_nodes: Tensor, features: int, always: int, node_threshold: float,
    edge_threshold: float,
) -> PrunedGraph:  # fmt: skip
    """Nodes with this share of all influence, then edges with this share of the rest.

    Args:
        weights, row_nodes, levels: see `influence`.
        of_nodes: [nodes], the targets' weights.
        features: number of features, which are the first nodes and need inputs.
        always: nodes from this one on are kept.
    """
    found = influence(weights, row_nodes, levels, of_nodes)
    nodes = found >= threshold_of(lambda: [found], node_threshold)
    nodes[always:] = True
    rows, among = nodes[row_nodes].nonzero()[:, 0], nodes.clone()
    passed = (influence(weights, row_nodes, levels, of_nodes, nodes=among) + of_nodes)[row_nodes]

    def scored() -> Iterator[tuple[Tensor, Tensor]]:
        for part, sizes, sums in parts_of(weights, rows, among):
            yield part, sizes.mul_((passed[part] / sums)[:, None])

    least = threshold_of(lambda: (scores for _, scores in scored()), edge_threshold)
    edges = torch.zeros(weights.shape, dtype=torch.bool)
    for part, scores in scored():
        edges[part] = scores >= least
    feature_rows = row_nodes < features
    while True:
        before = nodes.clone()
        nodes[:always] &= edges.any(0)[:always]
        nodes[row_nodes[feature_rows]] &= edges.any(1)[feature_rows]
        edges[~nodes[row_nodes]] = False
        edges[:, ~nodes] = False
        if torch.equal(before, nodes):
            break
    order = found.argsort(descending=True)
    shares = torch.zeros_like(found)
    shares[order] = found[order].cumsum(0) / found.sum().clamp(min=1e-30)
    return PrunedGraph(nodes, edges, shares)


def threshold_of(parts: Callable[[], Iterable[Tensor]], share: float) -> float:
    """The smallest score among the largest ones that together have this share of the sum; infinite without scores.

    Bits of floats that are not negative have their order. So scores are summed by their upper 16 bits, then by the lower ones.
    In float64: a million scores of one size are a percent off in float32.

    Args:
        parts: the scores, float32; called twice.
    """
    upper, lower = torch.zeros(2, 1 << 16, dtype=torch.float64)
    for scores in parts():
        upper += torch.bincount(scores.view(torch.int32).flatten() >> 16, scores.flatten().double(), 1 << 16)
    reached = upper.flip(0).cumsum(0)
    if not reached[-1]:
        return torch.inf
    wanted = max(share * reached[-1].item(), 1e-300)
    place = int(torch.searchsorted(reached, wanted))
    rest = wanted - (reached[place - 1].item() if place else 0.0)
    for scores in parts():
        bits = scores.view(torch.int32).flatten()
        own = scores.flatten() * (bits >> 16 == 0xFFFF - place)
        lower += torch.bincount(bits & 0xFFFF, own.double(), 1 << 16)
    reached = lower.flip(0).cumsum(0)
    low = int(torch.searchsorted(reached, min(rest, reached[-1].item())))
    return torch.tensor((0xFFFF - place) << 16 | 0xFFFF - low, dtype=torch.int32).view(torch.float32).item()
