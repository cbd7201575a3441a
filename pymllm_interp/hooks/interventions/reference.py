"""Reference implementations of all ops in torch, against which kernels are tested."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .op import Op, row_dots


def apply(op: Op, state: Tensor, ordinals: Tensor | None = None) -> Tensor:
    """`state` after `op`: computed in float32, rounded once to the state's dtype.

    Each row is computed independently, so that its bits do not depend on its batch. An ordinal, or a gate at the op's own
    site, selects rows. Other rows keep their bits; an identity keeps all.

    Args:
        state: [rows, width] of a dtype that float32 holds.
        ordinals: [rows] from `ordinals_of`, on the state's device; -1 for rows that are not selected. None: row i is position i.

    Returns:
        [rows, width] in the state's dtype.
    """
    if ordinals is None:
        ordinals = torch.arange(len(state), device=state.device)
    vectors = [vector.to(state.device) for vector in op.vectors]
    return act(op, state, gated(op, state, ordinals, vectors), vectors)


def gated(op: Op, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`ordinals` [rows] with -1 for rows whose gate does not fire. `vectors`: `op.vectors` on the state's device.

    A gate at an earlier site is not asked: its flags are with the pass (gates.py).
    """
    if not op.tests_rows:
        return ordinals
    fires = row_dots(_seen(op, state), vectors[-1])[:, 0] > op.when.threshold
    return torch.where(fires, ordinals, -1)


def act(op: Op, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`apply` without the gate, to the rows with an ordinal of `gated` other than -1."""
    if op.identity:
        return state
    selected = (ordinals >= 0)[:, None]
    acted = op.act(_seen(op, state), selected, ordinals, vectors)
    if op.channels is not None:
        selected = selected & op.channels.to(state.device)
    return torch.where(selected, acted.to(state.dtype), state)


def _seen(op: Op, state: Tensor) -> Tensor:
    """The state in float32, with zeros at the heads that are not the op's."""
    if op.channels is None:
        return state.float()
    return torch.where(op.channels.to(state.device), state.float(), 0.0)
