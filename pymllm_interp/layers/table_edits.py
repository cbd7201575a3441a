"""Ops from device tables, read by the kernel that adds and norms: the tables change, a captured graph does not."""

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
