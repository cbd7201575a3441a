"""The interventions: what to do to a hidden state, at which site, at which positions.

    Steer("resid_post.12", vector, scale=4.0, positions="generated")
    Ablate("resid_post.*", [first, second], when=Gate(probe, threshold=1.5))

An intervention is checked when it is made, and again by `bind`, when the model and the prompt are known. Interventions at one
site act in the order given, each on the state that the previous one left. `Ablate` and `Clamp` are in projections.py. All
interventions have the arguments of `Op`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from ...kernels import edit_codes as codes
from ...kernels.edit_codes import OpWords
from ..heads import Heads
from ..positions import Positions, Window, absolute_positions
from ..registry import op
from ..site import Site
from ..spec import as_argument
from ..vectors.files import Source
from .op import Gate, Missing, Op, row_norms

MEASURABLE = 1e18
"""Longest vector that `norm="preserve"` can add: float32 holds its square."""
NORMS = {"none": codes.NO_NORM, "preserve": codes.PRESERVE, "match": codes.MATCH}


@op
@dataclass(frozen=True, eq=False)
class Steer(Op):
    """Add a vector: ``state + scale * vector``.

    Activation addition (Turner et al. 2023, arXiv 2308.10248; Rimsky et al. 2023, arXiv 2312.06681).

    Args:
        site: A site's name, a pattern of sites such as "resid_post.*", or a `Site`.
        vector: Tensor [width] of any floating dtype, or a name in `lm.vectors`. Row i of [positions, width] is added at the i-th
            of `positions`, as written (Karvonen et al. 2025, arXiv 2512.15674). At `q`, `k`, `v` and `z` two dimensions are
            [heads, head_dim], and three are [positions, heads, head_dim]. At a pattern of sites the first of two dimensions is
            the layers, and three are [layers, positions, width].
        scale: Factor of the vector, one number. A strength a position is multiplied into the rows of `vector`.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        norm: "preserve" rescales the sum to the norm of the old state. "match" first rescales the vector to the state's norm,
            ``state + scale * |state| * vector / |vector|``; the sum is not rescaled.
        when: A `Gate` that decides row by row; None acts on every row.
        heads: Attention heads, at `q`, `k`, `v` and `z`. Vectors then have len(heads) * head_dim values. None: whole states.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: an unknown site, unknown positions, a vector that is not [width], or a number that is not finite. So is a zero
            vector with norm="match", or a ``scale * vector`` too long for norm="preserve".
    """

    site: Site | str
    vector: Source = field(repr=False, metadata={"by_position": True})
    scale: float = 1.0
    positions: Positions = "all"
    norm: Literal["none", "preserve", "match"] = "none"
    when: Gate | None = None
    heads: Heads = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm == "match" and not self.named:
            self.unit  # noqa: B018  # refuses a zero vector
        if self.norm == "preserve" and not self.named:
            length = abs(self.scale) * self.vector.double().norm(dim=-1).max().item()
            self._check("scale", length <= MEASURABLE, f"|scale * vector| of {MEASURABLE:g} at most, not {length:.3g}")

    @property
    def identity(self) -> bool:
        """Whether ``scale == 0``."""
        return self.scale == 0

    @cached_property
    def unit(self) -> Tensor:
        """The vector, with each row normalized."""
        return self._unit("vector")

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The vector, normalized with norm="match"."""
        return (self.unit if self.norm == "match" else self.vector,)

    @cached_property
    def addend(self) -> Tensor | None:
        """``scale * vector``; None if the result depends on the state's norm, the position or heads."""
        is_constant = self.norm == "none" and self.heads is None and self.vector.ndim == 1
        return self.scale * self.vector if is_constant else None

    def written(self) -> Iterator[tuple[str, float]]:
        """``scale * vector``, unless it is rescaled to the state's norm."""
        if self.norm == "none":
            yield "scale * vector", self.scale * self.vector.abs().max().item()

    def _schedule_hint(self, name: str) -> str:
        return (
            "; for a strength a position, multiply it into the rows of the vector: Steer(site, strengths[:, None] * vector, "
            "positions=Generated(0, len(strengths)))"
        )

    def fit(self, windows: tuple[Window, ...], prompt_len: int) -> Self:
        """The op with a vector for each position in the order of the windows' positions.

        Raises:
            ValueError: not one vector per position.
        """
        return in_order_of_windows(self, "vector", windows, prompt_len)

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The states plus the vector."""
        vector = of_positions(vectors[0], ordinals)
        if self.norm == "match":
            return x + self.scale * row_norms(x) * vector
        y = x + self.scale * vector  # for "none", layers/edits/host.py does the same for several requests at once
        if self.norm == "preserve":
            norms = row_norms(y)
            y = y * torch.where(norms > 0, row_norms(x) / norms, 1.0)  # a zero state has no direction
        return y

    def words(self) -> OpWords:
        """Table words of ADD."""
        dims = self.vector.ndim
        return OpWords(codes.ADD, rank=dims, norm=NORMS[self.norm], a=self.scale, row_per_position=dims == 2)


@op
@dataclass(frozen=True, eq=False)
class Scale(Op):
    """Multiply the state: ``factor * state``. A factor of 0 sets it to zero.

    Args:
        site: A site's name, a pattern of sites such as "resid_post.*", or a `Site`.
        factor: Number that multiplies the state.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        when: A `Gate` that decides row by row; None acts on every row.
        heads: Attention heads, at `q`, `k`, `v` and `z`. Vectors then have len(heads) * head_dim values. None: whole states.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: an unknown site, unknown positions, or a factor that is not finite.
    """

    site: Site | str
    factor: float
    positions: Positions = "all"
    when: Gate | None = None
    heads: Heads = None
    missing: Missing = "error"

    @property
    def identity(self) -> bool:
        """Whether ``factor == 1``."""
        return self.factor == 1

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The states times the factor."""
        return self.factor * x

    def words(self) -> OpWords:
        """Table words of SCALE."""
        return OpWords(codes.SCALE, rank=0, a=self.factor)


