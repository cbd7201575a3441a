"""`KeptRows`: the host memory of captured rows, and the results made of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ...utils.copies import shallow
from ...utils.integers import as_integers
from .egress.result_memory import Memory
from .reductions.pools import Pool
from .reductions.reduction import Reduced
from .spec import Capture

WORDS = torch.complex128
"""The dtype of copies that keep records unchanged: `ALIGNED` elements are a whole number of words."""
ALL = slice(None)
SMALL_ROW = 1 << 14
"""Bytes of a row that is copied faster than the GIL is handed over."""


class KeptRows:
    """Captured rows of a group on the host, [kept, sites, width].

    There is a row for each position. With a `Pool` there are two: the newest, and the fold of all earlier ones. So a row can be
    left out that was computed after the request's end. Such a row is never one of the prompt's.

    Args:
        spec: of the group.
        num_positions: positions that the result is made of at most.
        width: values that are kept for a state.
        sent_width: those at their front that results are made of; the others are padding.
        sent_dtype: of these values.
        dtype: of the result.
        states: these values are states, and not what the device made of them.

    Attributes:
        rows: [kept, sites, width]; None before `prepare`.
        unchanged: values are kept as they are sent, in one row for each position.
    """

    def __init__(
        self,
        spec: Capture,
        num_positions: int,
        width: int,
        sent_width: int,
        sent_dtype: torch.dtype,
        dtype: torch.dtype,
        states: bool,
    ) -> None:
        self.rows: torch.Tensor | None = None
        self._reduction, self._width, self._sent_dtype, self._result_dtype = spec.reduction, width, sent_dtype, dtype
        self._num_rows, self._dtype, self._states, self._sent_width = num_positions, dtype, states, sent_width
        self._asked = spec.dtype if isinstance(spec.dtype, torch.dtype) else None
        self._pool = spec.reduction if isinstance(spec.reduction, Pool) else None
        if self._pool is not None:
            self._num_rows, self._dtype = 2, sent_dtype if self._pool.narrows else torch.float64
        elif not spec.reduction.of_states:
            self._dtype = sent_dtype
        self.unchanged = self._dtype is sent_dtype and self._pool is None
        self._drafted: list[tuple[int, np.ndarray, slice]] | None = None
        self._small_size = 0  # bytes of a row that `small` has
        self._small: np.ndarray | None = None
        self._values = np.empty(0)  # the memory of `rows`, as NumPy sees it
        self._as_records = False  # a row is a record
        self._records: np.ndarray | None = None  # [kept, words], then, once it is asked for

    def fresh(self) -> KeptRows:
        """The same before `prepare`, for another request."""
        assert self.rows is None, "rows of a request that has begun are its own"
        return shallow(self)

    def num_bytes(self, num_sites: int) -> int:
        """Bytes of the rows of `num_sites` sites."""
        return self._num_rows * num_sites * self._width * self._dtype.itemsize

    def prepare(self, memory: Memory, num_sites: int, as_records: bool) -> None:
        """Allocate the rows.

        Args:
            as_records: a row has the bytes of a record.
        """
        self._memory, self.rows = memory, memory.empty((self._num_rows, num_sites, self._width), self._dtype)
        if self._pool is not None and not self._pool.narrows:
            self._values = self.rows.fill_(self._pool.initial).numpy()
        else:
            self._values = as_integers(self.rows)
            self._as_records = as_records
            if as_records:
                size = num_sites * self._width * self._dtype.itemsize
                if 0 < size <= SMALL_ROW and self._num_rows:
                    self._small_size = size

    @property
    def small(self) -> np.ndarray | None:
        """[kept] of whole rows, where a row is a record of at most `SMALL_ROW` bytes; else None."""
        if self._small is None and self._small_size:
            whole = np.dtype((np.void, self._small_size))
            self._small = self._values.reshape(self._num_rows, -1).view(whole)[:, 0]
        return self._small

    def records(self, ordinal: int, count: int) -> np.ndarray | None:
        """[count, words], the rows of `count` ordinals from `ordinal` on; None where a row is not a record."""
        # By NumPy: each operation of torch releases the GIL and waits to get it back.
        if self._records is None:
            if not self._as_records or self.rows is None:
                return None
            self._records = self.rows.flatten(1).view(WORDS).numpy()
        return self._records[ordinal : ordinal + count]

    def keep(self, ordinal: int, rows: np.ndarray, columns: slice = ALL) -> None:
        """Keep rows of consecutive ordinals, or add them to the sum.

        Args:
            ordinal: of the first row.
            rows: [n, columns, width], sent values as integers.
        """
        if self._pool is None:
            self._put(ordinal, rows, columns)
            return
        for i, row in enumerate(rows):  # one by one: the result does not depend on which rows came together
            numbers = row if self._pool.narrows else _as_numbers(row, self._sent_dtype)
            if self._drafted is not None:
                self._drafted.append((ordinal + i, numbers.copy(), columns))
            else:
                self.fold(numbers, columns)

    def put_row(self, ordinal: int, column: int, row: np.ndarray) -> None:
        """`keep` of one state [width], where values are kept `unchanged`."""
        self._values[ordinal, column] = row

    def begin_draft(self) -> None:
        """From here on rows may be taken back: a pool folds them when they are settled. Rows that were not are forgotten."""
        self._drafted = []

    def settle(self, num_rows: int) -> None:
        """Fold the drafted rows among the first `num_rows`, and forget the others."""
        drafted, self._drafted = self._drafted, None
        for ordinal, row, columns in drafted or ():
            if ordinal < num_rows:
                self.fold(row, columns)

    def fold(self, row: np.ndarray, columns: slice = ALL) -> None:
        """Take the newest row of a pool, [columns, width]."""
        assert self._pool is not None
        before, newest = self._values[:, columns]
        self._pool.fold(before, newest)
        newest[:] = row

    def results(self, count: int, arrived: list[int]) -> Iterable[Reduced]:
        """The result of each column.

        Args:
            count: positions of the result.
            arrived: rows that were kept, by column.
        """
        rows = self._result_rows(count, arrived)
        if not self._reduction.of_states:
            values = rows[..., : self._sent_width].detach()
            columns = range(values.shape[1])
            return [self._reduction.results(values[:, i], self._asked, self._states) for i in columns]
        # All columns at once. Not by `unbind`: autograd does not allow in-place operations on its outputs.
        rows = self._in_columns(rows)
        return map(Reduced, rows.unsafe_split(self._width, 1) if len(arrived) > 1 else (rows,))

    def whole(self, count: int, arrived: list[int]) -> torch.Tensor:
        """The results of all columns side by side, [positions, columns * width], where they are states."""
        return self._in_columns(self._result_rows(count, arrived))

    def _in_columns(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows if rows.dtype is self._result_dtype else rows.to(self._result_dtype)).flatten(1)

    def _result_rows(self, count: int, arrived: list[int]) -> torch.Tensor:
        assert self.rows is not None
        if self._pool is not None:  # a result does not have the memory of what is folded
            return self._pooled(self._pool, count, arrived)
        self._memory.clear(self.rows, min(count, len(self.rows)))
        return self.rows if count == len(self.rows) else self.rows[:count]

    def _pooled(self, pool: Pool, count: int, arrived: list[int]) -> torch.Tensor:
        """The result of a pool, [1, columns, width], or [0, columns, width] for no position."""
        before, newest = self._values[:, ALL]
        folded = before.copy()
        pool.fold(folded, newest)
        folded = np.where((np.array(arrived) > count)[:, None], before, folded)  # a newest row that is left out
        return pool.finished(torch.from_numpy(folded).view(self._dtype), count)[None][:count]

    def _put(self, place: int, rows: np.ndarray, columns: slice) -> None:
        if self._dtype is self._sent_dtype:
            # By NumPy: torch would start its intra-op threads for each row, which the passes on a CPU use.
            self._values[place : place + len(rows), columns] = rows
        else:
            assert self.rows is not None
            self.rows[place : place + len(rows), columns].copy_(torch.from_numpy(rows).view(self._sent_dtype))


def _as_numbers(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of such integers, in `dtype` or float32."""
    if dtype is torch.bfloat16:  # the upper half of a float32
        return (values.astype(np.int32) << 16).view(np.float32)
    return values.view(np.float16 if dtype is torch.float16 else np.float32)
