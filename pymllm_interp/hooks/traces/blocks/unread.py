"""Outputs that a decoder layer does not read. An edit of one would change nothing, so it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ....core.model_spec import Family
from .errors import EditError


def unread_outputs(paths: set[str], root: str, family: Family) -> Iterator[tuple[str, tuple[int, str]]]:
    """Outputs of modules that a decoder layer drops, as in transformers: see `Points.unread`."""
    layer = re.compile(rf"{re.escape(root)}\.{re.escape(family.layers)}\.(\d+)\.(.+)")
    entries = {family.attention: (1, "attention weights are edited in `.source`, with attn_implementation='eager'")}
    if family.router:
        entries[f"{family.mlp}.{family.router}"] = (
            0,
            "Steer('router.{0}', ...) edits the logits before the choice, and output[1] has its scores",
        )
    if family.mlp_in_tuple:
        entries[family.mlp] = 1, "the scores are output[1] of its router"
    for path in paths:
        found = layer.fullmatch(path)
        if found is not None and found[2] in entries:
            entry, instead = entries[found[2]]
            yield f"{path}.output", (entry, instead.format(found[1]))


def replaces(entry: int, served: Any, edited: Any) -> bool:
    """Whether an assigned tuple has another value in this entry."""
    if not (isinstance(served, tuple) and isinstance(edited, tuple) and len(served) == len(edited) > entry):
        return False
    before, after = served[entry], edited[entry]
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before is not after and not (before.shape == after.shape and bool((before == after).all()))
    return before is not after


def unread_error(request_id: str, location: str, dropped: tuple[int, str]) -> EditError:
    """The error of an edit of such an output."""
    entry, instead = dropped
    return EditError(
        f"request {request_id}: edit of `{location}`: the model does not read output[{entry}], so nothing would change; {instead}"
    )
