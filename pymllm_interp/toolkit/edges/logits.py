"""`lm.logit_attribution`: the parts of logits that heads, MLPs, embeddings and biases make (direct logit attribution).

The final norm has the scale of the run, so that it is linear. The parts add up to the logits before a soft cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from ...layers.activation import softcap
from ..circuits.targets import checked_targets, weighted_targets
from ..read_prompts import ReadPrompt
from .graph import EdgeGraph
from .run import outputs_of
from .stream import EdgeModel, weight_of

LISTED = 12


class LogitPart(NamedTuple):
    """A part of a logit, or of a difference of two."""

    source: str
    value: float


class LogitAttribution:
    """Parts of logits by source: `lm.logit_attribution` returns it.

    Attributes:
        values: [targets, sources] float32; the last source is "bias", the biases of all projections and norms.
        sources: names of the columns.
        targets: labels of the rows.
        totals: [targets] float32, sums of the rows: logits, or differences of two, before a soft cap.
    """

    def __init__(self, graph: EdgeGraph, values: Tensor, targets: Sequence[str], totals: Tensor) -> None:
        self._graph, self.values, self.targets, self.totals = graph, values, list(targets), totals
        self.sources = [*graph.sources(), "bias"]

    def __getitem__(self, source: str) -> Tensor:
        """[targets], the part of a source. Raises KeyError."""
        if source not in self.sources:
            raise KeyError(f"no source {source!r}; there are input, a0.h0, m0, ... and bias")
        return self.values[:, self.sources.index(source)]

    @property
    def heads(self) -> Tensor:
        """[targets, layers, heads] float32."""
        return self._by_layer()[..., :-1]

    @property
    def mlps(self) -> Tensor:
        """[targets, layers] float32."""
        return self._by_layer()[..., -1]

    def _by_layer(self) -> Tensor:
        return self.values[:, 1:-1].unflatten(-1, (self._graph.layers, self._graph.heads + 1))

    def top(self, n: int = LISTED, target: int = 0) -> list[LogitPart]:
        """The `n` largest parts of a target, up or down."""
        order = self.values[target].abs().argsort(descending=True)[:n].tolist()
        return [LogitPart(self.sources[i], self.values[target, i].item()) for i in order]

    def __repr__(self) -> str:
        return f"LogitAttribution({', '.join(self.targets[:3])}: {', '.join(f'{x:.4g}' for x in self.totals[:3].tolist())})"

    def __rich__(self) -> Table:
        table = Table("source", "part", title=repr(self), caption=f"the largest parts of {self.targets[0]}")
        for source, value in self.top():
            table.add_row(source, f"{value:+.4g}")
        return table


def logit_attribution(model: EdgeModel, prompt: Any, target: Any) -> LogitAttribution:
    """Attribute logits, see `LM.logit_attribution`."""
    lm = model.lm
    pairs = checked_targets(target, lm)
    found = outputs_of(model, [ReadPrompt.ids_of(lm, prompt)])
    lm.weights.check_version(model.weights_version, "lm.logit_attribution")
    last, states, logits = found.last[0], found.states[0, :, -1], found.logits[0]
    targets = weighted_targets(pairs, logits, lm, 1, 0.0)
    head = lm._module.get_submodule(lm.model_spec.family.head)
    weight, bias = weight_of(head, lm.model_spec.family.head), getattr(head, "bias", None)
    tokens = sorted({token for each in targets for token in (each.token, each.other) if token is not None})
    rows = weight[tokens].float()
    constant = rows @ model.final_norm.frozen(last, last - states.sum(0)) + model.final_norm.constant(rows)
    constant = constant if bias is None else constant + bias[tokens].float()
    parts = torch.cat([rows @ model.final_norm.frozen(last, states).T, constant.unsqueeze(1)], 1)
    _check(parts.sum(1), logits[tokens], lm)
    index = {token: i for i, token in enumerate(tokens)}
    values = torch.stack(
        [parts[index[each.token]] - (0.0 if each.other is None else parts[index[each.other]]) for each in targets]
    ).cpu()
    return LogitAttribution(model.graph, values, [each.label for each in targets], values.sum(1))


def _check(made: Tensor, logits: Tensor, lm: Any) -> None:
    """Compare sums with the model's own logits."""
    cap = getattr(lm.hf_config.get_text_config(), "final_logit_softcapping", None)
    error = ((made if cap is None else softcap(made, cap)) - logits).abs().max().item()
    if not error <= (1e-3 if lm.dtype == torch.float32 else 0.1) * max(1.0, logits.abs().max().item()):
        raise NotImplementedError(
            f"logits of this model ({lm.model_spec.family.name}): its head does more than a product and a soft cap; the sums "
            f"differ from its logits by {error:.2g}"
        )
