"""Declared interventions and captures: what to do to a hidden state, at which site, at which positions.

    Steer("resid_post.12", vector, scale=4.0, positions="generated")
    Ablate("resid_post.*", [first, second], when=Gate(probe, threshold=1.5))
    Capture("mlp_out.{3,4}", positions=[-1])

Each is checked where it is made, and again by `bind`, when the model and the prompt are known. Several at one site act in the
order given, each on what the one before it left. `apply` is what they mean, in torch: the reference for every kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from ..config import DTYPES
from .site import ModelInfo, Site, canonical, expand
from .vectors import Named, Source, checked_vector

MAX_RANK = 16
"""Directions that one `Ablate` removes at most."""
RANK_TOLERANCE = 1e-5
"""Directions of length 1 whose smallest singular value, as a share of the largest, is below this are dependent."""
MEASURABLE = 1e18
"""A vector's length at most, where the length of a state that it was added to is taken: float32 holds its square."""


@dataclass(frozen=True)
class Generated:
    """Positions after the prompt: ``Generated(0, 8)`` are those of the first 8 new tokens, ``Generated(step=4)`` every fourth.

    A position is that of an input token: 0 is the first new token, when it is read to make the second one. The first new
    token itself was made at the prompt's last position.

    Raises:
        ValueError: numbers that are not whole, a start below 0, a stop that is not above it, or a step below 1.
    """

    start: int = 0
    stop: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if not all(_is_whole(value) for value in (self.start, 0 if self.stop is None else self.stop, self.step)):
            raise ValueError(f"{self}: whole numbers are expected")
        if self.start < 0 or self.step < 1 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(
                f"{self}: expected 0 <= start < stop, and step >= 1; how many tokens come is not known before"
            )


Positions = Literal["all", "prompt", "generated"] | int | Sequence[int] | slice | Generated
"""Which of a request's positions. Positions are those of input tokens, counted from 0, so a request has prompt + generated - 1.

- ``"all"``; ``"prompt"``; ``"generated"``: those after the prompt, hence not the one that makes the first new token.
- a whole number, or a list, tuple or range of them: of the prompt, negative ones from its end. Each must exist.
- a slice: of the prompt, as Python slices a list; ``slice(None, None, 4)`` is every fourth.
- `Generated`.

Logits are computed where a token is drawn, at the prompt's last position and those behind it: an op at `logits` acts at those of
its positions alone, and a `Capture` of ``"all"`` has those. One that names others is refused, unless the request has the logits
of its whole prompt (``prompt_logprobs``, ``with lm.trace(...)``).
"""


_Indexes = tuple[int, ...] | range


