"""`Pieces`: the activations of a request on their way between processes, without a copy of what they share.

Equal captures of several sites are columns of one tensor. They travel as that tensor and come back as its columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .activations import Activations, CaptureError, lost


class Piece(NamedTuple):
    """Sites with equal positions, whose rows are columns of one tensor.

    Attributes:
        rows: [positions, sites * width], or the rows of one site as they are.
        positions, token_ids: [positions] int64.
        others: further tensors of one site, by name.
    """

    sites: tuple[str, ...]
    rows: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    others: dict[str, torch.Tensor]


Pieces = tuple[int, list[Piece], CaptureError | None]
"""(layers of the model, pieces in the order of sites, why the states are lost or None)."""


def pieces_of(found: Activations) -> Pieces:
    """The activations as they are: nothing is copied."""
    return found.num_layers, list(_pieces(found)), found.error


def activations_of(num_layers: int, pieces: list[Piece], error: CaptureError | None) -> Activations:
    """The activations of `pieces_of`. Sites share memory as they did."""
    if error is not None:
        return lost(error)
    found = Activations(num_layers)
    for sites, rows, positions, token_ids, others in pieces:
        if len(sites) == 1:
            found.add(sites[0], rows, positions, token_ids, others)
            continue
        # Not by `unbind`: autograd does not allow in-place operations on its outputs.
        columns = rows.unsafe_split(rows.shape[1] // len(sites), 1)
        for site, own in zip(sites, columns, strict=True):
            found.add(site, own, positions, token_ids)
    return found


def _pieces(found: Activations) -> Iterator[Piece]:
    joined: list[Piece] = []
    key, following = None, 0
    for site, *tensors in found.arrived() if found.error is None else ():
        piece = Piece((site,), *tensors, found.others(site))
        own, place = _key(piece), piece.rows.data_ptr()
        if own is None or (own, place) != (key, following) or not _is_within(piece.rows, len(joined)):
            if joined:
                yield _join(joined)
            joined = []
        joined.append(piece)
        key, following = own, place + piece.rows.shape[-1] * piece.rows.itemsize
    if joined:
        yield _join(joined)


def _key(piece: Piece) -> tuple[Any, ...] | None:
    """Equal for pieces that may be columns of one tensor; None for one that travels by itself."""
    rows = piece.rows
    if rows.ndim != 2 or not rows.numel() or rows.stride(1) != 1 or piece.others:
        return None
    return (
        rows.untyped_storage().data_ptr(), rows.shape, rows.stride(), rows.dtype, id(piece.positions), id(piece.token_ids)
    )  # fmt: skip


def _is_within(rows: torch.Tensor, columns: int) -> bool:
    """Whether a row has room for one more such column behind so many."""
    return len(rows) == 1 or rows.stride(0) >= rows.shape[1] * (columns + 1)


def _join(pieces: list[Piece]) -> Piece:
    """The piece of consecutive columns."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    rows = first.rows
    whole = rows.as_strided((len(rows), rows.shape[1] * len(pieces)), rows.stride())
    return first._replace(sites=tuple(piece.sites[0] for piece in pieces), rows=whole)
