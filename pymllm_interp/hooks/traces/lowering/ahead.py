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
        lines: the memory, as `each_line` takes it.
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
    """

    def __init__(self, captured: weakref.ref[CapturedRows], sites: frozenset[str]) -> None:
        self._captured, self._sites = captured, sites
        self._made: dict[int, _Made] = {}
        self._places: dict[str, tuple[int, int]] = {}  # site -> (group, column)

    @classmethod
    def of(cls, plan: BlockPlan, request: Request) -> RowsAhead | None:
        """The maker for a request. None if the loop keeps parts of rows, or if its rows are in another process."""
        captured = None if request.declared is None else request.declared.rows
        sites = frozenset() if plan.loop is None else frozenset(row.site for row in plan.loop.rows if row.is_whole)
        return None if captured is None or not sites else cls(captured, sites)

    def advance(self) -> bool:
        """Make tensors of the rows that have arrived. False if there are few."""
        captured, found = self._captured(), False
        if captured is not None:
            for own, arrived in zip(captured.groups, captured.arrived(), strict=True):
                found |= self._advance(own, arrived)
        return found

    def _advance(self, own: GroupRows, arrived: int) -> bool:
        group, rows, columns = own.group, own.rows, len(own.group.sites)
        made = self._made.get(group.index)
        first = group.of_prompt if made is None else made.first + len(made.tensors) // columns
        if arrived - first < max(FEWEST_ROWS, -(-FEWEST_TENSORS // columns)) or rows is None:
            return False
        if made is None:
            names = [str(name) for name in group.names]
            if not is_most(rows[first:].nbytes // columns * len(self._sites.intersection(names)), rows):
                return False
            made = self._made[group.index] = _Made(first, rows.data_ptr(), columns, lines_of(rows.flatten(0, 1)), [])
            self._places |= {name: (group.index, column) for column, name in enumerate(names)}
        made.tensors.extend(each_line(made.lines[first * columns : arrived * columns], rows.dtype))
        return True

    def take(self, site: str, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Tensors made of the first of some rows [n, ...] of a site: once each. Empty if the rows are elsewhere."""
        if site not in self._places:
            return ()
        (index, column), stride = self._places[site], rows.stride(0) * rows.itemsize
        first, columns, tensors = (made := self._made[index]).first, made.columns, made.tensors
        place, rest = divmod(rows.data_ptr() - made.address, stride // columns)
        start = place - first * columns
        if rest or start < 0 or start % columns != column or stride != columns * rows[0].nbytes:
            return ()
        return tensors[start : start + len(rows) * columns : columns]
