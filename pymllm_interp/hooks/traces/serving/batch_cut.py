"""`BatchCut`: a tensor of the batch, cut into the rows of its requests; `GatheredBatch`: copied rows of several."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from .rows import BatchRows, Rows, rows_at


class GatheredBatch:
    """A padded copy of the rows of several prompts. `write_edits` brings in-place edits of the copy to the model.

    Rows of one request are a view, so a block may write into them while the model uses the value. This gives the copy the
    same effect. It keeps neither the copy nor the model's tensor alive.

    Args:
        cut: the tensor that the rows are from.
        tensor: the copy: [requests, tokens, ...], or [requests, ...] for a step's logits and samples.
    """

    __slots__ = ("__weakref__", "_copy", "_cut", "_dim", "_logits", "_model_tensor", "_rows", "_version")

    def __init__(self, cut: BatchCut, rows: BatchRows, tensor: torch.Tensor) -> None:
        self._cut: weakref.ref[BatchCut] | None = weakref.ref(cut)  # lives as long as the model serves the value
        self._rows, self._copy, self._version = weakref.ref(rows), weakref.ref(tensor), tensor._version
        self._dim, self._logits = cut.dim, cut.logits
        self._model_tensor = weakref.ref(cut.tensor)

    @property
    def alive(self) -> bool:
        """Whether an edit can still come, and reach the model."""
        return self._copy() is not None and self._model_tensor() is not None

    @property
    def _open_cut(self) -> BatchCut | None:
        """The cut while the value is served; None afterwards."""
        return None if self._cut is None else self._cut()

    def refresh(self) -> torch.Tensor:
        """The copy, with later writes to the rows."""
        copy, rows, cut = self._copy(), self._rows(), self._open_cut
        assert copy is not None and rows is not None and cut is not None
        now = cut.settled()
        copy.copy_(rows.gather(now[0] if self._dim else now, self._logits)[0].view_as(copy))
        self._version = copy._version
        return copy

    def settle(self, tensor: torch.Tensor) -> None:
        """Write later edits to `tensor`, with which the model continues."""
        self._cut, self._model_tensor = None, weakref.ref(tensor)

    def write_edits(self) -> None:
        """Write the copy to its rows, if it was edited in place since the last time."""
        copy, rows = self._copy(), self._rows()
        if copy is None or rows is None or copy._version == self._version:
            return
        self._version = copy._version
        cut = self._open_cut
        if cut is not None and cut.is_assigned:
            cut.assign_batch(rows, copy)
            return
        tensor = self._model_tensor()
        if tensor is not None:
            rows.scatter(copy, tensor[0] if self._dim else tensor, self._logits)


class _ServedBatch(NamedTuple):
    rows: BatchRows
    tensor: torch.Tensor
    in_place: bool
    """In-place edits reach the model: it is a view of the model's tensor, or `gathered`."""
    gathered: GatheredBatch | None = None