@dataclass(frozen=True)
class Window:
    """Positions ``start, start + step, ...`` below `stop`, or without end where that is None."""

    start: int
    stop: int | None = None
    step: int = 1

    @property
    def size(self) -> int | None:
        """How many positions; None where there is no end."""
        return None if self.stop is None else len(range(self.start, self.stop, self.step))

    def among(self, first: int, stop: int) -> int:
        """How many of its positions are `first` or later, and before `stop`."""
        skipped = max(0, -(-(first - self.start) // self.step))
        last = stop if self.stop is None else min(stop, self.stop)
        return len(range(self.start + skipped * self.step, last, self.step))


def windows_of(positions: Positions, prompt_len: int) -> tuple[Window, ...]:
    """`positions` of a request, as windows in ascending order that do not overlap. One without end is the only one.

    Raises:
        ValueError: positions that are not understood, indexes beyond the prompt, two that are the same position, or a
            slice that selects nothing.
    """
    positions = _checked_positions(positions)
    if positions == "all":
        return (Window(0),)
    if positions == "prompt":
        return (Window(0, prompt_len),)
    if positions == "generated":
        positions = Generated()
    if isinstance(positions, Generated):
        stop = None if positions.stop is None else prompt_len + positions.stop
        return (Window(prompt_len + positions.start, stop, positions.step),)
    if isinstance(positions, slice):
        selected = range(prompt_len)[positions]
        if not selected:
            raise ValueError(f"{positions} selects nothing of a prompt of {prompt_len} tokens")
        return (Window(selected.start, selected.stop, selected.step),)
    return progressions(sorted(_absolute(positions, prompt_len)))


def ordinals_of(windows: tuple[Window, ...], positions: Tensor) -> Tensor:
    """The place of each of `positions` [rows] among the windows' positions, counted from 0; -1 where it is none of them.

    Returns:
        [rows], of the dtype and on the device of `positions`.
    """
    ordinals, before = torch.full_like(positions, -1), 0
    for window in windows:
        offset = positions - window.start
        inside = (offset >= 0) & (offset % window.step == 0)
        if window.stop is not None:
            inside &= positions < window.stop
        ordinals = torch.where(inside, before + offset // window.step, ordinals)
        before += window.size or 0
    return ordinals


class _Spec:
    """What is checked once, then never changes. Specs with the same content are equal.

    Where a tensor is expected, a string is the name of one; `resolved` puts the tensor in its place.
    """

    named: tuple[str, ...] = ()
    """Fields that hold a name."""

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all whose width must be the site's, those of a gate and of a reduction included."""
        for name, value in self._content():
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, _Spec):
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in value.tensors())

    def names(self) -> Iterator[str]:
        """Names of vectors, those of a gate and of a reduction included."""
        for name, value in self._content():
            if name in self.named:
                yield value
            elif isinstance(value, _Spec):
                yield from value.names()

    def filled(self, vectors: Mapping[str, Tensor]) -> Self:
        """The spec with the vectors in the place of their names."""
        changes: dict[str, Any] = {name: vectors[getattr(self, name)] for name in self.named}
        for name, value in self._content():
            if isinstance(value, _Spec) and any(value.names()):
                changes[name] = value.filled(vectors)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, vectors included: 64 hexadecimal digits."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for name, value in self._content():
            if isinstance(value, Tensor):
                value = (tuple(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest())
            elif isinstance(value, _Spec):
                value = value.fingerprint
            digest.update(f"|{name}={value!r}".encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, _Spec) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def _content(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of what the caller gave."""
        parts = fields(self)  # pyright: ignore[reportArgumentType]  # each subclass is a dataclass
        return ((part.name, getattr(self, part.name)) for part in parts if part.init)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: {name}={getattr(self, name)!r}; expected {expected}")

    def _set_number(self, name: str) -> None:
        value: Any = getattr(self, name)
        self._check(name, _is_number(value), "a number")
        self._check(name, abs(value) <= torch.finfo(torch.float32).max, "a finite number that float32 can hold")
        self._set(name, float(value))

    def _set_tensor(self, name: str, *dims: int) -> None:
        if isinstance(getattr(self, name), str):
            self._set("named", (*self.named, name))
        else:
            self._set(name, checked_vector(getattr(self, name), f"{self.name}: {name}", dims))

    def _set_rows(self, name: str) -> None:
        """A tensor of shape [n, width], or [width] for one row."""
        self._set_tensor(name, 1, 2)
        if name not in self.named:
            tensor: Tensor = getattr(self, name)
            self._set(name, tensor.reshape(-1, tensor.shape[-1]))


class _Placed(_Spec):
    """A spec with a site and positions."""

    site: Any
    positions: Any

    @property
    def name(self) -> str:
        """For messages."""
        return f"{type(self).__name__}({str(self.site)!r})"

    def sites_in(self, model: ModelInfo) -> tuple[Site, ...]:
        """The spec's sites in the order of the layers, of a model that it was checked against: once, since as a rule many
        requests have the same specs.

        Raises:
            ValueError: what `bind` refuses whatever the prompt.
        """
        found = self.__dict__.get("_found")
        if found is None or found[0] is not model:
            found = model, _sites_of(self, model)  # pyright: ignore[reportArgumentType]
            self._set("_found", found)
        return found[1]

    def _set_place(self) -> None:
        try:
            self._set("site", canonical(self.site))
            self._set("positions", _checked_positions(self.positions))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


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


@dataclass(frozen=True, eq=False)
class Project(_Spec):
    """A capture's reduction: the dot products of each row with some directions, in place of the row.

    Raises:
        ValueError: directions that are no finite numbers of shape [n, width], or a top_k that is not from 1 to n.
    """

    directions: Source = field(repr=False)
    """[n, width], or [width] for one; not normalised. Kept as [n, width] float32 on the CPU."""
    top_k: int | None = None
    """Keep only the largest, with their indexes."""

    def __post_init__(self) -> None:
        self._set_rows("directions")
        if self.top_k is not None and not self.named:
            count = len(self.directions)
            self._check("top_k", _is_whole(self.top_k) and 1 <= self.top_k <= count, f"from 1 to {count}, or None")


@dataclass(frozen=True, eq=False)
class Capture(_Placed):
    """Read the state, after all interventions at its site. At `logits` it is what the next token is drawn from, before penalties
    and filters.

    Raises:
        ValueError: an unknown site, positions, a dtype or a reduction that is not understood.
    """

    site: Site | str
    positions: Positions = "all"
    dtype: torch.dtype | str | None = None
    """What the rows are converted to, after a reduction: a floating dtype or its name. None leaves the model's, and of a `Project`
    float32."""
    reduce: Literal["mean", "last"] | Project | None = None
    """Over the captured positions: their mean, or the last one alone; or a `Project` of each."""

    def __post_init__(self) -> None:
        self._set_place()
        if isinstance(self.dtype, str):
            self._check("dtype", self.dtype in DTYPES, f"one of {sorted(DTYPES)}")
            self._set("dtype", DTYPES[self.dtype])
        elif self.dtype is not None:
            self._check("dtype", self.dtype in DTYPES.values(), f"one of {sorted(DTYPES)}")
        known = self.reduce is None or isinstance(self.reduce, Project) or self.reduce in ("mean", "last")
        self._check("reduce", known, "'mean', 'last', a Project, or None")


Intervention = Steer | Ablate | Clamp | Scale | Patch
_PlacedSpec = TypeVar("_PlacedSpec", bound=Intervention | Capture)


def for_each_prompt(given: Any, prompts: int) -> list[list[Intervention]]:
    """A list of interventions for each of so many prompts: `given` for all of them, or a list of lists.

    Raises:
        ValueError: neither, or a list of another length.
    """
    found = _lists(given, prompts, "interventions")
    for spec in (spec for entry in found for spec in entry):
        if not isinstance(spec, Intervention):
            raise ValueError(f"interventions: {spec!r} is not one; expected Steer, Ablate, Clamp, Scale or Patch")
    return found


def captures_for_each_prompt(given: Any, prompts: int) -> list[list[Capture]]:
    """The same of captures; a string is a `Capture` of that site.

    Raises:
        ValueError: neither, or a list of another length.
    """
    found = [
        [_whole(spec) if isinstance(spec, str | Site) else spec for spec in entry]
        for entry in _lists(given, prompts, "capture")
    ]
    for spec in (spec for entry in found for spec in entry):
        if not isinstance(spec, Capture):
            raise ValueError(f"capture: {spec!r} is not one; expected a site, or Capture(site, ...)")
    return found


@lru_cache
def _whole(site: str | Site) -> Capture:
    return Capture(site)


def _lists(given: Any, prompts: int, what: str) -> list[list[Any]]:
    specs = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    lists = [isinstance(spec, list | tuple) for spec in specs]
    if not any(lists):
        return [specs] * prompts
    if all(lists) and len(specs) == prompts:
        return [list(entry) for entry in specs]
    others = len(specs) - sum(lists)
    got = f"{sum(lists)} of them" + (f" and {others} that are not in one" if others else "")
    raise ValueError(f"{what}: expected one list for all prompts, or a list for each of the {prompts}; got {got}")


def resolved(
    lists: Sequence[Sequence[_PlacedSpec]], vectors: Mapping[str, Named], model: ModelInfo
) -> list[list[_PlacedSpec]]:
    """Each request's specs with vectors in place of their names. One whose vectors differ by layer becomes one for each layer.

    Raises:
        ValueError: a name that is not there, a layer that has no vector, or a vector that the spec refuses.
    """
    done: dict[int, list[_PlacedSpec]] = {}  # by id: as a rule all requests have the same specs
    for spec in (spec for specs in lists for spec in specs):
        if id(spec) not in done:
            done[id(spec)] = _resolved(spec, vectors, model) if any(spec.names()) else [spec]
    return [[made for spec in specs for made in done[id(spec)]] for specs in lists]


def _resolved(spec: _PlacedSpec, vectors: Mapping[str, Named], model: ModelInfo) -> list[_PlacedSpec]:
    try:
        found = {name: vectors[name] for name in spec.names()}
        if all(isinstance(vector, Tensor) for vector in found.values()):
            return [spec.filled(found)]  # pyright: ignore[reportArgumentType]
        sites = expand(spec.site, model.num_hidden_layers, model.family)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{spec.name}: {error.args[0]}") from None
    return [replace(spec, site=str(site)).filled(_of_layer(found, site, spec.name)) for site in sites]


def _of_layer(vectors: Mapping[str, Named], site: Site, who: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, vector in vectors.items():
        if isinstance(vector, dict):
            if site.layer not in vector:
                have = ", ".join(map(str, vector))
                raise ValueError(f"{who}: vector {name!r} has none for {site}; it has the layers {have}")
            vector = vector[site.layer]
        found[name] = vector
    return found


def fingerprint_of(interventions: Sequence[Intervention], captures: Sequence[Capture]) -> str:
    """A hash of all that a request declares, in its order, vectors included: 64 hexadecimal digits."""
    parts = [spec.fingerprint for spec in (*interventions, *captures)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Bound:
    """A spec at one site of one model, for a prompt of one length: what a table can hold."""

    spec: Intervention | Capture
    site: Site
    windows: tuple[Window, ...]
    """Of `windows_of`. A `Patch` has its values in their order: row i is for ordinal i."""


def bind(spec: Intervention | Capture, model: ModelInfo, prompt_len: int) -> list[Bound]:
    """`spec` at each of its sites, in the order of the layers.

    Raises:
        ValueError: a layer or a kind of site that the model does not have, a vector that is only named (`resolved` comes
            first), one whose width is not the site's or whose values the model's dtype cannot hold, positions beyond the
            prompt, or a `Patch` whose rows are not as many as its positions. The message names the spec, the limit, and the
            setting that it comes from.
    """
    sites = spec.sites_in(model)
    try:
        windows = windows_of(spec.positions, prompt_len)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    if isinstance(spec, Patch) and spec.values.ndim == 2:
        spec = _in_order(spec, windows, prompt_len)
    return [Bound(spec, site, windows) for site in sites]


def _sites_of(spec: Intervention | Capture, model: ModelInfo) -> tuple[Site, ...]:
    """The sites of `bind`, of a spec that the model can take."""
    for name in spec.names():
        raise ValueError(f"{spec.name}: {name!r} is a name, and only an LM's `vectors` know whose")
    try:
        sites = expand(spec.site, model.num_hidden_layers, model.family)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    kind = sites[0].kind
    width = model.width(kind)
    for name, tensor in spec.tensors():
        if tensor.shape[-1] != width:
            raise ValueError(
                f"{spec.name}: {name} has {tensor.shape[-1]} values; at {kind} the model has {width} "
                f"({' * '.join(model.settings(kind))})"
            )
    for name, number in _written(spec):
        if abs(number) > (limit := torch.finfo(model.dtype).max):
            raise ValueError(
                f"{spec.name}: {name} reaches {abs(number):.3g}, which {model.dtype}, the model's dtype, cannot hold; its "
                f"largest number is {limit:.3g}"
            )
    return tuple(sites)


def _written(spec: Intervention | Capture) -> Iterator[tuple[str, float]]:
    """(what, the largest of its numbers) of what comes into a state whatever the state is. Directions and probes do not."""
    match spec:
        case Steer(norm="none"):
            yield "scale * vector", spec.scale * spec.vector.abs().max().item()
        case Clamp():
            yield from ((name, bound) for name, bound in (("low", spec.low), ("high", spec.high)) if bound is not None)
        case Patch():
            yield "values", spec.values.abs().max().item()


def at_logits(bound: Bound, first: int) -> Bound:
    """A capture at the logits, in a request that has them at the positions from `first` on.

    Raises:
        ValueError: it names positions that have none.
    """
    if bound.spec.positions == "all":
        return replace(bound, windows=(Window(first),))
    if any(window.start < first for window in bound.windows):
        raise ValueError(
            f"{bound.spec.name}: positions={bound.spec.positions!r}; this request has logits where its tokens are drawn, from "
            f"position {first} on, the prompt's last: name -1, 'generated' or 'all', which means all of those. Logits of the whole "
            "prompt come with SamplingParams(prompt_logprobs=0), and in a trace of one pass (`with lm.trace(...)`)"
        )
    return bound


def _in_order(patch: Patch, windows: tuple[Window, ...], prompt_len: int) -> Patch:
    """The patch with its rows in the order of its positions."""
    sizes = [window.size for window in windows]
    count = None if None in sizes else sum(size or 0 for size in sizes)
    if count != len(patch.values):
        wanted = "positions without end, which take one [width]" if count is None else f"{count} positions"
        raise ValueError(f"{patch.name}: values has {len(patch.values)} rows for {wanted}")
    if not isinstance(patch.positions, tuple | range):
        return patch
    indexes = _absolute(patch.positions, prompt_len)
    order = sorted(range(len(indexes)), key=indexes.__getitem__)
    positions = tuple(indexes[row] for row in order)
    return replace(patch, values=patch.values[order], positions=positions)


def apply(op: Intervention, state: Tensor, ordinals: Tensor | None = None) -> Tensor:
    """What `op` makes of `state`: computed in float32 from the state as it is, rounded once to its dtype at the end.

    Each row by itself, so that its bits do not depend on its batch. Rows that the op does not touch (by their ordinal, by its
    gate), and all of them where it is the identity, keep their bits.

    Args:
        state: [rows, width], of a dtype that float32 holds.
        ordinals: [rows] of `ordinals_of`, on the state's device; -1 keeps a row out. None: row i is position i.

    Returns:
        [rows, width], of the state's dtype.
    """
    if ordinals is None:
        ordinals = torch.arange(len(state), device=state.device)
    vectors = [vector.to(state.device) for vector in vectors_of(op)]
    return act(op, state, gated(op, state, ordinals, vectors), vectors)


def vectors_of(op: Intervention) -> list[Tensor]:
    """What `op` is computed with, float32 on the CPU: its own vectors, [width] or [n, width], where it has any; then its gate's."""
    match op:
        case Steer():
            own = [op.unit if op.norm == "match" else op.vector]
        case Ablate():
            own = [op.basis]
        case Clamp():
            own = [op.unit]
        case Patch():
            own = [op.values]
        case Scale():
            own = []
    return own if op.when is None else [*own, op.when.probe]


def gated(op: Intervention, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`ordinals` [rows], -1 where the op's gate is shut. `vectors`: those of `vectors_of`, on the state's device."""
    if op.when is None:
        return ordinals
    fires = _dots(state.float(), vectors[-1])[:, 0] > op.when.threshold
    return torch.where(fires, ordinals, -1)


def act(op: Intervention, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`apply` behind the gate, to the rows whose ordinal of `gated` is not -1."""
    if op.identity:
        return state
    x = state.float()
    touched = (ordinals >= 0)[:, None]
    match op:
        case Steer(norm="match"):
            y = x + op.scale * _norms(x) * vectors[0]
        case Steer():
            y = x + op.scale * vectors[0]  # for "none" also `layers.host_edits.Added`, of several requests at once
            if op.norm == "preserve":
                norms = _norms(y)
                y = y * torch.where(norms > 0, _norms(x) / norms, 1.0)  # a state that became zero has no direction
        case Ablate():
            y = x
            for axis in vectors[0]:
                y = y - _dots(x, axis) * axis
        case Clamp():
            projection = _dots(x, vectors[0])
            wanted = projection.clamp(op.low, op.high)
            touched = touched & (wanted != projection)
            y = x + (wanted - projection) * vectors[0]
        case Scale():
            y = op.factor * x
        case Patch():
            values = vectors[0]
            y = values.expand_as(x) if values.ndim == 1 else values[ordinals.clamp(min=0)]
    return torch.where(touched, y.to(state.dtype), state)


def _dots(x: Tensor, vector: Tensor) -> Tensor:
    """[rows, width] and [width] -> [rows, 1]. Not a matrix product, whose sums depend on how many rows there are."""
    return (x * vector).sum(dim=-1, keepdim=True)


def _norms(x: Tensor) -> Tensor:
    """[rows, width] -> [rows, 1]."""
    return x.norm(dim=-1, keepdim=True)


def _unit(vector: Tensor, who: str) -> Tensor:
    length = vector.double().norm()
    if length == 0:
        raise ValueError(f"{who} is zero and has no direction")
    return (vector.double() / length).float()


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _checked_positions(positions: Positions) -> Literal["all", "prompt", "generated"] | _Indexes | slice | Generated:
    """`positions` in a form that cannot change: a list becomes a tuple, a number a tuple of one."""
    if isinstance(positions, Generated) or (isinstance(positions, str) and positions in ("all", "prompt", "generated")):
        return positions
    if isinstance(positions, slice):
        parts = (positions.start, positions.stop, positions.step)
        whole = all(part is None or _is_whole(part) for part in parts)
        if not whole or (positions.step is not None and positions.step < 1):
            raise ValueError(f"positions={positions}: a slice has whole numbers, and a step of at least 1")
        return positions
    indexes: Any = positions if isinstance(positions, range | list | tuple) else (positions,)
    if not all(_is_whole(index) for index in indexes):
        listed = hasattr(positions, "tolist")  # a tensor, or an array
        hint = "; as a list: indexes.tolist(), or mask.nonzero()[:, 0].tolist()" if listed else ""
        hint = "; the last one of the prompt is -1" if positions == "last" else hint
        raise ValueError(
            f"positions={positions!r}: expected 'all', 'prompt', 'generated', whole numbers, a range, a slice, or "
            f"Generated(...){hint}"
        )
    if not len(indexes):
        raise ValueError(f"positions={positions!r} selects nothing")
    return indexes if isinstance(indexes, range) else tuple(int(index) for index in indexes)


def _absolute(indexes: _Indexes, prompt_len: int) -> list[int]:
    """Positions from the prompt's start, each once, in the order given."""
    beyond = [index for index in indexes if not -prompt_len <= index < prompt_len]
    if beyond:
        raise ValueError(
            f"positions [{', '.join(map(str, beyond[:5]))}] are beyond the prompt, which has {prompt_len} tokens; "
            "Generated(...) means those that follow it"
        )
    absolute = [index + prompt_len if index < 0 else index for index in indexes]
    if len(set(absolute)) < len(absolute):
        twice = next(position for position in absolute if absolute.count(position) > 1)
        raise ValueError(f"position {twice} is named twice in a prompt of {prompt_len} tokens")
    return absolute


def progressions(positions: list[int]) -> tuple[Window, ...]:
    """Ascending positions as windows, long runs of equal steps in one."""
    windows, start = [], 0
    while start < len(positions):
        end = start + 1
        step = positions[end] - positions[start] if end < len(positions) else 1
        while end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        windows.append(Window(positions[start], positions[end - 1] + 1, step))
        start = end
    return tuple(windows)
