"""What each op means, in torch: the reference for every kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .specs import (
    Ablate,
    Clamp,
    Intervention,
    Patch,
    Scale,
    Steer,
)


def apply(op: Intervention, state: Tensor, ordinals: Tensor | None = None) -> Tensor:
    """What `op` makes of `state`: computed in float32 from the state as it is, rounded once to its dtype at the end.

    Each row by itself, so that its bits do not depend on its batch. Rows that the op does not touch (by their ordinal, by its
    gate), and all of them where it is the identity, keep their bits.

    Args:
        state: [rows, width], of a dtype that float32 holds.
        ordinals: [rows] of `ordinals_of`, on the state's device; -1 keeps a row out. None: row i is position i.

    Returns:
        [rows, width], of the state's dtype.
    """
    if ordinals is None:
        ordinals = torch.arange(len(state), device=state.device)
    vectors = [vector.to(state.device) for vector in vectors_of(op)]
    return act(op, state, gated(op, state, ordinals, vectors), vectors)


def vectors_of(op: Intervention) -> list[Tensor]:
    """What `op` is computed with, float32 on the CPU: its own vectors, [width] or [n, width], where it has any; then its gate's."""
    match op:
        case Steer():
            own = [op.unit if op.norm == "match" else op.vector]
        case Ablate():
            own = [op.basis]
        case Clamp():
            own = [op.unit]
        case Patch():
            own = [op.values]
        case Scale():
            own = []
    return own if op.when is None else [*own, op.when.probe]


def gated(op: Intervention, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`ordinals` [rows], -1 where the op's gate is shut. `vectors`: those of `vectors_of`, on the state's device."""
    if op.when is None:
        return ordinals
    fires = _dots(state.float(), vectors[-1])[:, 0] > op.when.threshold
    return torch.where(fires, ordinals, -1)


def act(op: Intervention, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`apply` behind the gate, to the rows whose ordinal of `gated` is not -1."""
    if op.identity:
        return state
    x = state.float()
    touched = (ordinals >= 0)[:, None]
    match op:
        case Steer(norm="match"):
            y = x + op.scale * _norms(x) * vectors[0]
        case Steer():
            y = x + op.scale * vectors[0]  # for "none" also `layers.host_edits.Added`, of several requests at once
            if op.norm == "preserve":
                norms = _norms(y)
                y = y * torch.where(norms > 0, _norms(x) / norms, 1.0)  # a state that became zero has no direction
        case Ablate():
            y = x
            for axis in vectors[0]:
                y = y - _dots(x, axis) * axis
        case Clamp():
            projection = _dots(x, vectors[0])
            wanted = projection.clamp(op.low, op.high)
            touched = touched & (wanted != projection)
            y = x + (wanted - projection) * vectors[0]
        case Scale():
            y = op.factor * x
        case Patch():
            values = vectors[0]
            y = values.expand_as(x) if values.ndim == 1 else values[ordinals.clamp(min=0)]
    return torch.where(touched, y.to(state.dtype), state)


def _dots(x: Tensor, vector: Tensor) -> Tensor:
    """[rows, width] and [width] -> [rows, 1]. Not a matrix product, whose sums depend on how many rows there are."""
    return (x * vector).sum(dim=-1, keepdim=True)


def _norms(x: Tensor) -> Tensor:
    """[rows, width] -> [rows, 1]."""
    return x.norm(dim=-1, keepdim=True)
