"""Declared ops on the residual stream, inside of a forward pass.

A pass has *places*: the points where something is added to the stream and a norm reads the sum. Place 0 is the embedding,
place ``2 * i + 1`` follows layer i's attention, place ``2 * i + 2`` its MLP. Each has two *sites*, what is added and the sum::

    site 2 * place          attn_out.i, mlp_out.i
    site 2 * place + 1      embed (resid_pre.0), resid_mid.i, resid_post.i (resid_pre.i+1)
    site 4 * layers + 2     final_norm: what the head reads

`TableEdits` reads the ops from device tables, in the kernel that adds and norms: the tables change, a captured graph does not.
`HostEdits` has them as functions. Both act in the same order: on what is added, on the sum, then the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

ADD, PROJECT_OUT, CLAMP, SCALE, PATCH = range(1, 6)
"""What an op does; 0 is none."""
NO_NORM, PRESERVE, MATCH = range(3)
"""What an ADD keeps: nothing, the state's norm, or the vector's length relative to it."""
FIELDS = 8
"""Whole numbers of an op: code, first vector, vectors, first position, position after the last, step, gate's vector, norm."""
NUMBERS = 3
"""Its others: scale, factor or lower bound; upper bound; the gate's threshold."""
NO_END = 2**31 - 1


def added_site(place: int) -> int:
    """Of what is added at a place."""
    return 2 * place


def stream_site(place: int) -> int:
    """Of the sum at a place."""
    return 2 * place + 1


def final_norm_site(num_layers: int) -> int:
    """Of what the head reads."""
    return 4 * num_layers + 2


def num_sites(num_layers: int) -> int:
    """Of a model with so many layers."""
    return 4 * num_layers + 3


@dataclass(frozen=True)
class EditTables:
    """The ops of each row of the request table; row 0 is padding's and has none.

    A state is `width` wide. All live at one address, so that captured graphs can read them.
    """

    # fmt: off
    counts:  torch.Tensor  # [rows, sites] int32, ops there
    fields:  torch.Tensor  # [rows, sites, depth, FIELDS] int32
    numbers: torch.Tensor  # [rows, sites, depth, NUMBERS] float32
    fires:   torch.Tensor  # [rows, sites, depth] int32, how often a gated op acted
    vectors: torch.Tensor  # [capacity, width] float32
    # fmt: on

    @classmethod
    def empty(
        cls, rows: int, num_layers: int, depth: int, capacity: int, width: int, device: torch.device | str
    ) -> EditTables:
        places = (rows, num_sites(num_layers))
        return cls(
            counts=torch.zeros(*places, dtype=torch.int32, device=device),
            fields=torch.zeros(*places, depth, FIELDS, dtype=torch.int32, device=device),
            numbers=torch.zeros(*places, depth, NUMBERS, dtype=torch.float32, device=device),
            fires=torch.zeros(*places, depth, dtype=torch.int32, device=device),
            vectors=torch.zeros(capacity, width, dtype=torch.float32, device=device),
        )


class Edits(Protocol):
    """What a forward pass asks of the declared ops of its requests."""

    final_site: int
    """The final norm's."""

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        """`value` [1, tokens, width] after the ops at `site`; itself where there are none, else fresh memory."""
        ...

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm.add_rms_norm` with the ops of the place's two sites; at the last place with those of the final norm too."""
        ...


class TableEdits:
    """Ops from tables.

    Args:
        rows, positions: [tokens] int64, each token row's row of the request table, -1 for one without ops; and its position.
    """

    def __init__(self, tables: EditTables, rows: torch.Tensor, positions: torch.Tensor) -> None:
        self.tables, self.rows, self.positions = tables, rows, positions
        self.final_site = tables.counts.shape[1] - 1

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        from .triton_edits import edit

        return edit(value, site, self)

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from .triton_edits import edit_add_rms_norm

        return edit_add_rms_norm(h, delta, weight, eps, place, self)


Rows = tuple[int, int]
"""First row, and rows, of a request in a pass."""


class HostEdits:
    """Ops as functions: (site) -> what each of its requests does to its rows, in order.

    Args:
        by_site: site -> (rows, [rows, width] -> [rows, width]).
        taps: site -> (rows, what takes the state [rows, width] after the ops).
        final_site: the final norm's.
    """

    def __init__(
        self,
        by_site: dict[int, list[tuple[Rows, Callable[[torch.Tensor], torch.Tensor]]]],
        taps: dict[int, list[tuple[Rows, Callable[[torch.Tensor], None]]]],
        final_site: int,
    ) -> None:
        self.by_site, self.taps, self.final_site = by_site, taps, final_site

    def rows_from(self, start: int, stop: int) -> HostEdits:
        """Those of the token rows from `start` to `stop`, which are whole requests', counted from `start`."""

        def cut(by_site: dict[int, list[Any]]) -> dict[int, list[Any]]:
            return {
                site: [((first - start, size), found) for (first, size), found in entries if start <= first < stop]
                for site, entries in by_site.items()
            }

        return HostEdits(cut(self.by_site), cut(self.taps), self.final_site)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        ops = self.by_site.get(site)
        if ops:
            value = value.clone()
            for (start, size), op in ops:
                rows = value[0, start : start + size]
                rows.copy_(op(rows))
        for (start, size), tap in self.taps.get(site, ()):
            tap(value[0, start : start + size])
        return value

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from .norm import rms_norm

        h = total(h, delta, self, place)
        normed = rms_norm(h, weight, eps)
        return h, self.at(self.final_site, normed) if stream_site(place) + 1 == self.final_site else normed


class Edited(nn.Module):
    """A module whose output is a site, and whose `.inputs` are those of transformers' module: it gets its ops beside them.

    Attributes:
        edits: for the next call, and no other: a trace may call the module again for its own ends.
    """

    edits: Edits | None = None

    def take_edits(self) -> Edits | None:
        """The ops for this call."""
        edits = self.edits
        if edits is not None:
            self.edits = None
        return edits


def edited(value: torch.Tensor, edits: Edits | None, site: int) -> torch.Tensor:
    """`value` after the ops at `site`, where there may be any."""
    return value if edits is None else edits.at(site, value)


def total(h: torch.Tensor, delta: torch.Tensor | None, edits: Edits | None, place: int) -> torch.Tensor:
    """The hidden state that a fused layer left in two parts, with the ops of the place where they are added.

    Without a delta it is whole, and has passed its place.
    """
    if delta is None:
        return h
    return edited(h + edited(delta, edits, added_site(place)), edits, stream_site(place))
