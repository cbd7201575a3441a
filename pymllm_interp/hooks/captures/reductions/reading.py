"""`StateReading`: device computation over captured states before they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...site import Site
from ..spec import Capture
from .reduction import Readout, Reduction


class _Piece(NamedTuple):
    """Columns of a part of a call.

    Attributes:
        columns: columns of its states.
        site: one of their sites.
        rows: [n * columns, width].
    """

    part: int
    columns: list[int]
    site: Site
    rows: Tensor


class StateReading:
    """Device computation over captured states: the norm of `attn_in` and `mlp_in`, and a reduction.

    Args:
        normed: the sites are outputs of norms, and the states are states of the stream.
        reduction: reduction that runs on the device; None for none.
        dtype: dtype of the values sent, without a reduction.

    Attributes:
        width: values sent for a state.
        reduces: whether it has a reduction.
        joined: whether it reads the states of all sites as one row (`Reduction.joined`).
        key: equal for readings that one call can serve.
    """

    MAX_ELEMENTS = 1 << 27
    """Values that one call holds at once (`Reduction.row_elements`)."""

    def __init__(
        self,
        normed: bool,
        reduction: Reduction | None,
        readout: Readout,
        width: int,
        dtype: torch.dtype,
        gain: bool = True,
    ) -> None:
        self._normed, self._reduction, self._readout, self._gain = normed, reduction, readout, gain
        self.width = width if reduction is None else reduction.sent_width(width)
        self.dtype = dtype if reduction is None else reduction.sent_dtype
        self._rows = max(1, self.MAX_ELEMENTS // (width if reduction is None else reduction.row_elements(width)))
        self.reduces = reduction is not None
        self.joined = reduction is not None and reduction.joined
        self.key = normed, gain, self.dtype, None if reduction is None else reduction.fingerprint

    @torch.no_grad()
    def __call__(self, parts: Sequence[tuple[Sites, Tensor]]) -> list[Tensor]:
        """The values [n, sites, width] of each part: its sites, and states [n, sites, width of a state]."""
        if self.joined:
            return self._side_by_side(parts)
        by_key = self._pieces(parts)
        read = [self._of_site(found[0].site, _joined([piece.rows for piece in found])) for found in by_key.values()]
        together = self._sent(_joined(read))
        pieces = [piece for found in by_key.values() for piece in found]
        values = together.to(self.dtype).split([len(piece.rows) for piece in pieces])
        if len(by_key) == 1:  # a piece for each part
            shapes = [states.shape[:2] for _, states in parts]
            return [value.unflatten(0, shape) for value, shape in zip(values, shapes, strict=True)]
        outs = [together.new_empty(*states.shape[:2], self.width, dtype=self.dtype) for _, states in parts]
        for piece, value in zip(pieces, values, strict=True):
            for column, own in zip(piece.columns, value.unflatten(0, (-1, len(piece.columns))).unbind(1), strict=True):
                outs[piece.part][:, column] = own
        return outs

    def _sent(self, rows: Tensor) -> Tensor:
        """The reduction's values of rows; the rows without one."""
        if self._reduction is None:
            return rows
        return _joined([self._reduction.sent(some, self._readout) for some in rows.split(self._rows)])

    def _side_by_side(self, parts: Sequence[tuple[Sites, Tensor]]) -> list[Tensor]:
        """`__call__` for a reduction that is `joined`: one row of all sites. Each site has its values."""
        rows = [
            torch.cat([self._of_site(site, states[:, c]) for c, site in enumerate(sites)], -1)
            for sites, states in parts
        ]
        values = self._sent(_joined(rows)).to(self.dtype).split([len(states) for _, states in parts])
        return [own[:, None].expand(-1, len(sites), -1) for own, (sites, _) in zip(values, parts, strict=True)]

    def _pieces(self, parts: Sequence[tuple[Sites, Tensor]]) -> dict[object, list[_Piece]]:
        """The parts, cut into the columns that are read by the same function, by a key of the function."""
        by_key: dict[object, list[_Piece]] = {}
        for i, (sites, states) in enumerate(parts):
            of_key: dict[object, list[int]] = {}
            for column, site in enumerate(sites):
                of_key.setdefault(self._alike(site), []).append(column)
            for key, columns in of_key.items():
                # Not by a list as an index, which would wait for the device.
                some = states if len(columns) == len(sites) else torch.stack([states[:, c] for c in columns], 1)
                by_key.setdefault(key, []).append(_Piece(i, columns, sites[columns[0]], some.flatten(0, 1)))
        return by_key

    def _alike(self, site: Site) -> object:
        """A key, equal for sites with the same read function."""
        return site if self._normed else None if self._reduction is None else self._reduction.read_alike(site)

    def _of_site(self, site: Site, rows: Tensor) -> Tensor:
        if self._normed:
            rows = self._readout.norm(site, rows, self._gain)
        return rows if self._reduction is None else self._reduction.read(site, rows, self._readout)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


Sites = tuple[Site, ...]
Pending = tuple[StateReading, Sites, Tensor, Tensor]
"""States [n, sites, width] that wait for a reading, and where its values [n, sites, width] go."""


def read_all(pending: Sequence[Pending]) -> None:
    """Write the values of states of many requests: one call for each key."""
    by_key: dict[Any, list[Pending]] = {}
    for entry in pending:
        by_key.setdefault(entry[0].key, []).append(entry)
    for entries in by_key.values():
        values = entries[0][0]([(sites, states) for _, sites, states, _ in entries])
        torch._foreach_copy_([target for *_, target in entries], values)


def reading_of(
    spec: Capture, normed: bool, width: int, dtype: torch.dtype, readout: Readout | None
) -> StateReading | None:
    """Device computation over a capture's states; None for none."""
    reduction = spec.reduction
    on_device = reduction if reduction.on_device else None
    if not normed and on_device is None:
        return None
    assert readout is not None, "captures of this kind need the model"
    sent = dtype
    if isinstance(spec.dtype, torch.dtype) and reduction.narrows and spec.dtype.itemsize < dtype.itemsize:
        sent = spec.dtype
    return StateReading(normed, on_device, readout, width, sent, reduction.norm_gain)
