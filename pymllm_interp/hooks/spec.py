"""Base classes of declared specs: checks, named vectors, fingerprint, equality."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from numbers import Real
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..core.model_spec import HEAD_SITES, ModelSpec
from ..utils.arguments import check_names, shown
from ..utils.cached_properties import unlocked_cached_property
from .heads import channels_of, checked_heads, heads_in, widened
from .image_words import Images, has_words
from .positions import Window, checked_positions, located
from .site import Site, bare, canonical, expand, kind_of
from .vectors.by_layer import LayerVectors
from .vectors.files import Source, checked_vector, content_hash


class _Content(NamedTuple):
    """Constructor arguments of a spec, (name, value) each."""

    arguments: list[tuple[str, Any]]
    tensors: list[tuple[str, Tensor]]
    specs: list[tuple[str, Spec]]
    followed: list[Any]
    """SAEs and lenses, which may be edited in place."""
    version: int
    """Version of the tensors when the spec was first read."""

    @classmethod
    def of(cls, spec: Spec) -> _Content:
        found = [(name, getattr(spec, name)) for name in _arguments(type(spec))]
        others = [entry for entry in found if type(entry[1]) not in _PLAIN]
        return cls(
            found,
            [(name, value) for name, value in others if isinstance(value, Tensor)],
            [(name, value) for name, value in others if isinstance(value, Spec)],
            followed := [value for _, value in others if hasattr(value, "version")],
            sum([value.version for value in followed]),
        )


class Spec:
    """An immutable dataclass, checked when it is made. Specs with equal content are equal.

    Fields are checked by their annotations: numbers, choices, parts that are specs, and tensors (`Source`). A field for a tensor
    also takes a string, the name of a vector, or vectors by layer. `filled` replaces both by tensors.
    """

    named: tuple[str, ...] = ()
    """Fields that hold a name, or vectors by layer."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise TypeError for an unknown keyword, with the closest known one."""
        known = _arguments(cls)
        if not kwargs.keys() <= set(known):
            check_names(cls.__name__, kwargs, known, _ELSEWHERE)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for check in _checks_of(type(self)):
            check(self)

    @property
    def name(self) -> str:
        """The spec's name in error messages."""
        return type(self).__name__

    @property
    def own_site(self) -> Any:
        """The site that it is about; None for a part of another spec that is about that one's."""
        return getattr(self, "site", None)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(field, tensor) of all tensors, with the tensors of nested specs at the same site. Each must have the site's width."""
        content = self._content()
        yield from content.tensors
        for name, value in content.specs:
            if value.own_site is None:
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in value.tensors())

    def names(self) -> Iterator[str | LayerVectors]:
        """Names of vectors and vectors by layer, nested specs included."""
        for name in self.named:
            yield getattr(self, name)
        for _, value in self._content().specs:
            yield from value.names()

    def filled(self, vectors: Mapping[str | LayerVectors, Tensor]) -> Self:
        """A copy with the tensors that `names` yields."""
        changes: dict[str, Any] = {name: vectors[getattr(self, name)] for name in self.named}
        for name, value in self._content().specs:
            if any(value.names()):
                changes[name] = value.filled(vectors)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]

    @property
    def is_stale(self) -> bool:
        """Whether an SAE or a lens of it was edited in place since the spec was first read. `replace(spec)` reads it anew."""
        content = self._content()
        return bool(content.followed) and content.version != sum([value.version for value in content.followed])

    @unlocked_cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, vectors included: 64 hexadecimal digits."""
        parts = [f"|{name}={value!r}" for name, value in self._hashed if name not in _LATER or value != _LATER[name]]
        return hashlib.sha256("".join([type(self).__name__, *parts]).encode()).hexdigest()

    @unlocked_cached_property
    def effect(self) -> str:
        """`fingerprint` without the place: equal for specs that do the same to a state, whatever their sites and positions."""
        return repr((type(self).__name__, [part for part in self._hashed if part[0] not in _PLACE]))

    @unlocked_cached_property
    def _hashed(self) -> tuple[tuple[str, Any], ...]:
        """`_content` with hashes in place of tensors and nested specs."""
        return tuple(
            [
                (name, value if type(value) in _PLAIN else self._hash_of(name, value))
                for name, value in self._content().arguments
            ]
        )

    def _hash_of(self, name: str, value: Any) -> Any:
        """Value that represents an argument in the fingerprint."""
        if isinstance(value, Tensor):
            return tuple(value.shape), content_hash(value).hex()
        return value.fingerprint if hasattr(value, "fingerprint") else value  # a spec, vectors by layer, an SAE

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Spec) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __getstate__(self) -> dict[str, Any]:
        """Return only fields: derived values, such as sites in a model, are made again."""
        kept = {"named", *(part.name for part in fields(self))}  # pyright: ignore[reportArgumentType]
        return {name: value for name, value in self.__dict__.items() if name in kept}

    def _content(self) -> _Content:
        """The constructor's arguments. Kept: each submission walks through them several times."""
        found: _Content | None = self.__dict__.get("_arguments")
        if found is None:
            found = self.__dict__["_arguments"] = _Content.of(self)
        return found

    def _set(self, name: str, value: Any) -> None:
        if name in _arguments(type(self)):
            self.__dict__.pop("_arguments", None)
        object.__setattr__(self, name, value)

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: {name}={shown(getattr(self, name))}; expected {expected}")

    def _schedule_hint(self, name: str) -> str:
        """Advice to replace a list of numbers, for a message."""
        return "; for one a run, make a spec for each"

    def _set_number(self, name: str, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, Tensor) and value.ndim == 0 and value.dtype is not torch.bool:
            value = value.item()
        self._check(name, is_number(value), "a number" + (self._schedule_hint(name) if _is_listed(value) else ""))
        value = float(value)
        self._check(name, abs(value) <= torch.finfo(torch.float32).max, "a finite number that float32 can hold")
        self._set(name, value)

    def _set_tensor(self, name: str, *dims: int) -> None:
        """Check a tensor with one of these numbers of dimensions. A name or vectors by layer are checked later."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            value = LayerVectors.of(value, f"{self.name}: {name}", (*dims, max(dims) + 1))
        if isinstance(value, str | LayerVectors):
            self._set("named", (*self.named, name))
        else:
            value = checked_vector(value, f"{self.name}: {name}", dims)
        self._set(name, value)

    def _set_vectors(self, name: str, dims: tuple[int, ...] = (1,), rows: bool = False, **options: bool) -> None:
        """`_set_tensor` with the metadata of a field.

        Args:
            rows: the shape is [n, width] or [n, heads, head_dim]; [width] becomes one row.
        """
        dims = ((1, 2) if isinstance(self, PlacedSpec) else (1, 2, 3)) if rows else dims
        self._set_tensor(name, *dims, **options)
        if rows and name not in self.named:
            tensor: Tensor = getattr(self, name)
            self._set(name, tensor.flatten(1) if tensor.ndim > 1 else tensor[None])

    def _unit(self, name: str) -> Tensor:
        """The vectors in a field, normalized: [..., width] float32. Raises ValueError for a zero vector."""
        vector: Tensor = getattr(self, name).double()
        length = vector.norm(dim=-1, keepdim=True)
        if (length == 0).any():
            where = f" in row {int(length.argmin())}" if vector.ndim > 1 else ""
            raise ValueError(f"{self.name}: {name} is zero{where} and has no direction")
        return (vector / length).float()


class PlacedSpec(Spec):
    """A spec with a site and positions."""

    site: Any
    positions: Any
    heads: Any = None
    missing: Any = "error"
    channels: Tensor | None = None
    """[width] bool, the channels of the heads, where `whole` made the spec for them."""
    places = ("positions",)
    """Fields that hold positions."""

    @property
    def name(self) -> str:
        """The spec's name in error messages."""
        return f"{type(self).__name__}({shown(str(self.site))})"

    def written(self) -> Iterator[tuple[str, float]]:
        """(description, largest magnitude) of the numbers written into any state; the model's dtype must hold them."""
        yield from ()

    def located(self, images: Images, prompt_len: int) -> Self:
        """The spec with numbers in place of words for a prompt's images. Cached, as `whole`: requests often share an image.
        Raises ValueError: an image that the prompt does not have."""
        words = [name for name in self.places if has_words(getattr(self, name))]
        if not words:
            return self
        found = self.__dict__.get("_located")
        if found is None or found[0] != (images, prompt_len):
            try:
                changes = {name: located(getattr(self, name), images, prompt_len, self.missing) for name in words}
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            found = (images, prompt_len), replace(self, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]
            self._set("_located", found)
        return found[1]

    def fit(self, windows: tuple[Window, ...], prompt_len: int) -> Self:
        """The spec for the windows that its positions select in a prompt.

        Raises:
            ValueError: the spec does not fit these windows.
        """
        return self

    def whole(self, model: ModelSpec) -> Self:
        """The spec for whole states of `model`: its vectors are zero at heads that it does not name. Cached, as `sites_in`.
        Raises ValueError: a head that the model does not have."""
        if self.heads is None:
            return self
        found = self.__dict__.get("_whole")
        if found is None or found[0] is not model:
            kind = self.site.partition(".")[0]
            heads, shape = heads_in(self.heads, model, kind), model.shape(kind)
            changes = dict(_widened(self, heads, shape))
            changes = {name: as_argument(value, self.site) for name, value in changes.items()}
            made = replace(self, heads=heads, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]
            made._set("channels", channels_of(heads, shape))
            found = model, made
            self._set("_whole", found)
        return found[1]

    def sites_in(self, model: ModelSpec) -> tuple[Site, ...]:
        """The spec's sites in a model, in the order of the layers. Cached, since many requests may share a spec.

        Raises:
            ValueError: an unknown layer or kind of site, an unresolved name, or a vector of another width than the site's. So is a
                number that the model's dtype cannot hold.
        """
        found = self.__dict__.get("_sites")
        if found is None or found[0] is not model:
            found = model, self._checked_sites(model)
            self._set("_sites", found)
        return found[1]

    def _checked_sites(self, model: ModelSpec) -> tuple[Site, ...]:
        for name in self.names():
            what = (
                "is a name, and only an LM's `vectors` know whose" if isinstance(name, str) else "need an LM's layers"
            )
            raise ValueError(f"{self.name}: {name!r} {what}")
        try:
            sites = expand(self.site, model.num_hidden_layers, model.family)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        kind = sites[0].kind
        width, settings = model.width(kind), " * ".join(model.settings(kind))
        if self.heads is not None:
            try:
                heads = heads_in(self.heads, model, kind)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            width, settings = len(heads) * model.head_dim, f"{len(heads)} of the heads * head_dim"
        for name, tensor in self.tensors():
            if tensor.shape[-1] != width:
                one = tensor.shape[-1] == model.head_dim and tensor.numel() == width and kind in HEAD_SITES
                hint = f"; if {list(tensor.shape)} is one state, .flatten() it" if one else ""
                raise ValueError(
                    f"{self.name}: {name} has {tensor.shape[-1]} values; at {kind} the model has {width} ({settings}){hint}"
                )
        limit = torch.finfo(model.dtype).max
        for name, number in self.written():
            if abs(number) > limit:
                raise ValueError(
                    f"{self.name}: {name} reaches {abs(number):.3g}, which {model.dtype}, the model's dtype, cannot "
                    f"hold; its largest number is {limit:.3g}"
                )
        return tuple(sites)

    def __post_init__(self) -> None:
        self._set_place()
        super().__post_init__()

    def _set_place(self) -> None:
        given = self.site
        if not isinstance(given, str | Site):
            layer = given if isinstance(given, int) and not isinstance(given, bool) else 12
            raise ValueError(
                f"{type(self).__name__}: site={shown(given)}; expected a site's name, such as 'resid_post.{layer}', or a Site"
            )
        try:
            self._set("site", canonical(self.site))
            self._set("positions", checked_positions(self.positions))
            self._set("heads", checked_heads(self.heads, kind_of(self.site)))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _set_tensor(self, name: str, *dims: int, by_position: bool = False) -> None:
        """Set a tensor like `Spec._set_tensor`, with further dimensions.

        - At sites with heads the last dimension may be two, [heads, head_dim], as captures return states.
        - At a pattern of sites a further leading dimension is the layers that it selects.
        - With `by_position` one more, behind the layers, is the positions.
        """
        value, most = getattr(self, name), max(dims)
        split = kind_of(self.site) in HEAD_SITES
        several = not re.fullmatch(r"\w+(\.-?\d+)?", bare(str(self.site)))
        if isinstance(value, str | Mapping | LayerVectors):
            return super()._set_tensor(name, *dims, *([most + 1] if by_position else []))
        largest = most + split + several + by_position
        tensor = checked_vector(value, f"{self.name}: {name}", (*dims, *range(most + 1, largest + 1)))
        if several and tensor.ndim > most + split:
            self._set(name, LayerVectors(tensor))
            self._set("named", (*self.named, name))
        else:
            self._set(name, tensor.flatten(-2) if split and tensor.ndim > most else tensor)


