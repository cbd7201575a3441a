"""Matching pursuit: features of a state, chosen one after the other ([Costa et al. 2025](https://arxiv.org/abs/2506.03093))."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layers.invariant import product


class Pursuit(NamedTuple):
    """End of a pursuit of one state."""

    residual_threshold: float = 1e-2
    """Length of the rest, below which it ends; 0: no limit."""
    max_iterations: int | None = None
    """Most choices; None: the width of a state."""
    stop_on_duplicate_support: bool = True
    """Whether it ends with a choice that adds no feature."""


def pursue(x: Tensor, decoder: Tensor, pursuit: Pursuit) -> Tensor:
    """The features [..., d_sae] of centred states [..., width]. Each row is independent of the others.

    Each step chooses the row of the decoder [d_sae, width] with the largest product with the rest of the state. The product is
    added to the feature, and its part of the state subtracted from the rest.
    """
    left = x.reshape(-1, x.shape[-1])
    features = left.new_zeros(len(left), len(decoder))
    done = torch.zeros(len(left), dtype=torch.bool, device=x.device)
    for _ in range(pursuit.max_iterations or x.shape[-1]):
        chosen = product(left.detach(), decoder.detach().T).relu_().argmax(-1, keepdim=True)
        directions = decoder[chosen[:, 0]]
        values = (left * directions).sum(-1, keepdim=True).relu() * ~done[:, None]
        # SAELens compares the sets of features before and after.
        repeated = (features.gather(-1, chosen) != 0) | (values == 0)
        features = features.scatter_add(-1, chosen, values)
        left = left - values * directions
        if pursuit.stop_on_duplicate_support:
            done = done | repeated[:, 0]
        if pursuit.residual_threshold > 0:
            done = done | (left.norm(dim=-1) < pursuit.residual_threshold)
        if bool(done.all()):
            break
    return features.view(*x.shape[:-1], -1)
