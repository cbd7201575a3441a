"""Attention heads of a spec: ``Scale("z.5", 0, heads=[3])``, at the sites `q`, `k`, `v` and `z`.

A spec with heads has vectors for these heads only, concatenated in the order given. For a model they are widened to the whole
state, with zeros at all other heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..core.limits import MAX_NAMED
from ..core.model_spec import HEAD_SITES, PATTERN, ModelSpec
from ..utils.arguments import is_whole, shown

Heads = int | Sequence[int] | Tensor | None
"""One head, or several; negative numbers count from the last head. None: the whole state."""


def checked_heads(heads: Heads, kind: str) -> tuple[int, ...] | None:
    """`heads` as a tuple. Raises ValueError: a kind of site without heads, no heads, or anything but whole numbers."""
    if heads is None:
        return None
    if kind not in (*HEAD_SITES, PATTERN):
        raise ValueError(f"heads={shown(heads)}: {kind} has no heads; {', '.join(HEAD_SITES)} have")
    count = heads.numel() if isinstance(heads, Tensor) else len(heads) if _is_list(heads) else 1
    if count > MAX_NAMED:
        raise ValueError(f"heads names {count} heads; at most {MAX_NAMED}")
    given: Any = heads.tolist() if isinstance(heads, Tensor) else heads
    found: list[Any] = list(given) if _is_list(given) else [given]
    if not found or not all(is_whole(head) for head in found):
        raise ValueError(f"heads={shown(heads)}: expected a whole number, or a list of them that is not empty")
    return tuple(int(head) for head in found)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def heads_in(heads: Sequence[int], model: ModelSpec, kind: str) -> tuple[int, ...]:
    """`heads`, counted from the first head of a kind of site.
    Raises ValueError: a head that the model does not have, or one named twice."""
    count, setting = model.shape(kind)[0], model.settings(kind)[0]
    for head in heads:
        if not -count <= head < count:
            raise ValueError(
                f"there is no head {head}; {kind} has {count} ({setting}), 0 to {count - 1}, or -{count} to -1 from the end"
            )
    found = tuple(head % count for head in heads)
    if len(set(found)) < len(found):
        raise ValueError(f"heads={list(heads)} names a head twice; {kind} has {count} ({setting})")
    return found


def widened(tensor: Tensor, heads: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """[..., len(heads) * head_dim] -> [..., width]: zeros at all other heads.

    Args:
        shape: shape of a whole state, (heads, head_dim).
    """
    whole = tensor.new_zeros(*tensor.shape[:-1], *shape)
    whole[..., list(heads), :] = tensor.unflatten(-1, (len(heads), shape[1]))
    return whole.flatten(-2)


def channels_of(heads: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """[width] bool: the channels of the heads."""
    return widened(torch.ones(len(heads) * shape[1]), heads, shape).bool()