def as_argument(value: Any, site: str) -> Any:
    """A checked tensor in the form that a spec takes: [n, width] at sites with heads is [n, 1, width].

    Two dimensions are [heads, head_dim] there for a `Steer`.
    """
    split = kind_of(site) in HEAD_SITES
    return value.unsqueeze(1) if split and isinstance(value, Tensor) and value.ndim == 2 else value


class Argument(NamedTuple):
    """An argument of a spec's constructor."""

    name: str
    hint: Any
    """Its annotation."""
    default: Any
    """`dataclasses.MISSING` for none."""
    metadata: Mapping[str, Any]
    """Metadata of a `Source`: arguments of `Spec._set_vectors`."""
    part: type[Spec] | None
    """The class of specs that the annotation names."""


@cache
def arguments_of(cls: type) -> tuple[Argument, ...]:
    """Arguments of the constructor."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        Argument(part.name, hint := hints[part.name], part.default, part.metadata, next(_spec_classes(hint), None))
        for part in fields(cls)
        if part.init
    )


@cache
def _checks_of(cls: type) -> tuple[Callable[[Any], None], ...]:
    """Checks of a class's arguments by their annotations. Arguments of other types are checked by the class."""
    return tuple(check for argument in arguments_of(cls) if (check := _check_of(argument)) is not None)


