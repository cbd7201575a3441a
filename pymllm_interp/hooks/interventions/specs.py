"""Declared interventions and captures: what to do to a hidden state, at which site, at which positions.

    Steer("resid_post.12", vector, scale=4.0, positions="generated")
    Ablate("resid_post.*", [first, second], when=Gate(probe, threshold=1.5))
    Capture("mlp_out.{3,4}", positions=[-1])

Each is checked where it is made, and again by `bind`, when the model and the prompt are known. Several at one site act in the
order given, each on what the one before it left. `apply` is what they mean, in torch: the reference for every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..positions import (
    Positions,
)
from ..site import Site
from ..spec import _Placed, _Spec, _unit
from ..vectors import Source

MAX_RANK = 16
"""Directions that one `Ablate` removes at most."""
RANK_TOLERANCE = 1e-5
"""Directions of length 1 whose smallest singular value, as a share of the largest, is below this are dependent."""
MEASURABLE = 1e18
"""A vector's length at most, where the length of a state that it was added to is taken: float32 holds its square."""


class _Operation(_Placed):
    """A spec that changes the state."""

    when: Any

    @property
    def identity(self) -> bool:
        """Whether it changes nothing, so that it can be left out."""
        return False

    def _set_place(self) -> None:
        super()._set_place()
        self._check("when", self.when is None or isinstance(self.when, Gate), "a Gate, or None")


@dataclass(frozen=True, eq=False)
class Gate(_Spec):
    """Lets an intervention act on a row only where ``dot(state, probe) > threshold``, of the state that it would change.

    A gate on a linear probe, as in conditional activation steering (Lee et al. 2024, arXiv 2409.05907), which compares
    cosines.

    Raises:
        ValueError: a probe that is no vector of finite numbers, or a threshold that is no finite number.
    """

    probe: Source = field(repr=False)
    """[width], kept as float32 on the CPU. Not normalised."""
    threshold: float = 0.0

    def __post_init__(self) -> None:
        self._set_tensor("probe", 1)
        self._set_number("threshold")


@dataclass(frozen=True, eq=False)
class Steer(_Operation):
    """Add a vector: ``state + scale * vector``.

    Activation addition (Turner et al. 2023, arXiv 2308.10248; Rimsky et al. 2023, arXiv 2312.06681).

    Raises:
        ValueError: an unknown site, a vector with another shape than [width], with NaN or Inf, a scale that is not finite,
            positions that are not understood, a zero vector with norm="match", or one with norm="preserve" that is too long.
    """

    site: Site | str
    vector: Source = field(repr=False)
    """[width], kept as float32 on the CPU; the caller's tensor may change afterwards. Or a name in `lm.vectors`."""
    scale: float = 1.0
    positions: Positions = "all"
    norm: Literal["none", "preserve", "match"] = "none"
    """ "preserve": the new state is scaled to the norm that the old one had. "match": the vector is scaled to the state's norm
    first, ``state + scale * |state| * vector / |vector|``, and the new state's norm is what comes out."""
    when: Gate | None = None

    def __post_init__(self) -> None:
        self._set_place()
        self._set_tensor("vector", 1)
        self._set_number("scale")
        self._check("norm", self.norm in ("none", "preserve", "match"), "'none', 'preserve' or 'match'")
        if self.norm == "match" and not self.named:
            self.unit  # noqa: B018  # refuses a zero vector
        if self.norm == "preserve" and not self.named:
            length = abs(self.scale) * self.vector.double().norm().item()
            self._check("scale", length <= MEASURABLE, f"|scale * vector| of {MEASURABLE:g} at most, not {length:.3g}")

    @property
    def identity(self) -> bool:
        """Whether it adds nothing."""
        return self.scale == 0

    @cached_property
    def unit(self) -> Tensor:
        """The vector, of length 1."""
        return _unit(self.vector, f"{self.name}: vector")

    @cached_property
    def scaled(self) -> Tensor:
        """The vector, `scale` times."""
        return self.scale * self.vector


