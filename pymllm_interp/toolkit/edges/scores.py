"""`EdgeScores`: scores of all edges, circuits of the largest, and their faithfulness."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from ...utils.arguments import is_whole, shown
from .graph import EdgeGraph, EdgeNames, ScoredEdge
from .run import EdgePair, measured
from .stream import EdgeModel

LISTED = 12
"""Edges that the table lists."""
PICKS = ("greedy", "top")
MAX_CELLS = 1 << 26
"""Pairs of a source and a target in a file that is read, at most."""


class EdgeFaithfulness(NamedTuple):
    """Metric of circuits with all other edges patched.

    Attributes:
        edges: [circuits] int64, numbers of edges.
        metric: [circuits] float32, mean over the pairs.
        values: [circuits] float32, 1 for the clean run's metric and 0 for the corrupted one's.
    """

    edges: Tensor
    metric: Tensor
    values: Tensor


class EdgeScores:
    """Estimated change of the metric by patching each edge: `lm.edge_attribution` returns it.

    Attributes:
        values: [sources, targets] float32, mean over the pairs; 0 where there is no edge.
        sources, targets: names of the rows and columns.
        real: [sources, targets] bool, where there is an edge.
        clean, corrupted: metric of the two prompts, mean over the pairs.
        method: method of the scores.
    """

    def __init__(
        self,
        graph: EdgeGraph,
        values: Tensor,
        metrics: Tensor,
        method: str,
        source: tuple[EdgeModel, Sequence[EdgePair]] | None = None,
    ) -> None:
        self._names, self._metrics, self._source = EdgeNames(graph), metrics, source
        self.values, self.method = values, method
        self.sources, self.targets, self.real = self._names.sources, self._names.targets, self._names.real
        self.clean, self.corrupted = metrics.mean(0).tolist()

    def __len__(self) -> int:
        """Number of edges."""
        return int(self.real.sum())

    def __getitem__(self, edge: Any) -> float:
        """Score of an edge: "a0.h1->m1", or (source, target). Raises PromptError."""
        return self.values[self._names.index(edge)].item()

    def __repr__(self) -> str:
        return f"EdgeScores({len(self)} edges, clean {self.clean:.4g}, corrupted {self.corrupted:.4g}, {self.method})"

    def __rich__(self) -> Table:
        table = Table(title=repr(self), caption="the largest; estimated changes of the metric")
        for column in ("source", "target", "score"):
            table.add_column(column, justify="right" if column == "score" else "left")
        for edge in self.top(LISTED):
            table.add_row(edge.source, edge.target, f"{edge.score:+.4g}")
        return table

    # -- circuits ------------------------------------------------------------------------------

    def top(self, n: int = LISTED) -> list[ScoredEdge]:
        """The `n` edges with the largest scores, up or down, the largest first."""
        self._check(n)
        sizes = self.values.abs().masked_fill(~self.real, -1.0).flatten()
        return [self._edge(*divmod(at, len(self.targets))) for at in sizes.topk(min(n, len(self))).indices.tolist()]

    def greedy(self, n: int) -> list[ScoredEdge]:
        """`n` edges from the logits on (Hanna et al. 2024). Each is the largest into a node of the circuit so far."""
        self._check(n)
        graph, found = self._names.graph, list[ScoredEdge]()
        waiting, entered = list[tuple[float, int, int]](), set[int]()

        def enter(column: int) -> None:
            if column in entered:
                return
            entered.add(column)
            for row in self.real[:, column].nonzero()[:, 0].tolist():
                heapq.heappush(waiting, (-abs(self.values[row, column].item()), row, column))

        enter(len(self.targets) - 1)
        while waiting and len(found) < n:
            _, row, column = heapq.heappop(waiting)
            found.append(self._edge(row, column))
            for own in graph.inputs_of(row):
                enter(own)
        return found

    def _edge(self, row: int, column: int) -> ScoredEdge:
        return ScoredEdge(self.sources[row], self.targets[column], self.values[row, column].item())

    def _check(self, n: Any) -> None:
        if not is_whole(n) or n < 0:
            raise ValueError(f"n={shown(n)}: expected a number of edges from 0 on")

    # -- faithfulness --------------------------------------------------------------------------

    def faithfulness(self, circuits: Iterable[Any], pick: str = "greedy") -> EdgeFaithfulness:
        """Metric of the clean prompts where all edges outside of a circuit carry the corrupted run's outputs.

        Args:
            circuits: numbers of edges, lists of edges, or masks [sources, targets] bool. Each is one run for each pair, all in a
                few batches.
            pick: "greedy" or "top", for numbers.

        Raises:
            PromptError, ValueError: no edge of this model, or an invalid number or pick.
            ValueError: both runs have the same metric, or one is no number: no share of their difference is defined.
            RuntimeError: scores that were loaded, without their model; or the weights were edited since.
        """
        if self._source is None:
            raise RuntimeError(
                "these scores were loaded from a file: lm.edge_attribution gives scores with their model"
            )
        if pick not in PICKS:
            raise ValueError(f"pick={shown(pick)}: expected 'greedy' or 'top'")
        choose = self.greedy if pick == "greedy" else self.top
        kept = [self._names.mask(choose(each) if is_whole(each) else each) for each in circuits]
        if not kept:
            raise ValueError("circuits is empty: give numbers of edges, lists of edges or masks")
        difference = self.clean - self.corrupted
        if not difference or not math.isfinite(difference):
            what = "no finite metrics" if difference else "the same metric"
            raise ValueError(
                f"the clean and the corrupted runs have {what}, {self.clean:.6g} and {self.corrupted:.6g}: faithfulness is a "
                "share of their difference. Choose other prompts, or another metric"
            )
        masks = torch.stack(kept)
        model, pairs = self._source
        model.lm._check_outside()
        if model.lm.weights.version != model.weights_version:
            raise RuntimeError("the weights of the model were edited after these scores: make the scores again")
        values = torch.tensor([measured(model, pair, self.real & ~masks) for pair in pairs])
        metric = values.mean(0)
        return EdgeFaithfulness(masks.sum((1, 2)), metric, (metric - self.corrupted) / difference)

    # -- files ---------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Sizes of the graph, metrics, and the score of each edge by name."""
        rows = self.real.nonzero().tolist()
        scores = {
            f"{self.sources[row]}->{self.targets[column]}": self.values[row, column].item() for row, column in rows
        }
        return json.dumps(
            {
                "graph": self._names.graph._asdict(),
                "method": self.method,
                "metrics": self._metrics.tolist(),
                "scores": scores,
            }
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, source: str | PathLike[str]) -> EdgeScores:
        """Scores from a file, or from the text of `to_json`; without their model. Raises ValueError: another format."""
        text = source if isinstance(source, str) and source.lstrip().startswith("{") else Path(source).read_text()
        try:
            given = json.loads(text)
            graph = EdgeGraph(**given["graph"])
            sizes, edges = graph[:3], len(given["scores"])
            known = all(is_whole(size) and 1 <= size <= edges for size in sizes) and graph.num_cells <= MAX_CELLS
            if not known or graph.num_edges != edges:
                raise ValueError(
                    f"not the scores of edges: {edges} scores for {shown(list(sizes))} layers, heads and K heads"
                )
            names = EdgeNames(graph)
            values = torch.zeros(names.real.shape)
            for edge, score in given["scores"].items():
                values[names.index(edge)] = score
            return cls(names.graph, values, torch.tensor(given["metrics"]).view(-1, 2), given["method"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the scores of edges: {error}") from error
