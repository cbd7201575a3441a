"""Random declared edits, and requests with what a reference gave for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pymllm_interp import Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.interventions import Generated, Knockout


@dataclass
class Call:
    """One request, and what the reference gave."""

    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]
    aborted: bool = False
    traced: Any = None
    wanted: Any = None
    found: Any = field(default=None, repr=False)


def random_edit(
    rng: random.Random, site: str, length: int, vectors: Sequence[torch.Tensor], gate: Callable[[], Gate]
) -> Any:
    """An op at a site, or a knockout, of a prompt of this length."""
    chosen, place = rng.choice(vectors), rng.randrange(length)
    positions = rng.choice(["all", "prompt", "generated", [place], slice(place, None, 2), Generated(1, None, 2)])
    kind = rng.randrange(6)
    if kind == 0:
        return Scale(site, 0.3, positions=positions)
    if kind == 1:
        return Patch(site, chosen, positions=positions)
    if kind == 2:
        return Knockout(rng.choice([0, 1, "*"]), from_=slice(max(place, 1), None), to=[0], heads=[rng.randrange(9)])
    if kind == 3:
        return Steer(site, chosen, positions=positions, when=gate())
    return Steer(site, chosen, scale=rng.choice([0.5, 1.0]), positions=positions, norm=rng.choice(["none", "preserve"]))
