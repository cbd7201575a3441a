"""Reductions of states to states: `States`, which reduces nothing, and pools over the positions: `Mean`, `Max` and `Last`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...registry import reduction
from .reduction import Reduction


@dataclass(frozen=True, eq=False)
class States(Reduction):
    """Identity: each state unchanged."""

    on_device = False
    of_states = True
    narrows = True


class Pool(States):
    """One state of all captured positions. `fold` adds a position's state to that of the positions before it."""

    pools = True
    initial = 0.0
    """Initial value of the fold, unless it `narrows`."""

    def fold(self, before: np.ndarray, state: np.ndarray) -> None:
        """Fold one more state [sites, width] into `before` [sites, width], in place.

        Both are float64, or integers with the bits of the captured values if the reduction `narrows`.
        """
        raise NotImplementedError

    def fold_rows(self, before: Tensor, states: Tensor) -> None:
        """Fold states [n, width] into `before` [width] float32, in place. It runs on the device if the reduction `sums`."""
        raise NotImplementedError

    def finished(self, folded: Tensor, count: int) -> Tensor:
        """The result [sites, width] of `count` folded states."""
        return folded


@reduction
@dataclass(frozen=True, eq=False)
class Mean(Pool):
    """The mean over the captured positions."""

    narrows = False
    sums = True

    def fold(self, before: np.ndarray, state: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):  # infinities give NaN, as they do in torch
            before += state

    def fold_rows(self, before: Tensor, states: Tensor) -> None:
        before += states.sum(0, dtype=torch.float32)

    def finished(self, folded: Tensor, count: int) -> Tensor:
        return folded / max(count, 1)


@reduction
@dataclass(frozen=True, eq=False)
class Max(Pool):
    """The largest of each value over the captured positions; NaN if one is."""

    narrows = False
    sums = True
    initial = float("-inf")

    def fold(self, before: np.ndarray, state: np.ndarray) -> None:
        np.maximum(before, state, out=before)

    def fold_rows(self, before: Tensor, states: Tensor) -> None:
        torch.maximum(before, states.amax(0).float(), out=before)


@reduction
@dataclass(frozen=True, eq=False)
class Last(Pool):
    """The state at the last captured position."""

    def needed(self, captured: np.ndarray, prompt_len: int) -> np.ndarray:
        found = captured.copy()
        found[np.flatnonzero(found[:prompt_len])[:-1]] = False
        return found

    def placed(self, positions: Tensor) -> Tensor:
        return positions[-1:].clone()

    def fold(self, before: np.ndarray, state: np.ndarray) -> None:
        before[:] = state


STATES = States()
