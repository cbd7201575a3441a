"""`SitePiece`: captured sites that are columns of one tensor. They are divided when somebody reads one.

Activations with hundreds of sites are made, and travel between processes, in a few operations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class SitePiece(NamedTuple):
    """Sites with equal positions. Their rows are columns of one tensor.

    Attributes:
        sites: in the order of the columns.
        rows: [positions, sites * width]; of one site, its rows as they are.
        positions, token_ids: [positions] int64.
        others: further tensors of one site, by name.
    """

    sites: tuple[str, ...]
    rows: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    others: Mapping[str, torch.Tensor]


class SiteTensors:
    """The rows, positions and token ids of sites, and pieces of which no site was read yet. Thread-safe.

    Attributes:
        pieces: not divided yet; none of their sites has `others`.
        order: of their sites.
        rows, positions, token_ids: by site.
    """

    _dividing = threading.Lock()

    def __init__(self) -> None:
        self.pieces: list[SitePiece] = []
        self.order: tuple[str, ...] = ()
        self.rows: dict[str, torch.Tensor] = {}
        self.positions: dict[str, torch.Tensor] = {}
        self.token_ids: dict[str, torch.Tensor] = {}

    def divide(self) -> None:
        """Make tensors by site of the pieces."""
        with self._dividing:
            if not self.pieces:  # another thread has
                return
            found = {site: (rows, piece) for piece in self.pieces for site, rows in columns(piece)}
            for site in self.order:
                rows, piece = found[site]
                self.positions[site], self.token_ids[site] = piece.positions, piece.token_ids
                self.rows[site] = rows
            self.pieces = []


def columns(piece: SitePiece) -> Iterator[tuple[str, torch.Tensor]]:
    """(site, rows) of each site of a piece: views."""
    if len(piece.sites) == 1:
        yield piece.sites[0], piece.rows
        return
    # Not by `unbind`: autograd does not allow in-place operations on its outputs.
    yield from zip(piece.sites, piece.rows.unsafe_split(piece.rows.shape[1] // len(piece.sites), 1), strict=True)


def joined(pieces: Iterable[SitePiece]) -> list[SitePiece]:
    """The pieces, in their order. Consecutive ones that are columns of one tensor are one, without a copy.

    Args:
        pieces: of one site each.
    """
    found: list[list[SitePiece]] = []
    key, following = None, 0
    for piece in pieces:
        own, place = _key(piece), piece.rows.data_ptr()
        if own is not None and (own, place) == (key, following) and _has_room(piece.rows, len(found[-1])):
            found[-1].append(piece)
        else:
            found.append([piece])
        key, following = own, place + piece.rows.shape[-1] * piece.rows.itemsize
    return [run[0] if len(run) == 1 else _whole(run) for run in found]


def _key(piece: SitePiece) -> tuple[Any, ...] | None:
    """Equal for pieces that may be columns of one tensor; None for one that cannot."""
    rows = piece.rows
    if rows.ndim != 2 or not rows.numel() or rows.stride(1) != 1 or piece.others:
        return None
    return (
        rows.untyped_storage().data_ptr(), rows.shape, rows.stride(), rows.dtype, id(piece.positions), id(piece.token_ids)
    )  # fmt: skip


def _has_room(rows: torch.Tensor, columns: int) -> bool:
    """Whether a row has room for one more such column behind so many."""
    return len(rows) == 1 or rows.stride(0) >= rows.shape[1] * (columns + 1)


def _whole(run: list[SitePiece]) -> SitePiece:
    rows = run[0].rows
    whole = rows.as_strided((len(rows), rows.shape[1] * len(run)), rows.stride())
    return run[0]._replace(sites=tuple(piece.sites[0] for piece in run), rows=whole)
