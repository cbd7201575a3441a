"""Layout of the device tables that kernels read: the words of ops and of captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from ..core.model_spec import HEAD_SITES, INNER_SITES, final_norm_site, num_sites

ADD, PROJECT_OUT, CLAMP, SCALE, PATCH, GATE, SET_FEATURE, SCORE, RECONSTRUCT = range(1, 10)
"""Codes of ops; 0 stands for none. GATE and SCORE change no state: GATE sets a flag for ops at later sites, and SCORE stores dot
products."""
NO_NORM, PRESERVE, MATCH = range(3)
"""Normalization of an ADD: no rescaling; the sum gets the state's norm; the vector gets the state's norm."""
MORE = 1 << 24
"""Bit of an op's first word: another op follows at the site."""
WORDS = 16
"""int32 words of an op at one window of positions.

0: `kind_word`. 1: row of its first vector in the pool. 2, 3, 4: start, stop and step of the window. 5: row of the gate's probe, -1,
or `flag_word`. 6, 7, 8: float32 bits of `OpWords.a`, `OpWords.b` and the gate's threshold. `HEADS_WORD` to 15: `head_words`. Each
op starts at a sector of the cache."""
HEADS_WORD = 9
"""First of the words that hold an op's heads, a bit each; only read at sites with heads."""
MAX_HEADS = 32 * (WORDS - HEADS_WORD)
"""Heads that these words can hold."""
MAX_GATES = 16
"""Gates at earlier sites that a request can have; each has a bit of `TokenRows.flags`."""
MAX_SCORES = 64
"""Dot products that the SCOREs of a request can have; rows of `TokenRows.scores`."""
CAPTURE_WORDS = 4
"""int32 words of a capture at one site.

0: offset in the row's record of the ring, or -1 for no capture. 1: `capture_word`. 2: row of the first vector in the pool. 3:
unused."""
WHOLE, FLOAT16, BFLOAT16 = range(3)
"""Conversion of a captured state: none, or to 16 bits."""
ALIGNED = 8
"""Alignment of captured states in the ring, in elements, if the widths of all sites are multiples of it. Dot products and
converted states are aligned at the first of several only."""
FEATURE_COLUMNS = 132
"""Columns of a row's memory for the features that its request wants. Each op takes one for each feature, and one for the factor of
the output. Reconstructions follow."""
NO_END = 2**31 - 1
"""Stop of a window without end."""


class OpWords(NamedTuple):
    """Table entry of an op, without its vectors' rows, windows and gate."""

    code: int
    rank: int = 1
    """Number of vectors. For ADD and PATCH, 1 for one vector, 2 for one per position. For SET_FEATURE, the number of features, with
    three rows each (`SetFeature.table`)."""
    norm: int = NO_NORM
    a: float = 0.0
    """Scale, factor, or lower bound. For SET_FEATURE, 1 plus the column of its first feature in the row's memory; 0: kernels
    compute them. For RECONSTRUCT, the first column of the state."""
    b: float = 0.0
    """Upper bound. For SCORE, the first row of `TokenRows.scores` that it writes."""
    row_per_position: bool = False
    """Whether there is one vector per position, so that each window has its own first vector."""


def kind_word(words: OpWords) -> int:
    """The first word of an op: code, rank and norm, a byte each."""
    return words.code | words.rank << 8 | words.norm << 16


