"""`EdgeGraph`: heads, MLPs, embeddings and logits as nodes, and the edges of the residual stream between them.

The stream before a node is the sum of the embeddings and of all earlier outputs. So an edge goes from each source to each later
target. A head has three inputs. Its key and value inputs belong to a K and V head::

    sources   input  a0.h0  a0.h1 ... m0  a1.h0 ...          outputs, in the order of a pass
    targets   a0.h0<q> ... a0.kv0<k> ... a0.kv0<v> ... m0 ... logits

With as many K and V heads as queries, names are as in the EAP-IG package: ``input->a0.h0<k>``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...utils.arguments import PromptError, shown

INPUT, LOGITS_NODE = "input", "logits"


class EdgeGraph(NamedTuple):
    """Sizes that fix the nodes and edges of a model.

    Attributes:
        layers, heads, kv_heads: numbers of decoder layers, and of heads in each.
        parallel: whether attention and MLP of a layer read the same stream.
    """

    layers: int
    heads: int
    kv_heads: int
    parallel: bool

    @classmethod
    def of(cls, lm: Any) -> EdgeGraph:
        """The graph of a model, from its spec."""
        spec = lm.model_spec
        parallel = "resid_mid" not in spec.family.points and getattr(lm.hf_config, "use_parallel_residual", True)
        return cls(spec.num_hidden_layers, spec.shape("q")[0], spec.shape("k")[0], parallel)

    def first_source(self, layer: int) -> int:
        """Index of a layer's first head among the sources: the number of sources before its attention."""
        return 1 + layer * (self.heads + 1)

    def mlp_sources(self, layer: int) -> int:
        """Number of sources before a layer's MLP."""
        return self.first_source(layer) + (0 if self.parallel else self.heads)

    def targets_of(self, layer: int, kind: str) -> slice:
        """Columns of a layer's targets: "q", "k", "v" or "mlp"; "logits" of any layer."""
        width = self.heads + 2 * self.kv_heads + 1
        if kind == LOGITS_NODE:
            return slice(self.layers * width, self.layers * width + 1)
        starts = {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads, "mlp": width - 1}
        size = {"q": self.heads, "mlp": 1}.get(kind, self.kv_heads)
        first = layer * width + starts[kind]
        return slice(first, first + size)

    @property
    def num_cells(self) -> int:
        """Number of sources times number of targets."""
        return self.first_source(self.layers) * self.targets_of(0, LOGITS_NODE).stop

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        by_layer = (
            self.first_source(layer) * (self.heads + 2 * self.kv_heads) + self.mlp_sources(layer)
            for layer in range(self.layers)
        )
        return sum(by_layer) + self.first_source(self.layers)

    def sources(self) -> list[str]:
        """Names of the sources."""
        names = [INPUT]
        for layer in range(self.layers):
            names += [f"a{layer}.h{head}" for head in range(self.heads)] + [f"m{layer}"]
        return names

    def targets(self) -> list[str]:
        """Names of the targets."""
        names, kv = [], "h" if self.kv_heads == self.heads else "kv"
        for layer in range(self.layers):
            names += [f"a{layer}.h{head}<q>" for head in range(self.heads)]
            names += [f"a{layer}.{kv}{head}<{kind}>" for kind in "kv" for head in range(self.kv_heads)]
            names.append(f"m{layer}")
        return [*names, LOGITS_NODE]

    def edges(self) -> torch.Tensor:
        """[sources, targets] bool: whether there is an edge."""
        found = torch.zeros(len(self.sources()), len(self.targets()), dtype=torch.bool)
        for layer in range(self.layers):
            for kind in "qkv":
                found[: self.first_source(layer), self.targets_of(layer, kind)] = True
            found[: self.mlp_sources(layer), self.targets_of(layer, "mlp")] = True
        found[:, self.targets_of(0, LOGITS_NODE)] = True
        return found

    def inputs_of(self, source: int) -> list[int]:
        """Targets that are inputs of a source's node: a head's query, key and value, or an MLP's one input."""
        if not source:
            return []
        layer, head = divmod(source - 1, self.heads + 1)
        if head == self.heads:
            return [self.targets_of(layer, "mlp").start]
        own = head // (self.heads // self.kv_heads)
        return [self.targets_of(layer, "q").start + head, *(self.targets_of(layer, kind).start + own for kind in "kv")]


class ScoredEdge(NamedTuple):
    """An edge with its score."""

    source: str
    target: str
    score: float

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


class EdgeNames:
    """Indexes of a graph's edges by name.

    Attributes:
        sources, targets: names in the order of the rows and columns.
        real: [sources, targets] bool, `EdgeGraph.edges`.
    """

    def __init__(self, graph: EdgeGraph) -> None:
        self.graph, self.sources, self.targets, self.real = graph, graph.sources(), graph.targets(), graph.edges()

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.sources)}

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.targets)}

    @cached_property
    def _known(self) -> frozenset[tuple[int, int]]:
        return frozenset((row, column) for row, column in self.real.nonzero().tolist())

    def index(self, edge: Any) -> tuple[int, int]:
        """Row and column of an edge: "a0.h1->m1", or a tuple that begins with source and target.
        Raises PromptError: no edge of the model."""
        pair = edge.split("->") if isinstance(edge, str) else list(edge[:2]) if isinstance(edge, tuple | list) else []
        found = (self._rows.get(pair[0], -1), self._columns.get(pair[1], -1)) if len(pair) == 2 else (-1, -1)
        if found not in self._known:
            raise PromptError(f"{shown(edge)} is no edge of this model; edges are such as 'input->{self.targets[0]}'")
        return found

    def mask(self, edges: Any) -> torch.Tensor:
        """[sources, targets] bool, True at the given edges, which may be such a tensor. Raises PromptError."""
        if isinstance(edges, torch.Tensor):
            if edges.shape != self.real.shape or edges.dtype != torch.bool:
                raise PromptError(
                    f"a mask of edges is {list(self.real.shape)} bool, not {list(edges.shape)} {edges.dtype}"
                )
            return edges.cpu() & self.real
        found = torch.zeros_like(self.real)
        for row, column in map(self.index, edges):
            found[row, column] = True
        return found
