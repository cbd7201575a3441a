"""`lm.circuit`: the plan of a circuit, its checks, and its passes on the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...client.calls.requests import CallProgress
from ...utils.arguments import PromptError, is_whole, shown
from ..read_prompts import ReadPrompt
from ..wavefront import Wavefront
from .circuit import Circuit
from .frozen import FAMILIES
from .memory import check_memory, device_of_rows
from .passes import CircuitPasses
from .pruning import influence
from .replacement import Replacement, replacements_of
from .targets import CircuitTarget, checked_targets, weighted_targets

UPDATE_BATCHES = 4
"""Batches of features between two rankings, as in circuit-tracer."""


class CircuitPlan(NamedTuple):
    """Checked arguments of `LM.circuit`."""

    lm: Any
    token_ids: list[int]
    replacements: list[Replacement]
    pairs: list[tuple[int, int | None]] | None
    max_features: int | None
    max_logits: int
    logit_mass: float
    node_threshold: float
    edge_threshold: float
    batch: int
    skip: int
    max_bytes: int | None = None
    """Most bytes of memory, on the device and on the host; None: what there is."""
    weights_version: int = 0
    """`lm.weights.version` of the run, which all passes over it have."""


def planned(
    lm: Any, prompt: Any, transcoders: Any, target: Any, *, max_features: int | None, max_logits: int, logit_mass: float,
    node_threshold: float, edge_threshold: float, batch: int, skip: int, offload: bool, max_bytes: int | None = None,
) -> CircuitPlan:  # fmt: skip
    """Check the arguments of `LM.circuit`; nothing runs. Raises PromptError, ValueError, NotImplementedError: see `LM.circuit`."""
    family = lm.model_spec.family.name
    reason = Wavefront.why_not(lm) or (family not in FAMILIES and f"it is of the family {family}")
    if reason:
        raise NotImplementedError(f"circuits of this model: {reason}; they read native models of {', '.join(FAMILIES)}")
    for name, value, least in (
        ("max_features", max_features, 1),
        ("max_logits", max_logits, 1),
        ("batch", batch, 1),
        ("skip", skip, 0),
    ):
        if value is not None and (not is_whole(value) or value < least):
            raise ValueError(f"{name}={shown(value)}: expected a whole number from {least} on")
    for name, share in (
        ("logit_mass", logit_mass),
        ("node_threshold", node_threshold),
        ("edge_threshold", edge_threshold),
    ):
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"{name}={shown(share)}: expected a share from 0 to 1")
    ids = ReadPrompt.ids_of(lm, prompt)
    if len(ids) <= skip:
        raise PromptError(f"the prompt has {len(ids)} tokens, and skip={skip} leaves no position with nodes")
    if len(ids) > lm.limits.max_model_len:
        raise PromptError(f"the prompt has {len(ids)} tokens; this model takes {lm.limits.max_model_len}")
    plan = CircuitPlan(
        lm, ids, replacements_of(lm, transcoders, offload), checked_targets(target, lm), max_features, max_logits,
        logit_mass, node_threshold, edge_threshold, batch, skip, max_bytes,
    )  # fmt: skip
    check_memory(plan)
    return plan


def build(
    plan: CircuitPlan, progress: bool | None, on_rows: Callable[[int, int], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Circuit:  # fmt: skip
    """Run a plan.

    Args:
        on_rows: called with the number of finished rows, and of all. An error ends the run.
        check: called before each layer of each pass. An error ends the run.
    """
    plan = plan._replace(weights_version=plan.lm.backend.weights_version)
    with CircuitPasses.of(plan, check) as passes:
        targets = weighted_targets(plan.pairs, passes.logits, plan.lm, plan.max_logits, plan.logit_mass)
        rows = _Rows(plan, passes, targets)
        with CallProgress(progress, rows.count, "circuit rows") as shown_rows:
            before = 0
            for finished in rows.run():
                for _ in range(finished - before):
                    shown_rows.advance()
                before = finished
                if on_rows is not None:
                    on_rows(finished, rows.count)
        return rows.circuit()


class _Rows:
    """Rows of a circuit under way: first of the targets, then of the features with most influence so far."""

    def __init__(self, plan: CircuitPlan, passes: CircuitPasses, targets: list[CircuitTarget]) -> None:
        self._plan, self._passes, self._targets = plan, passes, targets
        self._layers = torch.cat(
            [
                torch.full_like(found.positions, made.layer)
                for made, found in zip(plan.replacements, passes.features, strict=True)
            ]
        )
        positions, features, values = (torch.cat(parts) for parts in zip(*passes.features, strict=True))
        self._features, self._values = torch.stack((self._layers, positions, features), -1), values
        self._active = len(values)
        self._kept = self._active if plan.max_features is None else min(plan.max_features, self._active)
        self.count = len(targets) + self._kept
        layers = plan.lm.model_spec.num_hidden_layers
        self._first_target = self._active + (layers + 1) * len(plan.token_ids)
        nodes = self._first_target + len(targets)
        check_memory(plan, self._active)
        self._device = device_of_rows(plan, self._active, self.count * nodes)
        self._weights = torch.zeros(self.count, nodes, device=self._device)
        self._bias, self._sums = torch.zeros(2, self.count)
        self._row_nodes = torch.zeros(self.count, dtype=torch.int64)
        self._depth_of_targets = 4 * layers

    def run(self) -> Iterator[int]:
        """The number of finished rows, again and again."""
        step, done = self._plan.batch, 0
        pairs = [(target.token, target.other) for target in self._targets]
        values = list[Tensor]()
        for first in range(0, len(pairs), step):
            part = pairs[first : first + step]
            values.append(self._passes.call("begin_targets", part))
            nodes = self._first_target + torch.arange(first, first + len(part))
            done = self._put(done, nodes, self._depth_of_targets)
            yield done
        self._target_values = torch.cat(values)
        visited = torch.zeros(self._active, dtype=torch.bool)
        while done < self.count:
            pending = self._most_influential(done, visited)
            visited[pending] = True
            # A pass begins at its highest layer and ends with its last position: those that are near go together.
            pending = pending[
                (self._layers[pending] * len(self._plan.token_ids) + self._features[pending, 1]).argsort()
            ]
            for batch in pending.split(step):
                self._passes.call("begin_features", batch)
                done = self._put(done, batch, 4 * int(self._layers[batch].max()) + 3)
                yield done

    def _most_influential(self, done: int, visited: Tensor) -> Tensor:
        """The next features to explain."""
        if self._kept == self._active:
            return torch.arange(self._active)
        weights = torch.zeros(self._weights.shape[1])
        weights[self._first_target :] = torch.tensor([target.weight for target in self._targets])
        nodes = self._row_nodes[:done]
        levels = torch.cat((self._layers, torch.tensor([self._depth_of_targets])))[nodes.clamp(max=self._active)]
        nodes, levels, weights, sums = (each.to(self._device) for each in (nodes, levels, weights, self._sums[:done]))
        found = influence(self._weights[:done], nodes, levels, weights, 1e-8, sums=sums)[: self._active].cpu()
        order = found.masked_fill(visited, -1.0).argsort(descending=True)
        return order[: min(UPDATE_BATCHES * self._plan.batch, self.count - done)]

    def _put(self, done: int, nodes: Tensor, depth: int) -> int:
        rows, bias = self._passes.rows_from(depth, self._device.type == "cuda")
        stop = done + len(nodes)
        self._weights[done:stop, : self._first_target], self._bias[done:stop] = rows, bias
        self._row_nodes[done:stop] = nodes
        self._sums[done:stop] = torch.linalg.vector_norm(rows, 1, 1).cpu()  # synchronizes: the rows' memory is reused
        return stop

    def circuit(self) -> Circuit:
        """The result, with the columns of kept features only."""
        kept = self._row_nodes[len(self._targets) :].sort().values
        columns = torch.cat((kept, torch.arange(self._active, self._weights.shape[1])))
        rest = self._weights[:, : self._active].sum(1, dtype=torch.float64)
        rest -= self._weights[:, kept].sum(1, dtype=torch.float64)
        rest = rest.cpu()
        rows = self._row_nodes.argsort()
        bias = self._bias[rows]
        bias[: self._kept] += self._passes.call("constants")[kept]
        plan, lm = self._plan, self._plan.lm
        texts = [str(token) for token in plan.token_ids] if lm.tokenizer is None else lm.to_str_tokens(plan.token_ids)
        return Circuit(
            token_ids=plan.token_ids, tokens=texts, layers=lm.model_spec.num_hidden_layers, features=self._features[kept],
            activations=self._values[kept], active=self._active, targets=self._targets, target_values=self._target_values,
            weights=self._weights[rows[:, None], columns].cpu(), bias=bias, rest=rest[rows].float(),
            node_threshold=plan.node_threshold, edge_threshold=plan.edge_threshold,
            softcap=self._passes.call("softcap"), source=(lm, {made.layer: made.sae for made in plan.replacements}),
            plan=plan,
        )  # fmt: skip
