"""`Circuit`: the attribution graph of a prompt, the result of `lm.circuit`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ...plots import Plot
from .drawing import draw_circuit
from .files import graph_json, read_graph
from .interventions import CircuitEffects, intervene
from .pruning import PrunedGraph, influence, parts_of, prune
from .qk import EdgeHead, ScoreParts, edge_heads, score_parts
from .targets import CircuitTarget

LISTED = 12
"""Nodes that the table lists."""
NodeKey = Any
"""A `CircuitNode`, or (layer, position, feature)."""


class CircuitNode(NamedTuple):
    """One node of a circuit.

    Attributes:
        kind: "feature", "error", "embedding" or "logit".
        layer: layer; -1 for embeddings, and the number of layers for logits.
        position: position in the prompt.
        feature: number of the feature, token id, or number of the target; -1 for errors.
        value: activation of a feature, value of a target, else None.
        influence: the node's share of the influence on the targets.
    """

    kind: str
    layer: int
    position: int
    feature: int
    value: float | None
    influence: float

    @property
    def key(self) -> tuple[int, int, int]:
        """(layer, position, feature) of a feature."""
        return self.layer, self.position, self.feature


class CircuitEdge(NamedTuple):
    """The direct effect of one node on another.

    Attributes:
        weight: part of the target's pre-activation, or logit, that the source makes.
    """

    source: CircuitNode
    target: CircuitNode
    weight: float


class CircuitScores(NamedTuple):
    """Shares of a circuit that are explained, from 0 to 1.

    Attributes:
        replacement: share of the influence from embeddings to the targets that comes through features, not from errors. 0: none.
        completeness: share of the inputs of all nodes, weighted by influence, that are no errors.
    """

    replacement: float
    completeness: float


class Circuit:
    """An attribution graph: features, errors, embeddings and logits, with their direct effects.

    Nodes are features by layer, position and number, then errors by layer and position, then embeddings, then logits. An edge is
    the linear effect with frozen attention patterns and norm scales. The effects on a feature, its `bias` and its `rest` sum to
    its activation.

    Attributes:
        token_ids, tokens: the prompt, and its tokens as text.
        layers: number of layers.
        features: [features, 3] int64: layer, position, number.
        activations: [features] float32.
        active: number of active features in the run, kept or not.
        targets: targets; their logits are the last nodes.
        target_values: [targets] float32, without a soft cap.
        weights: [features + targets, nodes] float32, direct effects; the rows have inputs.
        bias, rest: [features + targets] float32, the parts of each row's value from constants, and from features that are not kept.
        softcap: soft cap of the model's logits, or None.
        saes: layer -> its SAE or transcoder, or a server's name of it; empty for a circuit from a file.
        plan: the `CircuitPlan` it was made by in this process, or None.
    """

    def __init__(
        self, *, token_ids: Sequence[int], tokens: Sequence[str], layers: int, features: Tensor, activations: Tensor, active: int,
        targets: Sequence[CircuitTarget], target_values: Tensor, weights: Tensor, bias: Tensor, rest: Tensor,
        node_threshold: float = 0.8, edge_threshold: float = 0.98, softcap: float | None = None,
        source: tuple[Any, Mapping[int, Any]] = (None, {}), plan: Any = None,
    ) -> None:  # fmt: skip
        self.token_ids, self.tokens, self.layers = list(token_ids), list(tokens), layers
        self.features, self.activations, self.active = features, activations, active
        self.targets, self.target_values = list(targets), target_values
        self.weights, self.bias, self.rest = weights, bias, rest
        self.node_threshold, self.edge_threshold = node_threshold, edge_threshold
        self.softcap, (self._lm, self.saes), self.plan = softcap, source, plan

    def pruned(self, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> Self:
        """The same circuit with other thresholds; tensors are shared.

        Args:
            node_threshold: nodes with this share of the influence are kept.
            edge_threshold: edges with this share of the influence between kept nodes are kept.
        """
        for name, share in (("node_threshold", node_threshold), ("edge_threshold", edge_threshold)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}={share}: expected a share from 0 to 1")
        made = object.__new__(type(self))
        kept = {name: value for name, value in vars(self).items() if name not in ("graph", "nodes", "edges")}
        vars(made).update(kept, node_threshold=node_threshold, edge_threshold=edge_threshold)
        return made

    # -- numbers of nodes --------------------------------------------------------------------

    @property
    def first_error(self) -> int:
        """Number of the first error node."""
        return len(self.features)

    @property
    def first_embedding(self) -> int:
        """Number of the first embedding node."""
        return self.first_error + self.layers * len(self.token_ids)

    @property
    def first_target(self) -> int:
        """Number of the first logit node."""
        return self.first_embedding + len(self.token_ids)

    @property
    def row_nodes(self) -> Tensor:
        """The node of each row of `weights`: [features + targets] int64."""
        return torch.cat((torch.arange(len(self.features)), torch.arange(self.first_target, self.weights.shape[1])))

    @property
    def row_levels(self) -> Tensor:
        """The layer of each row of `weights`; the number of layers for targets. [features + targets] int64."""
        return torch.cat((self.features[:, 0], torch.full((len(self.targets),), self.layers)))

    @property
    def target_weights(self) -> Tensor:
        """Weights of the targets, [nodes] float32, 0 for all other nodes."""
        found = torch.zeros(self.weights.shape[1])
        found[self.first_target :] = torch.tensor([target.weight for target in self.targets])
        return found

    def node(self, number: int) -> CircuitNode:
        """The node of a number."""
        share, tokens = self._influence[number].item(), len(self.token_ids)
        if number < self.first_error:
            layer, position, feature = self.features[number].tolist()
            return CircuitNode("feature", layer, position, feature, self.activations[number].item(), share)
        if number < self.first_embedding:
            layer, position = divmod(number - self.first_error, tokens)
            return CircuitNode("error", layer, position, -1, None, share)
        if number < self.first_target:
            position = number - self.first_embedding
            return CircuitNode("embedding", -1, position, self.token_ids[position], None, share)
        index = number - self.first_target
        return CircuitNode("logit", self.layers, tokens - 1, index, self.target_values[index].item(), share)

    def number_of(self, node: NodeKey) -> int:
        """The number of a feature node, given as a `CircuitNode` or (layer, position, feature).

        Raises:
            KeyError: no such feature in the circuit.
        """
        key = node.key if isinstance(node, CircuitNode) else tuple(node)
        found = self._numbers.get(key)
        if found is None or (isinstance(node, CircuitNode) and node.kind != "feature"):
            raise KeyError(
                f"{node!r} is no feature of this circuit: (layer, position, feature) of one of circuit.features"
            )
        return found

    @cached_property
    def _numbers(self) -> dict[tuple[int, ...], int]:
        return {tuple(key): number for number, key in enumerate(self.features.tolist())}

    @cached_property
    def _influence(self) -> Tensor:
        return self._all_influence / self._all_influence.sum().clamp(min=1e-30)

    @cached_property
    def _all_influence(self) -> Tensor:
        return influence(self.weights, self.row_nodes, self.row_levels, self.target_weights)

    # -- the pruned graph ------------------------------------------------------------------------

    @cached_property
    def graph(self) -> PrunedGraph:
        """Kept nodes and edges by the thresholds."""
        return prune(
            self.weights, self.row_nodes, self.row_levels, self.target_weights, len(self.features), self.first_embedding,
            self.node_threshold, self.edge_threshold,
        )  # fmt: skip

    @cached_property
    def nodes(self) -> list[CircuitNode]:
        """Kept nodes, in the order of their numbers."""
        return [self.node(number) for number in self.graph.nodes.nonzero()[:, 0].tolist()]

    @cached_property
    def edges(self) -> list[CircuitEdge]:
        """Kept edges, the largest first."""
        rows, sources = self.graph.edges.nonzero(as_tuple=True)
        weights = self.weights[rows, sources]
        order = weights.abs().argsort(descending=True)
        by_number = dict(zip(self.graph.nodes.nonzero()[:, 0].tolist(), self.nodes, strict=True))
        pairs = zip(sources[order].tolist(), self.row_nodes[rows[order]].tolist(), weights[order].tolist(), strict=True)
        return [CircuitEdge(by_number[source], by_number[target], weight) for source, target, weight in pairs]

    def scores(self) -> CircuitScores:
        """Replacement and completeness scores of the whole graph (Ameisen et al., 2025)."""
        found, errors = self._all_influence, slice(self.first_error, self.first_embedding)
        by_token, by_error = found[self.first_embedding : self.first_target].sum(), found[errors].sum()
        passed = found + self.target_weights
        explained = torch.ones_like(passed)  # nodes without inputs have none from errors
        for part, sizes, sums in parts_of(self.weights, torch.arange(len(self.weights))):
            explained[self.row_nodes[part]] -= sizes[:, errors].sum(1) / sums
        return CircuitScores(
            (by_token / (by_token + by_error).clamp(min=1e-30)).item(),
            ((explained * passed).sum() / passed.sum()).item(),
        )

    # -- interventions and files ---------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model that made it.

        Raises:
            ValueError: a circuit from a file, which has none.
        """
        if self._lm is None:
            raise ValueError("this circuit is from a file: one that lm.circuit makes knows its model and transcoders")
        return self._lm

    def intervene(self, changes: Any) -> CircuitEffects:
        """Changes of the targets if features get other values: predicted by the edges, and measured in the model.

        The prediction is linear, along all paths between kept features. The measurement is a request with `SetFeature` for each
        run, in one batch. Attention patterns, norms and other features answer as they do.

        Args:
            changes: {node: value}, or a list of these, one for each run. A node is a `CircuitNode`, or (layer, position, feature).

        Raises:
            KeyError: no such feature in the circuit.
            ValueError: a value that is not a finite number, or a circuit from a file.
        """
        return intervene(self, changes)

    def heads(self, edge: CircuitEdge) -> list[EdgeHead]:
        """The parts of an edge by the head that reads its source first, the largest first. A forward and a backward pass.

        Between positions, with a transcoder of each layer, they sum to the edge's weight. Effects along the stream, by Jacobians of
        MLPs, and by skip connections are in no head's part.

        Raises:
            ValueError, NotImplementedError: a circuit from a file, or a server's.
        """
        return edge_heads(self, edge)

    def qk(self, head: EdgeHead | tuple[int, int, int, int]) -> ScoreParts:
        """One attention score as a sum over pairs of nodes: one makes the query, the other one the key.

        The method is "Tracing Attention Computation Through Feature Interactions" (Kamath et al., 2025). Norm scales, and patterns
        of earlier layers, are the run's. A forward pass, and two backward passes with a row for each channel of the head.

        Args:
            head: an entry of `heads`, or (layer, head, query, key); the last two are positions.

        Raises:
            ValueError, NotImplementedError: no such head or position, or a circuit from a file, or a server's.
        """
        return score_parts(self, head)

    def to_json(self, slug: str = "circuit", scan: str = "custom") -> dict[str, Any]:
        """The pruned graph in circuit-tracer's format, which Neuronpedia's viewer reads.

        Args:
            slug: name of the graph.
            scan: name of the transcoders, by which the viewer finds descriptions of features.
        """
        return graph_json(self, slug, scan)

    def save(self, path: str | Path, scan: str = "custom") -> None:
        """Write `to_json` to a file, with the file's name as the slug."""
        Path(path).write_text(json.dumps(self.to_json(Path(path).stem, scan)), encoding="utf-8")

    @classmethod
    def load(cls, source: Any) -> Circuit:
        """Read a graph of circuit-tracer's format: a path, or the result of `to_json`. It has the pruned part, and no model.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a graph, or too large.
        """
        return read_graph(cls, source)

    def plot(self, edges: int = 500) -> Plot:
        """The pruned graph over layers and positions, with its largest edges. `Plot.figure` is plotly's.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        return draw_circuit(self, edges)

    # -- shown -------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        kept, edges = int(self.graph.nodes.sum()), int(self.graph.edges.sum())
        of = f"{len(self.features)} of {self.active} active features"
        return f"Circuit({kept} nodes and {edges} edges of {of}, {len(self.token_ids)} tokens, {len(self.targets)} targets)"

    def __rich__(self) -> Table:
        table = Table(title=repr(self), caption="features with the most influence on the targets")
        for column in ("layer", "position", "token", "feature", "activation", "influence"):
            table.add_column(column, justify="left" if column == "token" else "right")
        features = sorted((node for node in self.nodes if node.kind == "feature"), key=lambda node: -node.influence)
        for node in features[:LISTED]:
            token = repr(self.tokens[node.position])
            table.add_row(
                str(node.layer),
                str(node.position),
                Text(token),  # which may look like rich's markup
                str(node.feature),
                f"{node.value:.4g}",
                f"{node.influence:.2%}",
            )
        return table
