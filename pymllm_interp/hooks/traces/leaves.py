"""What a module's inputs and outputs hold."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass


def leaves(value: Any) -> list[Any]:
    """What a module's ``(args, kwargs)``, or its tuple or dict of outputs, holds, in order."""
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def same_objects(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the very same."""
    return len(now) == len(before) and all(map(is_, now, before))


def writes_to(parts: list[Any]) -> int:
    """How often torch has seen the tensors among `parts` written to."""
    return sum(part._version for part in parts if isinstance(part, torch.Tensor) and not part.is_inference())


def without_batch(value: Any) -> Any:
    """A module's ``(args, kwargs)`` without the engine's own `forward_batch`: a block must not hold the whole batch."""
    if type(value) is tuple and len(value) == 2 and type(value[1]) is dict and "forward_batch" in value[1]:
        return value[0], {**value[1], "forward_batch": None}
    return value
