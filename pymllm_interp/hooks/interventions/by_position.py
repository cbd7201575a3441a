"""Vectors of an op by position: row i is for the i-th of the positions, as written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from ..positions import Window, absolute_positions
from ..spec import as_argument
from .op import Op

OpT = TypeVar("OpT", bound=Op)


def in_order_of_windows(op: OpT, name: str, windows: tuple[Window, ...], prompt_len: int) -> OpT:
    """The op with the rows of a field in the order of its windows' positions. With one vector [width] it is the op itself.

    Args:
        name: name of the field.

    Raises:
        ValueError: not one row per position.
    """
    rows: Tensor = getattr(op, name)
    if rows.ndim == 1:
        return op
    named: Any = op.positions
    sizes = [window.size for window in windows]
    count = None if None in sizes else sum(size or 0 for size in sizes)
    if isinstance(named, tuple | range):
        count = len(named)
    if count != len(rows):
        wanted = "positions without end, which take one [width]" if count is None else f"{count} positions"
        raise ValueError(f"{op.name}: {name} has {len(rows)} rows for {wanted}{_hint(name, len(rows), count)}")
    if not isinstance(named, tuple | range) or not windows:
        return op
    kept = [row for row, index in enumerate(named) if -prompt_len <= index < prompt_len]
    indexes = absolute_positions(tuple(named[row] for row in kept), prompt_len)
    order = sorted(range(len(indexes)), key=indexes.__getitem__)
    if tuple(named) == tuple(indexes) and order == kept:
        return op  # in order as written: most are, and a copy is checked anew
    rows = as_argument(rows[kept][order], str(op.site))
    changes = {name: rows, "positions": tuple(indexes[row] for row in order)}
    return replace(op, **changes)  # pyright: ignore[reportArgumentType]


def _hint(name: str, rows: int, count: int | None) -> str:
    """Advice for rows that do not fit the positions, or ""."""
    if rows == 1:
        return f": give {name}[0], one vector for all positions"
    each = f"positions=Generated(0, {rows}) takes one row for each of the first {rows} generated tokens"
    return f": {each}" if count is None else ""


def of_positions(vectors: Tensor, ordinals: Tensor) -> Tensor:
    """The vector of each row: [width] for all, or [rows, width] of vectors [positions, width]. Any vector for an ordinal of -1."""
    return vectors if vectors.ndim == 1 else vectors[ordinals.clamp(min=0)]