def _check_of(argument: Argument) -> Callable[[Any], None] | None:
    name, hint, part = argument.name, argument.hint, argument.part
    if hint == Source:
        return lambda spec: spec._set_vectors(name, **argument.metadata)
    if hint in (float, float | None):
        return lambda spec: spec._set_number(name, optional=hint is not float)
    if get_origin(hint) is Literal:
        *others, last = map(repr, get_args(hint))
        known, expected = frozenset(get_args(hint)), f"{', '.join(others)} or {last}"
        return lambda spec: spec._check(
            name, isinstance(value := getattr(spec, name), str) and value in known, expected
        )
    if part is not None and is_dataclass(part):
        return lambda spec: spec._check(
            name, isinstance(getattr(spec, name), part | None), f"a {part.__name__}, or None"
        )
    return None


def _spec_classes(hint: Any) -> Iterator[type[Spec]]:
    yield from (part for part in get_args(hint) if isinstance(part, type) and issubclass(part, Spec))


@cache
def _arguments(cls: type) -> tuple[str, ...]:
    """Names of the constructor's arguments. They need no annotations that resolve."""
    return tuple(part.name for part in fields(cls) if part.init)


_PLAIN = frozenset((str, float, int, bool, type(None)))
_PLACE = ("site", "positions", "missing")
_LATER = {"heads": None, "missing": "error", "site": None, "scope": "token", "stream": False, "device": "cpu"}
"""Arguments that specs did not have at first: their defaults are not part of a fingerprint, which harvests keep."""


