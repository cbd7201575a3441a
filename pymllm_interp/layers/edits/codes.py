"""The tables' layout: words of an op, words of a capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.model_spec import final_norm_site, num_sites

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
class OpTables:
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
    ) -> OpTables:  # fmt: skip
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