class BatchCut:
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

    __slots__ = (
        "__weakref__",
        "_assigned",
        "_batch",
        "_gathered",
        "_pieces",
        "_served",
        "dim",
        "logits",
        "rows_count_alone",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, dim: int | None, logits: bool, readers: int, count_alone: bool) -> None:
        self.tensor, self.dim, self.logits = tensor, dim, logits
        # One call that cuts all rows is several times faster than one call per row. The rows must not be views to autograd:
        # a view keeps the whole batch alive, whatever storage it gets later.
        self._pieces: list[torch.Tensor | None] | None = None
        self.rows_count_alone = False
        if dim is not None and readers * 3 > tensor.shape[dim] and not tensor.requires_grad:
            self.rows_count_alone = count_alone
            single = tensor  # with strides as of `rows_at`
            if dim == 1:
                single = tensor.as_strided(tensor.shape, (tensor.stride(1), *tensor.stride()[1:]))
            if count_alone:
                self._pieces = list(single.detach().unsafe_split(1, dim))
            else:
                self._pieces = list(map(torch.Tensor.detach, single.split(1, dim)))
        self._served: dict[int, torch.Tensor] = {}
        self._assigned: dict[int, torch.Tensor] = {}
        self._batch: _ServedBatch | None = None
        self._gathered: list[GatheredBatch] = []

    @property
    def is_assigned(self) -> bool:
        """Whether rows were assigned."""
        return bool(self._assigned)

    def row_memory(self) -> list[torch.Tensor]:
        """[the tensor as [rows, ...]], if all rows were cut and no other value has its storage; else []."""
        tensor, dim = self.tensor, self.dim
        if self._pieces is None or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() > tensor.nbytes:
            return []
        return [tensor.detach().flatten(0, 1) if dim else tensor.detach()]

    def seen_by(self, rows: Rows) -> torch.Tensor:
        """Value that the request was last served."""
        if isinstance(rows, BatchRows):
            return self.rows_of(rows)
        served = self._served.get(rows.logit_start if self.logits else rows.start)
        return self.rows_of(rows) if served is None else served

    def rows_of(self, rows: Rows) -> torch.Tensor:
        """The request's rows, or their assigned values."""
        if type(rows) is BatchRows:
            return self.tensor if self.dim is None else self._batch_of(rows)
        start, size = (rows.logit_start, rows.logit_size) if self.logits else (rows.start, rows.size)
        if self._assigned and start in self._assigned:
            return self._assigned[start]
        pieces = self._pieces
        if pieces is not None and size == 1 and (piece := pieces[start]) is not None:
            pieces[start] = None  # served once, since a block may reshape it in place
        elif self.dim is None:
            return self.tensor
        else:
            piece = rows_at(self.tensor, self.dim, start, size)
            if piece.requires_grad:
                self._assigned[start] = piece  # the model continues with it, so that gradients reach it
            else:
                piece = piece.detach()
        self._served[start] = piece
        return piece

    def _batch_of(self, rows: BatchRows) -> torch.Tensor:
        """The batch [requests, tokens, ...] of several requests' rows, with assigned values."""
        last = self._batch
        if last is not None and last.rows is rows:
            return last.tensor if last.gathered is None else last.gathered.refresh()
        now = self.settled()
        batch, is_view = rows.gather(now[0] if self.dim else now, self.logits)
        if self._drops_width(rows):
            batch = batch.squeeze(1)
        if not batch.requires_grad:
            batch = batch.detach()
        in_place, gathered = is_view and now is self.tensor, None
        if batch.requires_grad:
            self.assign_batch(rows, batch)
        elif not in_place:
            in_place, gathered = True, self._watch(rows, batch)
        self._batch = _ServedBatch(rows, batch, in_place, gathered)
        return batch

    def _watch(self, rows: BatchRows, batch: torch.Tensor) -> GatheredBatch:
        """Bring later in-place edits of a copied batch to the model."""
        gathered = GatheredBatch(self, rows, batch)
        self._gathered.append(gathered)
        rows.gathered.append(gathered)
        return gathered

    def _drops_width(self, rows: BatchRows) -> bool:
        """Whether the batch is [requests, ...]: a step's logits and samples."""
        return self.dim == 0 and self.logits and rows.places(True).width == 1

    def assign_batch(self, rows: BatchRows, edited: torch.Tensor) -> None:
        """Hold `edited` [requests, tokens, ...] for the requests' rows until `settled`."""
        if self._drops_width(rows):
            edited = edited.unsqueeze(1)
        for index, start, size, offset in rows.places(self.logits).rows:
            own = edited[index, offset : offset + size]
            self._assigned[start] = own.unsqueeze(0) if self.dim else own

    def take_back(self, rows: Rows, edited: torch.Tensor) -> bool:
        """Assign `edited`, if it is the tensor that the request was last served, edited in place. Returns whether it is."""
        start = rows.logit_start if self.logits else rows.start
        if type(rows) is BatchRows or edited is not self._served.get(start):
            return False
        self._assigned.pop(start, None)
        self._batch = None
        return True

    def assign(self, rows: Rows, edited: torch.Tensor) -> None:
        """Hold `edited` for the request's rows until `settled`."""
        if isinstance(rows, BatchRows):
            served = self._batch
            if served is None or served.tensor is not edited:
                self._batch = _ServedBatch(rows, edited, False)
                if not (edited.requires_grad or edited.is_inference()):
                    self._watch(rows, edited)
            elif served.in_place:
                return
            self.assign_batch(rows, edited)
            return
        if not self.take_back(rows, edited):
            self._batch = None
            self._assigned[rows.logit_start if self.logits else rows.start] = edited

    def settle(self) -> torch.Tensor:
        """`settled`, as the last call: later edits of gathered rows are written to its result."""
        settled = self.settled()
        for gathered in self._gathered:
            gathered.settle(settled)
        return settled

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