def _widened(spec: Spec, heads: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each field with tensors, with the fields of nested specs at the same site: widened."""
    for name, value in spec._content().tensors:
        yield name, widened(value, heads, shape)
    for name, value in spec._content().specs:
        if value.own_site is None:
            yield name, replace(value, **dict(_widened(value, heads, shape)))  # pyright: ignore[reportArgumentType]


_ELSEWHERE = {
    "layer": "the site has it: 'resid_post.12'",
    "layers": "the site has them: 'resid_post.{3..5}', or 'resid_post.*'",
    "hook_point": "here it is site, which takes TransformerLens' names, too",
    **dict.fromkeys(
        ("coeff", "coefficient", "alpha", "strength", "multiplier"), "Steer has scale, and Scale has factor"
    ),
    **dict.fromkeys(("min", "max"), "Clamp has low and high"),
}
"""Name in other libraries -> advice."""


def described(spec: Spec) -> str:
    """``Steer('resid_post.3', vector=[576] 1a2b3c4d, scale=2.0)``: arguments that have their defaults are left out."""
    parts = []
    for number, part in enumerate(field for field in fields(spec) if field.init):  # pyright: ignore[reportArgumentType]
        value = getattr(spec, part.name)
        if isinstance(value, Tensor) or part.default is MISSING or value != part.default:
            parts.append(_words(value) if number == 0 else f"{part.name}={_words(value)}")
    return f"{type(spec).__name__}({', '.join(parts)})"


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {hashlib.sha256(value.numpy().tobytes()).hexdigest()[:8]}"
    return described(value) if isinstance(value, Spec) else repr(value)


def is_number(value: object) -> bool:
    """Whether a value is a real number, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_listed(value: Any) -> bool:
    return isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) > 0
