"""A request's rows of a value that the whole batch shares: cut out for a read, put back after an edit.

The batch is flat, so most values carry the step's token rows, in dim 1 behind a leading 1 at module boundaries and in
dim 0 inside a module. The head's values carry *logit rows* instead: the rows that it ran on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.forward_batch import ForwardBatch
from .nnsight_compat import apply


class EditError(ValueError):
    """An edit that does not fit the value that it replaces."""


@dataclass(slots=True)
class Rows:
    """Where a request's rows are in the values of one pass."""

    start: int
    size: int
    total: int
    logit_start: int
    logit_size: int
    logit_total: int

    alone: bool = field(init=False)
    """Whether the request has all rows, so that values need no cutting."""

    def __post_init__(self) -> None:
        self.alone = self.size == self.total and self.logit_size == self.logit_total

    def span(self, tensor: torch.Tensor, of_logits: bool) -> tuple[int, int, int] | None:
        """(dim, start, size) of the request's rows in `tensor`; None where it carries no rows."""
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
            return None
        shape = tensor.shape
        tokens, logits = (self.total, self.start, self.size), (self.logit_total, self.logit_start, self.logit_size)
        for total, start, size in (logits, tokens) if of_logits else (tokens, logits):
            if len(shape) >= 2 and shape[0] == 1 and shape[1] == total:
                return 1, start, size
            if len(shape) >= 1 and shape[0] == total:
                return 0, start, size
        return None

    def narrow(self, value: Any, of_logits: bool) -> Any:
        """`value` with each tensor cut to the request's rows. A cut shares its memory: an edit in place reaches the model."""
        if self.alone:
            return value
        if isinstance(value, torch.Tensor):
            span = self.span(value, of_logits)
            # Detached: what autograd knows as a view holds on to the whole batch, whatever memory it is given later.
            return value if span is None else value.narrow(*span).detach()
        return apply(value, lambda tensor: self.narrow(tensor, of_logits), torch.Tensor)

    def splice(self, full: Any, edited: Any, of_logits: bool, owned: dict[int, torch.Tensor]) -> Any:
        """`full` with the request's rows replaced by `edited`.

        Args:
            full: the whole batch's value. It is not written to: the model may hold it elsewhere.
            edited: shaped like what `narrow` served.
            owned: copies of `full`'s tensors made on this visit, by id; they are written to in place, so that many
                writers copy the batch's rows once.

        Raises:
            EditError: another type, shape, dtype or device.
        """
        if isinstance(full, torch.Tensor):
            return self._splice_tensor(full, edited, of_logits, owned)
        if isinstance(full, (tuple, list)):
            if not isinstance(edited, (tuple, list)) or len(edited) != len(full):
                raise EditError(f"expected a {type(full).__name__} of {len(full)} values, got {describe(edited)}")
            parts = [self.splice(f, e, of_logits, owned) for f, e in zip(full, edited, strict=True)]
            return type(full)(*parts) if hasattr(full, "_fields") else type(full)(parts)
        if isinstance(full, dict):
            if not isinstance(edited, dict) or edited.keys() != full.keys():
                raise EditError(f"expected a dict with keys {sorted(full)}, got {describe(edited)}")
            merged = full.copy()
            for key in full:
                merged[key] = self.splice(full[key], edited[key], of_logits, owned)
            return merged
        if isinstance(full, ForwardBatch):  # a block is served None in its place
            return full
        if edited is not full and not self.alone:
            raise EditError(f"the whole batch shares this {type(full).__name__}: one request cannot replace it")
        return edited

    def _splice_tensor(
        self, full: torch.Tensor, edited: Any, of_logits: bool, owned: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        span = None if self.alone else self.span(full, of_logits)
        target = full if span is None else full.narrow(*span)
        if (
            not isinstance(edited, torch.Tensor)
            or edited.shape != target.shape
            or edited.dtype != target.dtype
            or edited.device != target.device
        ):
            raise EditError(f"expected {describe(target)}, got {describe(edited)}")
        if self.alone or edited is full:
            return edited
        if span is None:
            raise EditError(f"the whole batch shares {describe(full)}: one request cannot replace it")
        if id(full) not in owned:
            full = full.clone()
            owned[id(full)] = full
            target = full.narrow(*span)
        target.copy_(edited)
        return full


class Shared:
    """A value of the whole batch, while the blocks that wait for it are served one after the other.

    Attributes:
        value: what the model goes on with.
        of_logits: it carries logit rows, not token rows.
    """

    __slots__ = ("_owned", "of_logits", "value")

    def __init__(self, value: Any, of_logits: bool) -> None:
        self.value = value
        self.of_logits = of_logits
        self._owned: dict[int, torch.Tensor] = {}

    def rows_of(self, rows: Rows | None) -> Any:
        """What a request sees; all of it without `rows`."""
        return self.value if rows is None or rows.alone else rows.narrow(self.value, self.of_logits)

    def replace(self, rows: Rows | None, edited: Any) -> None:
        """Put `edited` in the place of what the request saw. Raises EditError where it does not fit."""
        self.value = edited if rows is None else rows.splice(self.value, edited, self.of_logits, self._owned)


def describe(value: Any) -> str:
    """A value's kind in a few words, for errors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} values"
    return f"{type(value).__name__}"
