"""QK attributions: which heads carry an edge, and which nodes make a head attend.

Edges have frozen attention patterns, so they do not say why a head attends. A score before the softmax is bilinear::

    score = scaling * (sum over nodes i of query_i) . (sum over nodes j of key_j)

The part of a node in a rotated query or key is its effect on each channel. Norm scales and earlier patterns are the run's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...utils.arguments import is_whole, shown
from .passes import CircuitPasses

PAIRS = 1 << 24
"""Pairs of nodes at once."""


class EdgeHead(NamedTuple):
    """A part of an edge, by one attention head.

    Attributes:
        layer, head: the head that reads the edge's source first.
        query, key: positions; the key is the source's.
        weight: part of the edge's weight.
    """

    layer: int
    head: int
    query: int
    key: int
    weight: float


class ScorePair(NamedTuple):
    """One term of a score.

    Attributes:
        query, key: `CircuitNode`, or the text "features that are not kept" or "constants".
        weight: part of the score.
    """

    query: Any
    key: Any
    weight: float


class ScoreParts:
    """An attention score by nodes of a circuit. All pairs sum to it.

    Attributes:
        query, key: [nodes + 2, head_dim] float32, parts of the rotated query and key by node number. The last two are of features
            that are not kept, and of constants.
        scaling: scale of the score.
        score: the score of the run, without a soft cap.
        pattern: the attention weight of the run.
    """

    def __init__(self, circuit: Any, query: Tensor, key: Tensor, scaling: float, score: float, pattern: float) -> None:
        self._circuit, self.query, self.key, self.scaling = circuit, query, key, scaling
        self.score, self.pattern = score, pattern

    @property
    def by_query(self) -> Tensor:
        """Parts of the score [nodes + 2] by the node on the query's side."""
        return self.scaling * (self.query @ self.key.sum(0))

    @property
    def by_key(self) -> Tensor:
        """Parts of the score [nodes + 2] by the node on the key's side."""
        return self.scaling * (self.key @ self.query.sum(0))

    def pairs(self, most: int = 20) -> list[ScorePair]:
        """The largest terms, by magnitude."""
        (queries, keys), found = (part.abs().sum(1).nonzero()[:, 0] for part in (self.query, self.key)), list[Any]()
        for own in queries.split(max(1, PAIRS // max(1, len(keys)))):
            terms = self.scaling * (self.query[own] @ self.key[keys].T)
            top = terms.abs().flatten().topk(min(most, terms.numel())).indices
            rows, columns = top // len(keys), top % len(keys)
            found += zip(terms[rows, columns].tolist(), own[rows].tolist(), keys[columns].tolist(), strict=True)
        found.sort(key=lambda term: -abs(term[0]))
        return [ScorePair(self._name(one), self._name(other), weight) for weight, one, other in found[:most]]

    def _name(self, number: int) -> Any:
        rest = number - self._circuit.weights.shape[1]
        return self._circuit.node(number) if rest < 0 else ("features that are not kept", "constants")[rest]

    def __repr__(self) -> str:
        return f"ScoreParts(score {self.score:.4g}, attention {self.pattern:.2%})"


def edge_heads(circuit: Any, edge: Any) -> list[EdgeHead]:
    """The heads of an edge, see `Circuit.heads`."""
    plan = _plan_of(circuit, "circuit.heads")
    with CircuitPasses.of(plan) as passes:
        columns = _Columns(circuit, passes)
        if edge.target.kind == "logit":
            target = circuit.targets[edge.target.feature]
            passes.call("begin_targets", [(target.token, target.other)])
            depth = 4 * circuit.layers
        else:
            column = columns.features[circuit.number_of(edge.target)]
            passes.call("begin_features", column[None])
            depth = 4 * edge.target.layer + 3
        passes.call("watch", columns.of(edge.source))
        passes.rows_from(depth)
        effects = passes.call("head_effects")
    layers, heads, queries = (effects != 0).nonzero(as_tuple=True)
    weights = effects[layers, heads, queries]
    order, key = weights.abs().argsort(descending=True), edge.source.position
    each = zip(*(tensor[order].tolist() for tensor in (layers, heads, queries, weights)), strict=True)
    return [EdgeHead(layer, head, query, key, weight) for layer, head, query, weight in each]


def score_parts(circuit: Any, head: Any) -> ScoreParts:
    """The parts of a score, see `Circuit.qk`."""
    plan = _plan_of(circuit, "circuit.qk")
    layer, number, query, key = _checked(circuit, plan, tuple(head)[:4])
    with CircuitPasses.of(plan) as passes:
        columns = _Columns(circuit, passes)
        of_query = columns.parts(passes, layer, number, query, False)
        of_key = columns.parts(passes, layer, number, key, True)
        score, pattern, scaling = passes.call("head_score", layer, number, query, key)
    return ScoreParts(circuit, of_query, of_key, scaling, score, pattern)


def _plan_of(circuit: Any, feature: str) -> Any:
    circuit.model.backend.require_process(feature)
    return circuit.plan


def _checked(circuit: Any, plan: Any, place: tuple[Any, ...]) -> tuple[int, int, int, int]:
    tokens, heads = len(circuit.token_ids), plan.lm.model_spec.num_attention_heads
    most = (circuit.layers, heads, tokens, tokens)
    known = len(place) == 4 and all(is_whole(one) and 0 <= one < top for one, top in zip(place, most, strict=True))
    if not known or place[3] > place[2]:
        raise ValueError(
            f"qk: {shown(place)} is no (layer, head, query, key) of {circuit.layers} layers, {heads} heads and {tokens} tokens, "
            "with the key not after the query"
        )
    layer, head, query, key = place
    return layer, head, query, key


class _Columns:
    """Columns of a run's rows for the nodes of a circuit. Its run has the same active features.

    Attributes:
        features: [features] int64, columns of kept features.
    """

    def __init__(self, circuit: Any, passes: CircuitPasses) -> None:
        self._circuit, tokens = circuit, len(circuit.token_ids)
        found = zip(circuit.plan.replacements, passes.features, strict=True)
        width = max(made.sae.d_sae for made in circuit.plan.replacements)
        active = torch.cat([(made.layer * tokens + own.positions) * width + own.features for made, own in found])
        layers, positions, numbers = circuit.features.unbind(1)
        wanted = (layers * tokens + positions) * width + numbers
        if not torch.isin(wanted, active).all():
            raise RuntimeError("the run has other active features: a transcoder was edited, so make the circuit again")
        self.features = torch.searchsorted(active, wanted)
        self._first_error = len(active)

    def of(self, node: Any) -> int:
        """The column of a node that is no logit."""
        if node.kind == "feature":
            return int(self.features[self._circuit.number_of(node)])
        layer = node.layer if node.kind == "error" else self._circuit.layers
        return self._first_error + layer * len(self._circuit.token_ids) + node.position

    def parts(self, passes: CircuitPasses, layer: int, head: int, position: int, keys: bool) -> Tensor:
        """Parts [nodes + 2, head_dim] of a head's rotated query or key."""
        constants = passes.call("begin_head", layer, head, position, keys)
        rows, bias = passes.rows_from(4 * layer)
        first = self._first_error
        rest = rows[:, :first].sum(1) - rows[:, self.features].sum(1)
        none = torch.zeros(len(rows), len(self._circuit.targets))
        kept = rows[:, self.features], rows[:, first:], none, rest[:, None], (bias + constants)[:, None]
        return torch.cat(kept, 1).T.contiguous()