@op
@dataclass(frozen=True, eq=False)
class Patch(Op):
    """Replace the state by given values, usually states of another run.

    Activation patching (Meng et al. 2022, arXiv 2202.05262, as causal tracing).

    Args:
        site: A site's name, a pattern of sites such as "resid_post.*", or a `Site`.
        values: Tensor [positions, width], or a name in `lm.vectors`. Row i replaces the state at the i-th of `positions`, as
            written. A tensor [width] replaces the state at each position. At `q`, `k`, `v` and `z` also
            [positions, heads, head_dim], as captured.
            At `state.i`: the recurrent state as one row, with ``positions=-1``; it is replaced behind the prompt.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        when: A `Gate` that decides row by row; None acts on every row.
        heads: Attention heads, at `q`, `k`, `v` and `z`. Vectors then have len(heads) * head_dim values. None: whole states.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: an unknown site, unknown positions, or values that are not [positions, width] or [width], or not finite.
    """

    site: Site | str
    values: Source = field(repr=False, metadata={"dims": (1, 2)})
    positions: Positions = "all"
    when: Gate | None = None
    heads: Heads = None
    missing: Missing = "error"
    replaces_states = True

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The values."""
        return (self.values,)

    def written(self) -> Iterator[tuple[str, float]]:
        """Largest absolute value."""
        yield "values", self.values.abs().max().item()

    def fit(self, windows: tuple[Window, ...], prompt_len: int) -> Self:
        """The patch with its rows in the order of the windows' positions.

        Raises:
            ValueError: not one row per position.
        """
        return in_order_of_windows(self, "values", windows, prompt_len)

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The values at the selected positions."""
        return of_positions(vectors[0], ordinals).expand_as(x)

    def words(self) -> OpWords:
        """Table words of PATCH."""
        return OpWords(codes.PATCH, rank=self.values.ndim, row_per_position=self.values.ndim == 2)


OpT = TypeVar("OpT", bound=Op)


def in_order_of_windows(op: OpT, name: str, windows: tuple[Window, ...], prompt_len: int) -> OpT:
    """The op with the rows of a field in the order of its windows' positions. With one vector [width] it is the op itself.

    Args:
        name: name of the field.

    Raises:
        ValueError: not one row per position.
    """
    rows: Tensor = getattr(op, name)
    if rows.ndim == 1:
        return op
    named: Any = op.positions
    sizes = [window.size for window in windows]
    count = None if None in sizes else sum(size or 0 for size in sizes)
    if isinstance(named, tuple | range):
        count = len(named)
    if count != len(rows):
        wanted = "positions without end, which take one [width]" if count is None else f"{count} positions"
        raise ValueError(f"{op.name}: {name} has {len(rows)} rows for {wanted}{_hint(name, len(rows), count)}")
    if not isinstance(named, tuple | range) or not windows:
        return op
    kept = [row for row, index in enumerate(named) if -prompt_len <= index < prompt_len]
    indexes = absolute_positions(tuple(named[row] for row in kept), prompt_len)
    order = sorted(range(len(indexes)), key=indexes.__getitem__)
    if tuple(named) == tuple(indexes) and order == kept:
        return op  # in order as written: most are, and a copy is checked anew
    rows = as_argument(rows[kept][order], str(op.site))
    changes = {name: rows, "positions": tuple(indexes[row] for row in order)}
    return replace(op, **changes)  # pyright: ignore[reportArgumentType]


def _hint(name: str, rows: int, count: int | None) -> str:
    """Advice for rows that do not fit the positions, or ""."""
    if rows == 1:
        return f": give {name}[0], one vector for all positions"
    each = f"positions=Generated(0, {rows}) takes one row for each of the first {rows} generated tokens"
    return f": {each}" if count is None else ""


def of_positions(vectors: Tensor, ordinals: Tensor) -> Tensor:
    """The vector of each row: [width] for all, or [rows, width] of vectors [positions, width]. Any vector for an ordinal of -1."""
    return vectors if vectors.ndim == 1 else vectors[ordinals.clamp(min=0)]
