"""Ops and captures from device tables, read by the kernel that adds and norms: the tables change, a captured graph does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch

from .edits import LOGITS, final_norm_site, num_sites

ADD, PROJECT_OUT, CLAMP, SCALE, PATCH = range(1, 6)
"""What an op does; 0 is none."""
NO_NORM, PRESERVE, MATCH = range(3)
"""What an ADD keeps: nothing, the state's norm, or the vector's length relative to it."""
MORE = 1 << 24
"""In the first word of an op that another one follows at its site."""
WORDS = 16
"""int32 of an op: `kind_word`, first vector, first position, position after the last, step, gate's vector or -1; and the bits of
float32s: scale, factor or lower bound; upper bound; the gate's threshold. The rest is unused: an op starts where a sector of the
cache does."""
CAPTURE_WORDS = 4
"""int32 of what a row captures at a site: where in its block of the ring, -1 for nowhere; `capture_word`; first vector. The
last is unused."""
WHOLE, FLOAT16, BFLOAT16 = range(3)
"""What a captured state leaves as: as it is, or converted."""
ALIGNED = 8
"""Elements that the places of captured states are multiples of, where the widths of all sites are. Those of dot products and of
converted states are not, but for the first of several."""
NO_END = 2**31 - 1


def kind_word(code: int, vectors: int, norm: int) -> int:
    """The first word of an op: what it does, how many vectors it has (of `PATCH`, 2 for one at each position), what it keeps."""
    return code | vectors << 8 | norm << 16


def capture_word(vectors: int, code: int) -> int:
    """The second word of a capture: how many vectors a state is multiplied with, and what it is converted to; one of the two."""
    return vectors | code << 8


@dataclass(frozen=True)
class EditTables:
    """The ops and captures of each row of the request table; row 0 is padding's and has none.

    Rows of the pool are `width` wide, as the states of the stream are; a vector of a wider site takes several. All live at one
    address, so that captured graphs can read them.

    What a token row captures lies behind each other in its block of the ring, each site's at its place: the state, the state in
    16 bits instead of 32, or its dot products with some vectors, float32.
    """

    # fmt: off
    ops:      torch.Tensor  # [rows, sites, depth, WORDS] int32
    fires:    torch.Tensor  # [rows, sites, depth] int32, how often a gated op acted
    vectors:  torch.Tensor  # [capacity, width] float32
    captures: torch.Tensor  # [rows, sites, CAPTURE_WORDS] int32; a first word of -1: nothing is captured
    ring:     torch.Tensor  # [elements], of the states' dtype
    num_layers: int
    inner:   frozenset[str] = frozenset()  # kinds of inner sites that passes have kernels for
    aligned: bool = False  # the widths of all sites are multiples of ALIGNED
    # fmt: on

    @classmethod
    def empty(
        cls, rows: int, num_layers: int, depth: int, capacity: int, width: int, ring: torch.Tensor,
        inner: frozenset[str] = frozenset(), aligned: bool = False,
    ) -> EditTables:  # fmt: skip
        places, device = (rows, num_sites(num_layers) if inner else final_norm_site(num_layers) + 1), ring.device
        return cls(
            ops=torch.zeros(*places, depth, WORDS, dtype=torch.int32, device=device),
            fires=torch.zeros(*places, depth, dtype=torch.int32, device=device),
            vectors=torch.zeros(capacity, width, dtype=torch.float32, device=device),
            captures=torch.full((*places, CAPTURE_WORDS), -1, dtype=torch.int32, device=device),
            ring=ring,
            num_layers=num_layers,
            inner=inner,
            aligned=aligned,
        )


class LogitOps(Protocol):
    """Ops at the logits, which no captured pass computes."""

    def rows_from(self, start: int, stop: int) -> Self:
        """Those of the rows from `start` to `stop` of a decode pass, counted from `start`."""
        ...

    def at(self, value: torch.Tensor) -> torch.Tensor:
        """Logits [1, rows, vocab] after the ops, in fresh memory."""
        ...


class TableEdits:
    """Ops and captures from tables.

    Args:
        rows, positions: [tokens] int64, each token row's row of the request table, -1 for one that declared nothing; and its
            position.
        blocks: [2, tokens] int64, each token row's block of the ring: its first element, and the one after its last. What does
            not fit in is not captured: the two are equal where nothing is.
        logits: None where there are no ops at them.
    """

    def __init__(
        self,
        tables: EditTables,
        rows: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        logits: LogitOps | None = None,
    ) -> None:
        self.tables, self.rows, self.positions, self.blocks, self.logits = tables, rows, positions, blocks, logits
        self.num_layers = tables.num_layers
        self.final_site = final_norm_site(self.num_layers)
        self.inner = tables.inner if logits is None else tables.inner | {LOGITS}

    def rows_from(self, start: int, stop: int) -> TableEdits:
        """Those of the token rows from `start` to `stop` of a decode pass, in memory of their own."""
        rows, positions, blocks = self.rows[start:stop], self.positions[start:stop], self.blocks[:, start:stop]
        logits = None if self.logits is None else self.logits.rows_from(start, stop)
        return TableEdits(self.tables, rows.clone(), positions.clone(), blocks.clone(), logits)

    def with_logits(self, logits: LogitOps | None) -> TableEdits:
        """The same in a pass with these ops at its logits."""
        return TableEdits(self.tables, self.rows, self.positions, self.blocks, logits)

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        from .triton_edits import edit

        if site >= self.tables.ops.shape[1]:
            return value if self.logits is None else self.logits.at(value)
        return edit(value, site, self)

    def take(self, site: int, value: torch.Tensor) -> None:
        from .triton_edits import capture

        capture(value, site, self)

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from .triton_edits import edit_add_rms_norm

        return edit_add_rms_norm(h, delta, weight, eps, place, self)