@dataclass(frozen=True, eq=False)
class Ablate(_Operation):
    """Remove what the state has in a subspace: ``state - Q Q^T state``, Q an orthonormal basis of the directions.

    Directional ablation (Arditi et al. 2024, arXiv 2406.11717), for one direction or several.

    Raises:
        ValueError: an unknown site, more than `MAX_RANK` directions, directions that are dependent (or zero), with NaN or Inf,
            or positions that are not understood.
    """

    site: Site | str
    directions: Source = field(repr=False)
    """[rank, width], or [width] for one; of any length. Kept as [rank, width] float32 on the CPU."""
    positions: Positions = "all"
    when: Gate | None = None
    basis: Tensor = field(init=False, repr=False)
    """[rank, width] float32: orthonormal rows that span the directions."""

    def __post_init__(self) -> None:
        self._set_place()
        self._set_rows("directions")
        if self.named:
            return
        if len(self.directions) > MAX_RANK:
            raise ValueError(
                f"{self.name}: {len(self.directions)} directions; at most {MAX_RANK} (intervention.MAX_RANK) can be removed "
                "by one Ablate. Keep the leading ones of their singular value decomposition"
            )
        self._set("basis", self._orthonormal())

    def _orthonormal(self) -> Tensor:
        rows = self.directions.double()
        lengths = rows.norm(dim=1, keepdim=True)
        if (lengths == 0).any():
            raise ValueError(f"{self.name}: direction {int(lengths.argmin())} is zero")
        _, singular, basis = torch.linalg.svd(rows / lengths, full_matrices=False)
        rank = int((singular > RANK_TOLERANCE * singular[0]).sum())
        # Not reduced in silence: how near is too near is the caller's to say.
        if rank < len(rows):
            raise ValueError(
                f"{self.name}: the {len(rows)} directions are dependent, they span {rank} dimension"
                f"{'s' if rank > 1 else ''}; leave out what the others span"
            )
        return basis.float().contiguous()


@dataclass(frozen=True, eq=False)
class Clamp(_Operation):
    """Keep the state's projection onto a direction between `low` and `high`; ``low == high`` sets it.

    Raises:
        ValueError: an unknown site, a direction that is zero or no vector of finite numbers, no bound, bounds that are not
            finite or the wrong way round, or positions that are not understood.
    """

    site: Site | str
    direction: Source = field(repr=False)
    """[width], of any length; kept as float32 on the CPU."""
    low: float | None = None
    high: float | None = None
    positions: Positions = "all"
    when: Gate | None = None

    def __post_init__(self) -> None:
        self._set_place()
        self._set_tensor("direction", 1)
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                self._set_number(name)
        self._check("low", (self.low, self.high) != (None, None), "a bound: low, high, or both")
        if self.low is not None and self.high is not None:
            self._check("low", self.low <= self.high, f"at most high ({self.high})")
        if not self.named:
            self.unit  # noqa: B018  # refuses a zero direction

    @cached_property
    def unit(self) -> Tensor:
        """The direction, of length 1."""
        return _unit(self.direction, f"{self.name}: direction")


@dataclass(frozen=True, eq=False)
class Scale(_Operation):
    """Multiply the state: ``factor * state``. 0 removes it.

    Raises:
        ValueError: an unknown site, a factor that is not finite, or positions that are not understood.
    """

    site: Site | str
    factor: float
    positions: Positions = "all"
    when: Gate | None = None

    def __post_init__(self) -> None:
        self._set_place()
        self._set_number("factor")

    @property
    def identity(self) -> bool:
        """Whether it multiplies by 1."""
        return self.factor == 1


@dataclass(frozen=True, eq=False)
class Patch(_Operation):
    """Put other values in the state's place: those of another run, as a rule.

    Activation patching (Meng et al. 2022, arXiv 2202.05262, as causal tracing).

    Raises:
        ValueError: an unknown site, values of another shape, with NaN or Inf, or positions that are not understood.
    """

    site: Site | str
    values: Source = field(repr=False)
    """[positions, width], row i for the i-th of `positions` as they are written; or [width], the same at each. Kept as float32
    on the CPU."""
    positions: Positions = "all"
    when: Gate | None = None

    def __post_init__(self) -> None:
        self._set_place()
        self._set_tensor("values", 1, 2)


Intervention = Steer | Ablate | Clamp | Scale | Patch
