"""Rows of a flat pass in parts, for modules that take sequences of one length. Their outputs are put together again."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from ....core.forward_batch import ForwardBatch
from ....utils.upload import upload


class CallRows(NamedTuple):
    """Rows of the pass that one call of a module computes."""

    # fmt: off
    rows:      torch.Tensor | slice  # rows of the flat batch: one row of several requests, or one request
    requests:  torch.Tensor | slice  # their indices in the batch
    continued: bool                  # they have states
    batched:   bool                  # [rows, 1, ...]; else [1, rows, ...]
    # fmt: on

    def span(self, spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The entry of `spans`, (first row, number of rows), that is this part, or None."""
        rows = self.rows
        found = None if isinstance(rows, torch.Tensor) else (rows.start, rows.stop - rows.start)
        return found if found in spans else None


def parts_of(batch: ForwardBatch, with_states: bool, apart: Set[int]) -> list[CallRows]:
    """The calls for a pass: requests with one row that continue, then each other request.

    Args:
        with_states: requests continue, unless they are at their start.
        apart: first rows of requests that come last, in separate calls.
    """
    if batch.forward_mode.is_decode() and with_states and not apart:
        every = slice(0, batch.batch_size)
        return [CallRows(every, every, True, True)]
    prefixes = batch.extend_prefix_lens_cpu or [1] * batch.batch_size
    single, others, last = [], [], []
    for request, ((start, size), prefix) in enumerate(zip(batch.batch_groups, prefixes, strict=True)):
        continued = with_states and prefix > 0
        if size == 1 and continued and start not in apart:
            single.append((start, request))
        else:
            part = CallRows(slice(start, start + size), slice(request, request + 1), continued, False)
            (last if start in apart else others).append(part)
    first = []
    if single:
        rows, requests = (list(numbers) for numbers in zip(*single, strict=True))
        if rows == requests == list(range(len(rows))):  # as the scheduler has it
            first = [CallRows(slice(0, len(rows)), slice(0, len(rows)), True, True)]
        else:
            at, of = upload(batch.input_ids.device, np.array(rows), np.array(requests))
            first = [CallRows(at, of, True, True)]
    return [*first, *others, *last]


def taken(value: Any, rows: int, part: CallRows) -> Any:
    """The part's rows of an argument: of tensors [1, rows, ...], also in tuples."""
    if isinstance(value, (tuple, list)):
        return type(value)(taken(each, rows, part) for each in value)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, rows):
        return value
    own = value[:, part.rows]
    return own.transpose(0, 1) if part.batched else own


def flat(value: Any, batched: bool) -> Any:
    """[rows, 1, ...] -> [1, rows, ...], also in tuples. Other values become None."""
    if isinstance(value, tuple):
        return tuple(flat(each, batched) for each in value)
    if not isinstance(value, torch.Tensor) or value.ndim < 3:
        return None
    return value.transpose(0, 1) if batched else value


def padded(value: Any, rows: int) -> Any:
    """The value with zero rows appended up to `rows`."""
    if isinstance(value, tuple):
        return tuple(padded(each, rows) for each in value)
    if not isinstance(value, torch.Tensor) or value.ndim < 3 or value.shape[0] != 1 or value.shape[1] >= rows:
        return value
    return torch.cat((value, value.new_zeros(1, rows - value.shape[1], *value.shape[2:])), 1)


def joined(outs: list[tuple[CallRows, Any]], rows: int) -> Any:
    """The outputs of all parts, in the order of the pass."""
    first = outs[0][1]
    if isinstance(first, tuple):
        return tuple(joined([(part, out[i]) for part, out in outs], rows) for i in range(len(first)))
    sizes = [
        len(part.rows) if isinstance(part.rows, torch.Tensor) else part.rows.stop - part.rows.start for part, _ in outs
    ]
    if any(out is None or out.shape[1] != size for (_, out), size in zip(outs, sizes, strict=True)):
        return None
    if any((out.shape[0], *out.shape[2:]) != (1, *first.shape[2:]) for _, out in outs):
        return None  # it has no rows, such as a state, and as many of something else
    starts = [part.rows.start for part, _ in outs if isinstance(part.rows, slice)]
    if len(starts) == len(outs):
        in_order = sorted(zip(starts, outs, strict=True), key=lambda entry: entry[0])
        return padded(torch.cat([out for _, (_, out) in in_order], 1), rows)
    whole = first.new_zeros(1, rows, *first.shape[2:])
    for part, out in outs:
        whole = (
            whole.index_copy(1, part.rows, out) if isinstance(part.rows, torch.Tensor) else _with(whole, part.rows, out)
        )
    return whole


def _with(whole: torch.Tensor, rows: slice, out: torch.Tensor) -> torch.Tensor:
    return torch.cat((whole[:, : rows.start], out, whole[:, rows.stop :]), 1)
