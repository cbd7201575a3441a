"""A value of the whole batch, cut into rows for the blocks that read it and put together after their edits."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from ...core.forward_batch import ForwardBatch
from .errors import EditError
from .nnsight_compat import apply
from .rows import RowSpan
from .trace import RequestTrace


class SharedValue:
    """A value of the whole batch, while the blocks that wait for it are served one after another.

    Served rows share the batch's memory, so an in-place edit reaches the model. Assigned rows are held until the last block
    has been served (`settle`): the batch's rows are copied once, however many requests assign.

    Args:
        value: what the model has computed. Its memory is never assigned to, since the model may use it elsewhere.
        of_logits: it has logit rows instead of token rows.
        readers: number of blocks that wait for it, as far as is known.

    Attributes:
        edits: how often each trace has edited its rows.
        row_memory: memory of the batch that was cut into single rows, [rows, ...] each; see `SaveTransfer.adopt`.
    """

    __slots__ = ("_assigned", "_cuts", "_whole", "edits", "of_logits", "readers", "row_memory", "value")

    def __init__(self, value: Any, of_logits: bool, readers: int = 1) -> None:
        self.value, self.of_logits, self.readers = value, of_logits, readers
        self.edits: dict[RequestTrace, int] = {}
        self._cuts: dict[int, _Cut] = {}
        self._whole: _Cut | None = None  # where the value is one tensor
        self._assigned = False
        self.row_memory: list[torch.Tensor] = []

    def rows_of(self, rows: RowSpan | None) -> Any:
        """The request's rows of each tensor, or what it has assigned to them. The whole value if `rows` is None."""
        value = self.value
        if rows is None or rows.alone:
            return value
        if self._whole is not None:
            return self._whole.rows_of(rows)
        if isinstance(value, torch.Tensor):
            self._whole = self._cut(value, rows)
            return self._whole.rows_of(rows)
        return apply(value, lambda tensor: self._cut(tensor, rows).rows_of(rows), torch.Tensor)

    def replace(self, rows: RowSpan | None, edited: Any) -> None:
        """Replace what the request was served by `edited`.

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
        for cut, tensor in assigned:  # after every tensor was checked
            cut.assign(rows, tensor)
            self._assigned = True

    def count_edit(self, trace: RequestTrace) -> None:
        """Count an edit by `trace`, in place or by assignment."""
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

    def _cut(self, tensor: torch.Tensor, rows: RowSpan) -> _Cut:
        cut = self._cuts.get(id(tensor))
        if cut is None:
            place = rows.layout(tensor, self.of_logits)
            cut = self._cuts[id(tensor)] = _Cut(tensor, *place, self.readers, tensor is self.value)
            self.row_memory += cut.row_memory()
        return cut

    def _replaced(self, full: Any, edited: Any, rows: RowSpan, assigned: list[tuple[_Cut, torch.Tensor]]) -> Any:
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
        if isinstance(full, ForwardBatch):  # blocks are served None for it
            return full
        if edited is not full and not rows.alone:
            raise EditError(f"the whole batch shares this {type(full).__name__}: one request cannot replace it")
        return edited

    def _replaced_tensor(
        self, full: torch.Tensor, edited: Any, rows: RowSpan, assigned: list[tuple[_Cut, torch.Tensor]]
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
    """A tensor of the batch, cut into the rows of its requests.

    Args:
        dim: dim of the rows; None for a tensor without rows, which all requests share.
        logits: the rows are logit rows.
        readers: see `SharedValue`.
        count_alone: rows may count edits on their own (`Tensor._version`). That holds for a value that is one tensor: the
            model uses it once. In a container, the model may ask later whether a tensor was edited.

    Attributes:
        rows_count_alone: torch does not count an edit of a row as an edit of `tensor`.
    """

    __slots__ = ("_assigned", "_pieces", "_served", "dim", "logits", "rows_count_alone", "tensor")

    def __init__(self, tensor: torch.Tensor, dim: int | None, logits: bool, readers: int, count_alone: bool) -> None:
        self.tensor, self.dim, self.logits = tensor, dim, logits
        # One call that cuts all rows is several times faster than one call per row. The rows must not be views to autograd:
        # a view keeps the whole batch alive, whatever storage it gets later.
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

    def row_memory(self) -> list[torch.Tensor]:
        """[the tensor as [rows, ...]], if all rows were cut and it has its storage for itself; else []."""
        tensor, dim = self.tensor, self.dim
        if self._pieces is None or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() > tensor.nbytes:
            return []
        return [tensor.detach().flatten(0, 1) if dim else tensor.detach()]

    def seen_by(self, rows: RowSpan) -> torch.Tensor:
        """What the request was last served."""
        served = self._served.get(rows.logit_start if self.logits else rows.start)
        return self.rows_of(rows) if served is None else served

    def rows_of(self, rows: RowSpan) -> torch.Tensor:
        """The request's rows, or what it has assigned to them."""
        dim, pieces = self.dim, self._pieces
        if dim is None:
            return self.tensor
        start, size = (rows.logit_start, rows.logit_size) if self.logits else (rows.start, rows.size)
        if start in self._assigned:
            return self._assigned[start]
        piece = None
        if pieces is not None and size == 1:
            piece, pieces[start] = pieces[start], None  # served once, since a block may reshape it in place
        if piece is None:
            piece = self.tensor.narrow(dim, start, size).detach()
        self._served[start] = piece
        return piece

    def assign(self, rows: RowSpan, edited: torch.Tensor) -> None:
        """Hold `edited` for the request's rows until `settled`."""
        start = rows.logit_start if self.logits else rows.start
        if edited is self._served.get(start):  # `output *= 2` has edited them in place
            self._assigned.pop(start, None)
        else:
            self._assigned[start] = edited

    def settled(self) -> torch.Tensor:
        """The tensor, or a new one if rows were assigned."""
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
    """`value` with an alias for each repeated tensor, so that each place can be replaced on its own."""
    seen: set[int] = set()

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen and not isinstance(tensor, torch.nn.Parameter):
            return tensor.detach()
        seen.add(id(tensor))
        return tensor

    return apply(value, once, torch.Tensor)


def describe(value: Any) -> str:
    """A short description of a value, for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} values"
    return f"{type(value).__name__}"


def leaves(value: Any) -> list[Any]:
    """The leaves of a module's ``(args, kwargs)``, or of its tuple or dict of outputs, in order."""
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def same_objects(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold identical objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def versions_of(parts: list[Any]) -> int:
    """In-place edits that torch has counted on the tensors of `parts`, in total."""
    return sum(part._version for part in parts if isinstance(part, torch.Tensor) and not part.is_inference())


def without_batch(value: Any) -> Any:
    """A module's ``(args, kwargs)`` with None for the engine's `forward_batch`. A block must not keep the whole batch alive."""
    if type(value) is tuple and len(value) == 2 and type(value[1]) is dict and "forward_batch" in value[1]:
        return value[0], {**value[1], "forward_batch": None}
    return value
