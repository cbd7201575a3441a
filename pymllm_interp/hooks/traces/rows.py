"""A request's rows of a value that the whole batch shares: cut out for a read, put back after an edit.

The batch is flat, so most values carry the step's token rows, in dim 1 behind a leading 1 at module boundaries and in
dim 0 inside a module. The head's values carry *logit rows* instead: the rows that it ran on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...core.forward_batch import ForwardBatch
from .nnsight_compat import apply

if TYPE_CHECKING:
    from .trace import RequestTrace


class EditError(ValueError):
    """An edit that does not fit the value that it replaces."""


class Rows:
    """Where a request's rows are in the values of one pass.

    Attributes:
        start, size, total: among the pass's token rows.
        logit_start, logit_size, logit_total: among its logit rows.
        alone: the request has all rows, so that values need no cutting.
    """

    __slots__ = ("alone", "logit_size", "logit_start", "logit_total", "size", "start", "total")

    def __init__(self, start: int, size: int, total: int, logit_start: int, logit_size: int, logit_total: int) -> None:
        self.start, self.size, self.total = start, size, total
        self.logit_start, self.logit_size, self.logit_total = logit_start, logit_size, logit_total
        self.alone = size == total and logit_size == logit_total

    def layout(self, tensor: torch.Tensor, of_logits: bool) -> tuple[int | None, bool]:
        """(the dim of `tensor` that holds the pass's rows, or None; whether they are logit rows)."""
        if type(tensor) is torch.Tensor or not isinstance(tensor, torch.nn.Parameter):
            shape = tensor.shape
            for logits in (True, False) if of_logits else (False, True):
                total = self.logit_total if logits else self.total
                if len(shape) >= 2 and shape[0] == 1 and shape[1] == total:
                    return 1, logits
                if len(shape) >= 1 and shape[0] == total:
                    return 0, logits
        return None, False

    def narrow(self, value: Any, of_logits: bool) -> Any:
        """What a block of the request is served of `value`."""
        return Shared(value, of_logits).rows_of(self)


class Shared:
    """A value of the whole batch, while the blocks that wait for it are served one after the other.

    What a block is served shares the batch's memory: an edit in place reaches the model. What it assigns is held until the
    last block has gone on (`settle`): however many assign, the batch's rows are copied once.

    Args:
        value: what the model has computed. Nothing is assigned to its memory: the model may hold it elsewhere.
        of_logits: it carries logit rows, not token rows.
        readers: how many blocks wait for it, as far as is known.

    Attributes:
        edits: how often each trace has edited its rows.
        cut: memory of the batch that was cut into rows for all who read, [rows, ...] each.
    """

    __slots__ = ("_assigned", "_cuts", "_whole", "cut", "edits", "of_logits", "readers", "value")

    def __init__(self, value: Any, of_logits: bool, readers: int = 1) -> None:
        self.value, self.of_logits, self.readers = value, of_logits, readers
        self.edits: dict[RequestTrace, int] = {}
        self._cuts: dict[int, _Cut] = {}
        self._whole: _Cut | None = None  # where the value is one tensor
        self._assigned = False
        self.cut: list[torch.Tensor] = []

    def rows_of(self, rows: Rows | None) -> Any:
        """What a request sees: its rows of each tensor, or what it has assigned to them; everything without `rows`."""
        value = self.value
        if rows is None or rows.alone:
            return value
        if self._whole is not None:
            return self._whole.rows_of(rows)
        if isinstance(value, torch.Tensor):
            self._whole = self._cut(value, rows)
            return self._whole.rows_of(rows)
        return apply(value, lambda tensor: self._cut(tensor, rows).rows_of(rows), torch.Tensor)

    def replace(self, rows: Rows | None, edited: Any) -> None:
        """Put `edited` in the place of what the request saw.

        Raises:
            EditError: another type, shape, dtype or device.
        """
        if rows is None:
            self.value = edited
            return
        if not (self._assigned or rows.alone or isinstance(self.value, torch.Tensor)):
            self.value = _each_once(self.value)
        assigned: list[tuple[_Cut, torch.Tensor]] = []
        self.value = self._replaced(self.value, edited, rows, assigned)
        for cut, tensor in assigned:  # all of them, or none where one does not fit
            cut.assign(rows, tensor)
            self._assigned = True

    def count_edit(self, trace: RequestTrace) -> None:
        """`trace` has edited its rows, in place or by assignment."""
        trace.receipt.edits += 1
        self.edits[trace] = self.edits.get(trace, 0) + 1

    def settle(self) -> Any:
        """What the model goes on with."""
        if self.edits and self._whole is not None and self._whole.rows_count_alone:
            torch.autograd.graph.increment_version([self._whole.tensor])
        if self._assigned:
            self.value = apply(self.value, self._settled, torch.Tensor)
            self._assigned, self._whole = False, None
            self._cuts.clear()
        return self.value

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        cut = self._cuts.get(id(tensor))
        return tensor if cut is None else cut.settled()

    def _cut(self, tensor: torch.Tensor, rows: Rows) -> _Cut:
        cut = self._cuts.get(id(tensor))
        if cut is None:
            place = rows.layout(tensor, self.of_logits)
            cut = self._cuts[id(tensor)] = _Cut(tensor, *place, self.readers, tensor is self.value)
            self.cut += cut.memory()
        return cut

    def _replaced(self, full: Any, edited: Any, rows: Rows, assigned: list[tuple[_Cut, torch.Tensor]]) -> Any:
        if isinstance(full, torch.Tensor):
            return self._replaced_tensor(full, edited, rows, assigned)
        if isinstance(full, (tuple, list)):
            if not isinstance(edited, (tuple, list)) or len(edited) != len(full):
                raise EditError(f"expected a {type(full).__name__} of {len(full)} values, got {describe(edited)}")
            parts = [self._replaced(f, e, rows, assigned) for f, e in zip(full, edited, strict=True)]
            return type(full)(*parts) if hasattr(full, "_fields") else type(full)(parts)
        if isinstance(full, dict):
            if not isinstance(edited, dict) or edited.keys() != full.keys():
                raise EditError(f"expected a dict with keys {sorted(full)}, got {describe(edited)}")
            merged = full.copy()
            for key in full:
                merged[key] = self._replaced(full[key], edited[key], rows, assigned)
            return merged
        if isinstance(full, ForwardBatch):  # a block is served None in its place
            return full
        if edited is not full and not rows.alone:
            raise EditError(f"the whole batch shares this {type(full).__name__}: one request cannot replace it")
        return edited

    def _replaced_tensor(
        self, full: torch.Tensor, edited: Any, rows: Rows, assigned: list[tuple[_Cut, torch.Tensor]]
    ) -> torch.Tensor:
        cut = None if rows.alone else self._cut(full, rows)
        seen = full if cut is None else cut.seen_by(rows)
        if (
            not isinstance(edited, torch.Tensor)
            or edited.shape != seen.shape
            or edited.dtype != seen.dtype
            or edited.device != seen.device
        ):
            raise EditError(f"expected {describe(seen)}, got {describe(edited)}")
        if cut is None or edited is full:
            return edited
        if cut.dim is None:
            raise EditError(f"the whole batch shares {describe(full)}: one request cannot replace it")
        assigned.append((cut, edited))
        return full


class _Cut:
    """A tensor of the batch, by requests.

    Args:
        readers: see `Shared`.
        count_alone: rows may count their edits by themselves (`Tensor._version`). The model takes each of its values once, and
            then sees what is in it; only of those that it passes along with others it asks whether they have been edited.

    Attributes:
        dim: that holds the rows; None where it carries none, and is everybody's.
        logits: they are logit rows.
        rows_count_alone: an edit of a row is none of `tensor`, as far as torch knows.
    """

    __slots__ = ("_assigned", "_pieces", "_served", "dim", "logits", "rows_count_alone", "tensor")

    def __init__(self, tensor: torch.Tensor, dim: int | None, logits: bool, readers: int, count_alone: bool) -> None:
        self.tensor, self.dim, self.logits = tensor, dim, logits
        # Cutting out every row in one call takes a fraction of the time that it takes row by row.
        # Nothing that autograd knows as a view: that holds on to the whole batch, whatever memory it is given later.
        self._pieces: list[torch.Tensor | None] | None = None
        self.rows_count_alone = False
        if dim is not None and readers * 3 > tensor.shape[dim]:
            self.rows_count_alone = count_alone
            if count_alone:
                self._pieces = list(tensor.detach().unsafe_split(1, dim))
            else:
                self._pieces = list(map(torch.Tensor.detach, tensor.split(1, dim)))
        self._served: dict[int, torch.Tensor] = {}
        self._assigned: dict[int, torch.Tensor] = {}

    def memory(self) -> list[torch.Tensor]:
        """The tensor, [rows, ...], where every row was cut out of memory that it has for itself."""
        tensor, dim = self.tensor, self.dim
        if self._pieces is None or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() > tensor.nbytes:
            return []
        return [tensor.detach().flatten(0, 1) if dim else tensor.detach()]

    def seen_by(self, rows: Rows) -> torch.Tensor:
        """What the request has been served last."""
        served = self._served.get(rows.logit_start if self.logits else rows.start)
        return self.rows_of(rows) if served is None else served

    def rows_of(self, rows: Rows) -> torch.Tensor:
        """The request's rows, or what it has assigned to them."""
        dim, pieces = self.dim, self._pieces
        if dim is None:
            return self.tensor
        start, size = (rows.logit_start, rows.logit_size) if self.logits else (rows.start, rows.size)
        if start in self._assigned:
            return self._assigned[start]
        piece = None
        if pieces is not None and size == 1:
            piece, pieces[start] = pieces[start], None  # each is served once: a block may give it another shape
        if piece is None:
            piece = self.tensor.narrow(dim, start, size).detach()
        self._served[start] = piece
        return piece

    def assign(self, rows: Rows, edited: torch.Tensor) -> None:
        """Note `edited` in the place of the request's rows."""
        start = rows.logit_start if self.logits else rows.start
        if edited is self._served.get(start):  # `output *= 2`: it is there already
            self._assigned.pop(start, None)
        else:
            self._assigned[start] = edited

    def settled(self) -> torch.Tensor:
        """The tensor, or a new one where something was assigned."""
        if not self._assigned:
            return self.tensor
        dim, end, parts = self.dim, 0, []
        assert dim is not None
        for start in sorted(self._assigned):
            edited = self._assigned[start]
            if start > end:
                parts.append(self.tensor.narrow(dim, end, start - end))
            parts.append(edited)
            end = start + edited.shape[dim]
        if end < self.tensor.shape[dim]:
            parts.append(self.tensor.narrow(dim, end, self.tensor.shape[dim] - end))
        return torch.cat(parts, dim)


def _each_once(value: Any) -> Any:
    """`value`, where each tensor that it holds twice is two: one of them may be replaced alone."""
    seen: set[int] = set()

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen and not isinstance(tensor, torch.nn.Parameter):
            return tensor.detach()
        seen.add(id(tensor))
        return tensor

    return apply(value, once, torch.Tensor)


def describe(value: Any) -> str:
    """A value's kind in a few words, for errors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} values"
    return f"{type(value).__name__}"
