"""An op and a reduction that no module of the package knows. Whatever process imports this file has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pymllm_interp.hooks.captures.reductions.pools import Pool
from pymllm_interp.hooks.interventions.op import Gate, Op
from pymllm_interp.hooks.positions import Positions
from pymllm_interp.hooks.registry import op, reduction
from pymllm_interp.hooks.site import Site
from pymllm_interp.kernels import edit_codes as codes
from pymllm_interp.kernels.edit_codes import OpWords


@op
@dataclass(frozen=True, eq=False)
class Damp(Op):
    """``(1 - share) * state``."""

    site: Site | str
    share: float = 0.5
    sign: Literal["keep", "flip"] = "keep"
    positions: Positions = "all"
    when: Gate | None = None

    @property
    def factor(self) -> float:
        return (1 - self.share) * (-1 if self.sign == "flip" else 1)

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        return self.factor * x

    def words(self) -> OpWords:
        return OpWords(codes.SCALE, rank=0, a=self.factor)


@reduction
@dataclass(frozen=True, eq=False)
class Largest(Pool):
    """The largest value of each channel over the captured positions."""

    initial = -torch.inf

    narrows = False

    def fold(self, before: np.ndarray, state: np.ndarray) -> None:
        np.maximum(before, state, out=before)
