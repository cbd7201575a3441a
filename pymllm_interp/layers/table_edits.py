"""Ops and captures from device tables, read by the kernel that adds and norms: the tables change, a captured graph does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .edits import num_sites

ADD, PROJECT_OUT, CLAMP, SCALE, PATCH = range(1, 6)
"""What an op does; 0 is none."""
NO_NORM, PRESERVE, MATCH = range(3)
"""What an ADD keeps: nothing, the state's norm, or the vector's length relative to it."""
FIELDS = 8
"""Whole numbers of an op: code, first vector, vectors, first position, position after the last, step, gate's vector, norm."""
NUMBERS = 3
"""Its others: scale, factor or lower bound; upper bound; the gate's threshold."""
NO_END = 2**31 - 1


@dataclass(frozen=True)
class EditTables:
    """The ops and captures of each row of the request table; row 0 is padding's and has none.

    A state is `width` wide. All live at one address, so that captured graphs can read them.

    A token row's captured states lie behind each other in its block of the ring, each at its site's offset.
    """

    # fmt: off
    counts:  torch.Tensor  # [rows, sites] int32, ops there
    fields:  torch.Tensor  # [rows, sites, depth, FIELDS] int32
    numbers: torch.Tensor  # [rows, sites, depth, NUMBERS] float32
    fires:   torch.Tensor  # [rows, sites, depth] int32, how often a gated op acted
    vectors: torch.Tensor  # [capacity, width] float32
    offsets: torch.Tensor  # [rows, sites] int32, where in a block of the ring the site's state goes; -1: nowhere
    ring:    torch.Tensor  # [elements], of the states' dtype
    # fmt: on

    @classmethod
    def empty(cls, rows: int, num_layers: int, depth: int, capacity: int, width: int, ring: torch.Tensor) -> EditTables:
        places, device = (rows, num_sites(num_layers)), ring.device
        return cls(
            counts=torch.zeros(*places, dtype=torch.int32, device=device),
            fields=torch.zeros(*places, depth, FIELDS, dtype=torch.int32, device=device),
            numbers=torch.zeros(*places, depth, NUMBERS, dtype=torch.float32, device=device),
            fires=torch.zeros(*places, depth, dtype=torch.int32, device=device),
            vectors=torch.zeros(capacity, width, dtype=torch.float32, device=device),
            offsets=torch.full(places, -1, dtype=torch.int32, device=device),
            ring=ring,
        )


class TableEdits:
    """Ops and captures from tables.

    Args:
        rows, positions: [tokens] int64, each token row's row of the request table, -1 for one that declared nothing; and its
            position.
        blocks: [2, tokens] int64, each token row's block of the ring: its first element, and the one after its last. What does
            not fit in is not captured: the two are equal where nothing is.
    """

    def __init__(self, tables: EditTables, rows: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> None:
        self.tables, self.rows, self.positions, self.blocks = tables, rows, positions, blocks
        self.final_site = tables.counts.shape[1] - 1

    def rows_from(self, start: int, stop: int) -> TableEdits:
        """Those of the token rows from `start` to `stop`, in memory of their own."""
        rows, positions, blocks = self.rows[start:stop], self.positions[start:stop], self.blocks[:, start:stop]
        return TableEdits(self.tables, rows.clone(), positions.clone(), blocks.clone())

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        from .triton_edits import edit

        return edit(value, site, self)

    def take(self, site: int, value: torch.Tensor) -> None:
        from .triton_edits import capture

        capture(value, site, self)

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from .triton_edits import edit_add_rms_norm

        return edit_add_rms_norm(h, delta, weight, eps, place, self)
