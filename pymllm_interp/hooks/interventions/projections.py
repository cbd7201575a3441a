"""Interventions on the state's projections: `Ablate` and `Clamp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from ...kernels import edit_codes as codes
from ...kernels.edit_codes import OpWords
from ..heads import Heads
from ..positions import Positions
from ..registry import op
from ..site import Site
from ..vectors.files import Source
from .op import Gate, Missing, Op, row_dots

MAX_RANK = 16
"""Most directions of one `Ablate`."""
RANK_TOLERANCE = 1e-5
"""Unit directions are dependent where their smallest singular value is below this share of the largest."""


@op
@dataclass(frozen=True, eq=False)
class Ablate(Op):
    """Remove the state's component in a subspace: ``state - Q Q^T state``, Q an orthonormal basis of the directions.

    Directional ablation (Arditi et al. 2024, arXiv 2406.11717), for one or more directions.

    Args:
        site: A site's name, a pattern of sites such as "resid_post.*", or a `Site`.
        directions: Tensor [rank, width], or [width] for one direction, of any length; or a name in `lm.vectors`.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        when: A `Gate` that decides row by row; None acts on every row.
        heads: Attention heads, at `q`, `k`, `v` and `z`. Vectors then have len(heads) * head_dim values. None: whole states.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: an unknown site, unknown positions, more than `MAX_RANK` directions, or directions that are zero,
            linearly dependent, or not finite.
    """

    site: Site | str
    directions: Source = field(repr=False, metadata={"rows": True})
    positions: Positions = "all"
    when: Gate | None = None
    heads: Heads = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.named:
            return
        if len(self.directions) > MAX_RANK:
            raise ValueError(
                f"{self.name}: {len(self.directions)} directions; at most {MAX_RANK} (intervention.MAX_RANK) can be removed "
                "by one Ablate. Keep the leading ones of their singular value decomposition; {layer: direction} has one a layer"
            )
        self.basis  # noqa: B018  # refuses dependent directions

    @cached_property
    def basis(self) -> Tensor:
        """[rank, width] float32: orthonormal rows that span the directions."""
        rows = self.directions.double()
        lengths = rows.norm(dim=1, keepdim=True)
        if (lengths == 0).any():
            raise ValueError(f"{self.name}: direction {int(lengths.argmin())} is zero")
        _, singular, basis = torch.linalg.svd(rows / lengths, full_matrices=False)
        rank = int((singular > RANK_TOLERANCE * singular[0]).sum())
        # Refused, not reduced: the caller must decide which directions to keep.
        if rank < len(rows):
            raise ValueError(
                f"{self.name}: the {len(rows)} directions are dependent, they span {rank} dimension"
                f"{'s' if rank > 1 else ''}; leave out what the others span"
            )
        return basis.float().contiguous()

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The orthonormal basis."""
        return (self.basis,)

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The states without their components along the basis."""
        y = x
        for axis in vectors[0]:
            y = y - row_dots(x, axis) * axis
        return y

    def words(self) -> OpWords:
        """Table words of PROJECT_OUT."""
        return OpWords(codes.PROJECT_OUT, rank=len(self.basis))


@op
@dataclass(frozen=True, eq=False)
class Clamp(Op):
    """Clamp the state's projection onto the unit direction to [`low`, `high`]; ``low == high`` sets it.

    Args:
        site: A site's name, a pattern of sites such as "resid_post.*", or a `Site`.
        direction: Tensor [width] of any length, or a name in `lm.vectors`.
        low: Lower bound of the projection, or None.
        high: Upper bound of the projection, or None.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        when: A `Gate` that decides row by row; None acts on every row.
        heads: Attention heads, at `q`, `k`, `v` and `z`. Vectors then have len(heads) * head_dim values. None: whole states.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: an unknown site, unknown positions, or a direction that is zero or not finite. Bounds are refused if both
            are None, one is not finite, or ``low > high``.
    """

    site: Site | str
    direction: Source = field(repr=False)
    low: float | None = None
    high: float | None = None
    positions: Positions = "all"
    when: Gate | None = None
    heads: Heads = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("low", (self.low, self.high) != (None, None), "a bound: low, high, or both")
        if self.low is not None and self.high is not None:
            self._check("low", self.low <= self.high, f"at most high ({self.high})")
        if not self.named:
            self.unit  # noqa: B018  # refuses a zero direction

    @cached_property
    def unit(self) -> Tensor:
        """Unit vector of the direction."""
        return self._unit("direction")

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The unit direction."""
        return (self.unit,)

    def written(self) -> Iterator[tuple[str, float]]:
        """Lower and upper bound, if given."""
        yield from ((name, bound) for name, bound in (("low", self.low), ("high", self.high)) if bound is not None)

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The states with the clamped projection; rows within the bounds are unselected."""
        projection = row_dots(x, vectors[0])
        wanted = projection.clamp(self.low, self.high)
        selected &= wanted != projection
        return x + (wanted - projection) * vectors[0]

    def words(self) -> OpWords:
        """Table words of CLAMP."""
        return OpWords(codes.CLAMP, a=-inf if self.low is None else self.low, b=inf if self.high is None else self.high)
