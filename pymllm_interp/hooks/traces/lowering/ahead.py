"""`RowsAhead`: tensors for the rows of a loop, made while the request runs.

A list takes Python about a microsecond a tensor. 256 requests that keep eight layers need 2,048 tensors a step. The caller
only waits while they run, and the engine mostly waits for the device. So this time is hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ....core.request import Request
from ...captures.rows import CapturedRows, GroupRows
from ..saves.save_transfer import SaveTransfer
from .plan import BlockPlan
from .step_loop import each_line, is_most, lines_of

FEWEST_ROWS, FEWEST_TENSORS = 8, 32
"""Fewest rows, and tensors, that are made at once: a call costs as much as twenty tensors."""


class _Made(NamedTuple):
    """Tensors of a group's rows, in the order of the memory.

    Attributes:
        first: first row of which there are tensors.
        address: address of the group's rows.
        columns: tensors of a row.
        lines: the memory from `first` on, as `each_line` takes it.
    """

    first: int
    address: int
    columns: int
    lines: np.ndarray
    tensors: list[torch.Tensor]


class RowsAhead:
    """Tensors over the memory of one request's captured rows. A row may arrive after its tensor.

    Args:
        captured: the rows, while the worker has them in this process.
        sites: sites of which a loop keeps whole rows.
        transfer: knows of the tensors, for the garbage collector.
    """

    def __init__(self, captured: weakref.ref[CapturedRows], sites: frozenset[str], transfer: SaveTransfer) -> None:
        self._captured, self._sites, self._transfer = captured, sites, transfer
        self._made: dict[int, _Made] = {}
        self._places: dict[str, tuple[int, int]] = {}  # site -> (group, column)

    @classmethod
    def of(cls, plan: BlockPlan, request: Request, transfer: SaveTransfer) -> RowsAhead | None:
        """The maker for a request. None if the loop keeps parts of rows, or if its rows are in another process."""
        captured = None if request.declared is None else request.declared.rows
        sites = frozenset() if plan.loop is None else frozenset(row.site for row in plan.loop.rows if row.is_whole)
        return None if captured is None or not sites else cls(captured, sites, transfer)

    def advance(self) -> int:
        """Make tensors of the rows that have arrived. Returns their number; 0 if there are few rows."""
        captured, found = self._captured(), 0
        if captured is not None:
            for own, arrived in zip(captured.groups, captured.arrived(), strict=True):
                found += self._advance(own, arrived)
        return found

    def _advance(self, own: GroupRows, arrived: int) -> int:
        group, rows, columns = own.group, own.rows, len(own.group.sites)
        made = self._made.get(group.index)
        first = group.of_prompt if made is None else made.first + len(made.tensors) // columns
        if arrived - first < max(FEWEST_ROWS, -(-FEWEST_TENSORS // columns)) or rows is None:
            return 0
        if made is None:
            names = [str(name) for name in group.names]
            if not is_most(rows[first:].nbytes // columns * len(self._sites.intersection(names)), rows):
                return 0
            lines = lines_of(rows[first:].flatten(0, 1))
            made = self._made[group.index] = _Made(first, rows.data_ptr(), columns, lines, [])
            self._places |= {name: (group.index, column) for column, name in enumerate(names)}
        return self._extend(made, arrived, rows.dtype)

    def _extend(self, made: _Made, stop: int, dtype: torch.dtype) -> int:
        """Make tensors of the rows before `stop`, of all columns by one call. Returns their number."""
        lines = made.lines[len(made.tensors) : (stop - made.first) * made.columns]
        self._transfer.raise_gc_threshold(len(lines))
        made.tensors.extend(each_line(lines, dtype))
        return len(lines)

    def take(self, site: str, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Tensors of some rows [n, ...] of a site that have arrived: once each. Empty if the rows are elsewhere."""
        if site not in self._places:
            return ()
        (index, column), stride = self._places[site], rows.stride(0) * rows.itemsize
        first, columns, tensors = (made := self._made[index]).first, made.columns, made.tensors
        place, rest = divmod(rows.data_ptr() - made.address, stride // columns)
        start = place - first * columns
        if rest or start < 0 or start % columns != column or stride != columns * rows[0].nbytes:
            return ()
        stop = start - column + len(rows) * columns
        if len(tensors) < stop:
            self._extend(made, first + stop // columns, rows.dtype)
        return tensors[start:stop:columns]