def head_words(heads: Sequence[int] | None) -> list[int]:
    """The words of an op's heads: bit ``i % 32`` of word ``i // 32`` is head i's. None: all heads."""
    words = [-1 if heads is None else 0] * (WORDS - HEADS_WORD)
    for head in heads or ():
        words[head // 32] |= 1 << head % 32
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def flag_word(slot: int, of_prompt: bool) -> int:
    """The word for a flag that a gate sets and ops look at. It is a flag of the token row, or `OpTables.first_fired` of the
    request.
    """
    return -2 - 2 * slot - of_prompt


def capture_word(vectors: int, code: int) -> int:
    """The second word of a capture: the number of vectors for dot products, or the code of a conversion."""
    return vectors | code << 8


class RowEncoder(Protocol):
    """RowEncoder of all token rows at a site (`hooks.saes.encoders`)."""

    @property
    def after(self) -> bool:
        """Whether it reads the state after the ops at the site, not before them."""
        ...

    def read(self, states: torch.Tensor, wanted: torch.Tensor, memory: torch.Tensor) -> None:
        """Write the results of states [n, width] to the rows' memory [n, columns].

        Args:
            wanted: [n, FEATURE_COLUMNS], rows of `OpTables.wanted`.
        """
        ...


class TokenRows(NamedTuple):
    """Per-row tensors of a pass that kernels read; see `TableOps`."""

    owners: torch.Tensor
    """[tokens] int64, rows of the request table; -1 for none."""
    positions: torch.Tensor
    """[tokens] int64."""
    records: torch.Tensor
    """[2, tokens] int64: start and stop in the ring."""
    flags: torch.Tensor
    """[tokens] int64, a bit for each of the request's gates; written and read within a pass."""
    scores: torch.Tensor
    """[MAX_SCORES, tokens] float32: dot products that SCOREs store, in consecutive rows for each."""
    features: torch.Tensor | None = None
    """[columns, tokens] float32, with a row's columns adjacent; written and read within a pass. None without encoders."""


@dataclass(frozen=True)
class OpTables:
    """The ops and captures of each row of the request table. Row 0 is for padding and stays empty.

    The tensors never move, since captured graphs read them. Rows of `vectors` have the hidden size; a vector of a wider site
    takes several rows.

    A token row has one record in the ring, with its captures at fixed offsets. Each capture is the state, the state in 16 bits, or
    float32 dot products of the state with vectors.
    """

    # fmt: off
    ops:      torch.Tensor  # [rows, sites, depth, WORDS] int32
    fires:    torch.Tensor  # [rows, sites, depth, 3] int32: fires of a gate, its last position, the first that counts
    vectors:  torch.Tensor  # [capacity, width] float32
    captures: torch.Tensor  # [rows, sites, CAPTURE_WORDS] int32
    first_fired: torch.Tensor  # [rows, MAX_GATES] int32, the prompt's first position at which a gate fired, or NO_END
    ring:     torch.Tensor  # [elements], with the dtype of the states
    num_layers: int
    inner:   frozenset[str] = frozenset()  # kinds of inner sites with kernels
    aligned: bool = False  # all sites' widths are multiples of ALIGNED
    head_dim: int = 0
    encoders: Mapping[int, Sequence[RowEncoder]] = field(default_factory=dict)  # by the site that they read
    encoded: frozenset[int] = frozenset()  # sites that encoders read or write
    wanted:   torch.Tensor | None = None  # [rows, FEATURE_COLUMNS] int64, what rows want of encoders, or -1
    # fmt: on

    def head_dim_at(self, site: int) -> int:
        """Channels of a head at a site; 0 at sites without heads."""
        first = final_norm_site(self.num_layers) + 1
        has_heads = site >= first and INNER_SITES[(site - first) % len(INNER_SITES)] in HEAD_SITES
        return self.head_dim if has_heads else 0

    @classmethod
    def empty(
        cls, rows: int, num_layers: int, depth: int, capacity: int, width: int, ring: torch.Tensor,
        inner: frozenset[str] = frozenset(), aligned: bool = False, head_dim: int = 0,
        encoders: Mapping[int, Sequence[RowEncoder]] | None = None, encoded: frozenset[int] = frozenset(),
    ) -> OpTables:  # fmt: skip
        places, device = (rows, num_sites(num_layers) if inner else final_norm_site(num_layers) + 1), ring.device
        return cls(
            ops=torch.zeros(*places, depth, WORDS, dtype=torch.int32, device=device),
            fires=torch.zeros(*places, depth, 3, dtype=torch.int32, device=device),
            vectors=torch.zeros(capacity, width, dtype=torch.float32, device=device),
            captures=torch.full((*places, CAPTURE_WORDS), -1, dtype=torch.int32, device=device),
            first_fired=torch.full((rows, MAX_GATES), NO_END, dtype=torch.int32, device=device),
            ring=ring,
            num_layers=num_layers,
            inner=inner,
            aligned=aligned,
            head_dim=head_dim,
            encoders=encoders or {},
            encoded=encoded,
            wanted=torch.full((rows, FEATURE_COLUMNS), -1, dtype=torch.int64, device=device) if encoders else None,
        )
