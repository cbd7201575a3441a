"""Interventions on the features of a circuit: predicted by its edges, and measured by requests with `SetFeature`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...hooks.interventions.set_feature import MAX_FEATURES, SetFeature
from ...hooks.spec import is_number
from ..sweep import LAST_LOGITS, ONE
from .pruning import CELLS


class CircuitEffects(NamedTuple):
    """Changes of a circuit's targets by interventions.

    Attributes:
        predicted: [runs, targets] float32, by the circuit's edges.
        measured: [runs, targets] float32, in the model.
    """

    predicted: Tensor
    measured: Tensor

    @property
    def faithfulness(self) -> float:
        """Share of the measured changes' sum of squares that the predictions explain; 1 for equal ones.

        Without any measured change it is minus infinity for predictions of one.
        """
        error = (self.measured - self.predicted).square().sum().item()
        return 1 - error / size if (size := self.measured.square().sum().item()) else 1.0 if not error else -math.inf


def intervene(circuit: Any, changes: Any) -> CircuitEffects:
    """Predict and measure interventions, see `Circuit.intervene`."""
    lm = circuit.model
    runs = [_numbered(circuit, run) for run in ([changes] if isinstance(changes, Mapping) else list(changes))]
    if not runs:
        raise ValueError("intervene takes {node: value}, or a list of these")
    ops = [_ops(circuit, run) for run in runs]
    _check_weights(circuit)
    outs = lm.sweep(circuit.token_ids, [None, *ops], ONE, progress=False, capture=[LAST_LOGITS])
    _check_weights(circuit)
    logits = torch.cat([out.activations["logits"] for out in outs]).float()
    values = _values(circuit, logits)
    predicted = torch.stack([_predicted(circuit, run) for run in runs])
    return CircuitEffects(predicted, values[1:] - values[0])


def _check_weights(circuit: Any) -> None:
    if circuit.plan is not None:  # made in this process
        circuit.model.weights.check_version(circuit.plan.weights_version, "lm.circuit")


def _numbered(circuit: Any, run: Any) -> dict[int, float]:
    if not isinstance(run, Mapping) or not run:
        raise ValueError("intervene takes {node: value}, or a list of these")
    found = {}
    for node, value in run.items():
        if not is_number(value):
            raise ValueError(f"the value of {node!r} is {value!r}; expected a finite number")
        found[circuit.number_of(node)] = float(value)
    return found


def _ops(circuit: Any, run: Mapping[int, float]) -> list[SetFeature]:
    """An op for the features of a layer and position, in parts of `MAX_FEATURES`."""
    groups: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for number, value in run.items():
        layer, position, feature = circuit.features[number].tolist()
        groups[layer, position].append((feature, value))
    return [
        SetFeature(circuit.saes[layer], dict(pairs[first : first + MAX_FEATURES]), positions=[position])
        for (layer, position), pairs in groups.items()
        for first in range(0, len(pairs), MAX_FEATURES)
    ]


def _values(circuit: Any, logits: Tensor) -> Tensor:
    """Values [runs, targets] of the targets, without the model's soft cap."""
    cap = circuit.softcap
    logits = logits if cap is None else torch.atanh((logits / cap).clamp(-1 + 1e-7, 1 - 1e-7)) * cap
    mean = logits.mean(-1)
    columns = [
        logits[:, target.token] - (mean if target.other is None else logits[:, target.other])
        for target in circuit.targets
    ]
    return torch.stack(columns, -1)


def _predicted(circuit: Any, run: Mapping[int, float]) -> Tensor:
    """Changes [targets] along all paths. Features that are set keep their values, and others answer linearly."""
    count, layers = len(circuit.features), circuit.features[:, 0]
    activations = torch.where(circuit.activations == 0, 1.0, circuit.activations)
    change, given = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
    for number, value in run.items():
        change[number], given[number] = value - circuit.activations[number], True
    for layer in layers.unique().tolist():
        for part in ((layers == layer) & ~given).nonzero()[:, 0].split(max(1, CELLS // max(1, count))):
            change[part] = circuit.weights[part, :count] @ (change / activations)
    return circuit.weights[count:, :count] @ (change / activations)
