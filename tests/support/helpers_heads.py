"""Declared ops in float64."""

from __future__ import annotations

from typing import Any

import torch

from pymllm_interp import Ablate, Clamp, Patch, Scale, Steer
from pymllm_interp.interventions import Generated


def in_double(op: Any, x: torch.Tensor, prompt_len: int) -> torch.Tensor:
    """What `op` makes of the states x [positions, width] of a request, by the words of the documentation."""
    x, everything, at = x.double(), range(len(x)), op.positions
    if isinstance(at, str):
        chosen = {"all": everything, "prompt": range(prompt_len), "generated": everything[prompt_len:]}[at]
    elif isinstance(at, Generated):
        chosen = everything[prompt_len:][at.start : at.stop : at.step]
    else:
        chosen = range(prompt_len)[at] if isinstance(at, slice) else [place % prompt_len for place in at]
    y, norms = x.clone(), x.norm(dim=1, keepdim=True)
    match op:
        case Steer(norm="match"):
            y = x + op.scale * norms * op.vector.double() / op.vector.double().norm()
        case Steer():
            y = x + op.scale * op.vector.double()
            if op.norm == "preserve":
                y = y * norms / y.norm(dim=1, keepdim=True)
        case Ablate():
            d = op.directions.double()
            y = x - x @ torch.linalg.pinv(d) @ d
        case Clamp():
            unit = op.direction.double() / op.direction.double().norm()
            y = x + ((x @ unit).clamp(op.low, op.high) - x @ unit)[:, None] * unit
        case Scale():
            y = op.factor * x
        case Patch():
            for place, values in zip(chosen, op.values, strict=True):
                y[place] = values.double()
    acts = torch.zeros(len(x), 1, dtype=torch.bool)
    acts[list(chosen)] = True
    if op.when is not None:
        acts &= (x @ op.when.probe.double() > op.when.threshold)[:, None]
    return torch.where(acts, y, x)
