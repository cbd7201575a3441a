"""Rows of a pass that a block sees: `RowSpan` for one request, `BatchRows` for several.

The batch is flat. Most values have one row per token of the step. At module boundaries it is in dim 1, after a leading 1;
inside a module it is in dim 0. Values of the head have *logit rows* instead: one row per token whose logits are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from ....core.step import ScheduledRequest
from ....utils.upload import upload


class RowSpan:
    """A request's rows in the values of one pass.

    Attributes:
        start, size, total: first row, number of rows, and rows of all requests, among token rows.
        logit_start, logit_size, logit_total: the same among logit rows.
        covers_pass: the request has all rows, and only its trace sees them, so that values are served whole.
    """

    __slots__ = ("covers_pass", "logit_size", "logit_start", "logit_total", "size", "start", "total")

    def __init__(self, start: int, size: int, total: int, logit_start: int, logit_size: int, logit_total: int) -> None:
        self.start, self.size, self.total = start, size, total
        self.logit_start, self.logit_size, self.logit_total = logit_start, logit_size, logit_total
        self.covers_pass = size == total and logit_size == logit_total

    def padded(self, total: int) -> RowSpan:
        """The same rows, in a pass with `total` token rows."""
        return RowSpan(self.start, self.size, total, self.logit_start, self.logit_size, self.logit_total)

    def shared(self) -> RowSpan:
        """The same rows, in a pass with values that other blocks edit too."""
        if not self.covers_pass:
            return self
        span = RowSpan(self.start, self.size, self.total, self.logit_start, self.logit_size, self.logit_total)
        span.covers_pass = False
        return span

    def layout(self, tensor: torch.Tensor, of_logits: bool) -> tuple[int | None, bool]:
        """(the dim of `tensor` that holds the pass's rows, or None; whether they are logit rows).

        Args:
            of_logits: logit rows are the first guess where `tensor` could have either kind.
        """
        if type(tensor) is torch.Tensor or not isinstance(tensor, torch.nn.Parameter):
            shape = tensor.shape
            for logits in (True, False) if of_logits else (False, True):
                total = self.logit_total if logits else self.total
                if len(shape) >= 2 and shape[0] == 1 and shape[1] == total:
                    return 1, logits
                if len(shape) >= 1 and shape[0] == total:
                    return 0, logits
        return None, False

    def narrow(self, tensor: torch.Tensor, of_logits: bool) -> Any:
        """The request's rows of `tensor`, as a view."""
        if self.covers_pass:
            return tensor
        dim, logits = self.layout(tensor, of_logits)
        if dim is None:
            return tensor
        start, size = (self.logit_start, self.logit_size) if logits else (self.start, self.size)
        return rows_at(tensor, dim, start, size).detach()


def rows_at(tensor: torch.Tensor, dim: int, start: int, size: int) -> torch.Tensor:
    """View of rows of the batch in dim 0 or 1, with the strides of a pass without other rows.

    `narrow` keeps the batch's stride of the leading 1. So does a ``clone()``, which would tell the batch's size.
    """
    if dim == 0:
        return tensor.narrow(0, start, size)
    row = tensor.stride(1)
    strides = size * row, *tensor.stride()[1:]
    return tensor.as_strided((1, size, *tensor.shape[2:]), strides, tensor.storage_offset() + start * row)


@lru_cache(maxsize=16)
def one_each(total: int) -> list[RowSpan]:
    """Rows of `total` requests with one row each, in batch order. Shared by all steps: not to be changed."""
    return [RowSpan(row, 1, total, row, 1, total) for row in range(total)]


def rows_of_step(entries: Sequence[ScheduledRequest]) -> list[RowSpan]:
    """The rows of each request of a step, in batch order."""
    if all(entry.decodes for entry in entries):
        return one_each(len(entries))
    total, logit_total = sum(entry.num_tokens for entry in entries), sum(entry.logit_rows for entry in entries)
    rows, start, logit_start = [], 0, 0
    for entry in entries:
        size, logit_size = entry.num_tokens, entry.logit_rows
        rows.append(RowSpan(start, size, total, logit_start, logit_size, logit_total))
        start += size
        logit_start += logit_size
    return rows


class Padding(NamedTuple):
    """Positions of a batch's prompts in their pass, as in a padded tensor [prompts, width]."""

    left: tuple[int, ...]
    """Padding before each prompt, in tokens."""
    width: int

    @classmethod
    def on_the_left(cls, lengths: Sequence[int]) -> Padding:
        """The padding of transformers' causal models: prompts end together."""
        width = max(lengths)
        return cls(tuple(width - length for length in lengths), width)

    def widened(self, width: int) -> Padding:
        """The same prompts in a wider tensor, padded on the left."""
        return Padding(tuple(left + width - self.width for left in self.left), width)


class PaddedCopy(Protocol):
    """A copy of a batch's rows. Its in-place edits are meant for the model's tensor."""

    @property
    def alive(self) -> bool: ...

    def write_edits(self) -> None: ...


class BatchRows:
    """Rows of several requests, as one batch [requests, tokens, ...].

    Rows of padding, and rows of finished requests, read as zeros. Writes to them are dropped.

    Args:
        spans: row span of each request, in the order of the prompts; None for a request outside the pass.
        padding: padding of a pass over prompts; None pads on the left.

    Attributes:
        gathered: padded copies that were made of the rows.
    """

    covers_pass = False
    """Values are never served whole: their rows are flat, and the batch is not."""

    def __init__(self, spans: Sequence[RowSpan | None], padding: Padding | None = None) -> None:
        self.spans, self.padding = list(spans), padding
        self.present = [(i, span) for i, span in enumerate(spans) if span is not None]
        first = self.present[0][1]
        self.total, self.logit_total = first.total, first.logit_total
        self.start = min(span.start for _, span in self.present)
        self.size = max(span.start + span.size for _, span in self.present) - self.start
        self.logit_start = min(span.logit_start for _, span in self.present)
        self.logit_size = max(span.logit_start + span.logit_size for _, span in self.present) - self.logit_start
        self.layout = first.layout
        self._places: dict[bool, _Places] = {}
        self._indexes: dict[tuple[bool, torch.device], tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._targets: dict[tuple[bool, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self.gathered: list[PaddedCopy] = []

    def places(self, logits: bool) -> _Places:
        """Indexes of each request's rows in the batch."""
        found = self._places.get(logits)
        if found is None:
            found = self._places[logits] = self._find_places(logits)
        return found

    def _find_places(self, logits: bool) -> _Places:
        rows = [(i, *((s.logit_start, s.logit_size) if logits else (s.start, s.size))) for i, s in self.present]
        sizes = [size for _, _, size in rows]
        padding = self.padding
        if padding is None or any(size != span.size for size, (_, span) in zip(sizes, self.present, strict=True)):
            own = Padding.on_the_left(sizes)  # one row of logits each, or a decode step
            left, width = own.left, own.width
        else:
            left, width = tuple(padding.left[i] for i, _, _ in rows), padding.width
        whole = (
            len(rows) == len(self.spans)
            and not any(left)
            and all(size == width for size in sizes)
            and all(a[1] + a[2] == b[1] for a, b in pairwise(rows))
        )
        placed = [(i, start, size, offset) for (i, start, size), offset in zip(rows, left, strict=True)]
        return _Places(placed, width, whole)

    def gather(self, flat: torch.Tensor, logits: bool) -> tuple[torch.Tensor, bool]:
        """(the batch [requests, width, ...], whether it is a view of `flat`).

        Args:
            flat: [rows, ...].
        """
        rows, width, whole = self.places(logits)
        if whole:
            start = rows[0][1]
            return flat.narrow(0, start, len(rows) * width).unflatten(0, (len(rows), width)), True
        index, mask = self._index(logits, flat.device)
        batch = flat.index_select(0, index)
        if mask is not None:
            batch = batch.masked_fill(mask.view(-1, *(1 for _ in flat.shape[1:])), 0)
        return batch.unflatten(0, (len(self.spans), width)), False

    def _index(self, logits: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(row of `flat` for each place of the batch, whether the place has none)."""
        found = self._indexes.get((logits, device))
        if found is None:
            rows, width, _ = self.places(logits)
            index = torch.full((len(self.spans), width), -1)
            for i, start, size, offset in rows:
                index[i, offset : offset + size] = torch.arange(start, start + size)
            index = index.flatten()
            empty = index < 0
            any_empty = bool(empty.any())
            index, empty = upload(device, index.clamp(min=0), empty)
            found = self._indexes[logits, device] = index, empty if any_empty else None
        return found

    def scatter(self, batch: torch.Tensor, flat: torch.Tensor, logits: bool) -> None:
        """The reverse of `gather`: write the batch to its rows of `flat`, without its padding."""
        targets = self._targets.get((logits, flat.device))
        if targets is None:
            rows, width, _ = self.places(logits)
            starts = torch.cat([torch.arange(start, start + size) for _, start, size, _ in rows])
            places = torch.cat([torch.arange(size) + i * width + offset for i, _, size, offset in rows])
            starts, places = upload(flat.device, starts, places)
            targets = self._targets[logits, flat.device] = starts, places
        starts, places = targets
        flat.index_copy_(0, starts, batch.reshape(-1, *flat.shape[1:]).index_select(0, places))

    def write_edits(self) -> None:
        """Write in-place edits of the padded copies to the rows."""
        for gathered in self.gathered:
            gathered.write_edits()
        self.gathered = [gathered for gathered in self.gathered if gathered.alive]

    def narrow(self, tensor: torch.Tensor, of_logits: bool) -> Any:
        """The requests' rows of `tensor`, as a batch."""
        dim, logits = self.layout(tensor, of_logits)
        if dim is None:
            return tensor
        return self.gather(tensor[0] if dim else tensor, logits)[0].detach()


class _Places(NamedTuple):
    rows: list[tuple[int, int, int, int]]
    """(prompt, first row in the pass, number of rows, first place in the batch) of each request in the pass."""
    width: int
    whole: bool
    """The requests' rows stand next to each other in the pass, and need no padding."""


Rows = RowSpan | BatchRows
"""The rows of a trace in one pass."""
