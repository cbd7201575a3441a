"""Base classes of declared specs: checks, named vectors, fingerprint, equality."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from ..core.model_spec import ModelSpec
from .positions import Window, checked_positions
from .site import Site, canonical, expand
from .vector_files import checked_vector


class Spec:
    """An immutable dataclass, checked when it is made. Specs with equal content are equal.

    A field for a tensor also takes a string, the name of a vector. `filled` replaces names by tensors.
    """

    named: tuple[str, ...] = ()
    """Fields that hold a name."""

    @property
    def name(self) -> str:
        """The spec's name in error messages."""
        return type(self).__name__

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(field, tensor) of all tensors, nested specs included. Each must have the site's width."""
        for name, value in self._content():
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, Spec):
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in value.tensors())

    def names(self) -> Iterator[str]:
        """Names of vectors, nested specs included."""
        for name, value in self._content():
            if name in self.named:
                yield value
            elif isinstance(value, Spec):
                yield from value.names()

    def filled(self, vectors: Mapping[str, Tensor]) -> Self:
        """A copy with tensors in place of the names."""
        changes: dict[str, Any] = {name: vectors[getattr(self, name)] for name in self.named}
        for name, value in self._content():
            if isinstance(value, Spec) and any(value.names()):
                changes[name] = value.filled(vectors)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, vectors included: 64 hexadecimal digits."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for name, value in self._content():
            if isinstance(value, Tensor):
                value = (tuple(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest())
            elif isinstance(value, Spec):
                value = value.fingerprint
            digest.update(f"|{name}={value!r}".encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Spec) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def _content(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of each constructor argument."""
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
        """Check a tensor of shape [n, width]; [width] becomes one row."""
        self._set_tensor(name, 1, 2)
        if name not in self.named:
            tensor: Tensor = getattr(self, name)
            self._set(name, tensor.reshape(-1, tensor.shape[-1]))

    def _unit(self, name: str) -> Tensor:
        """The vector in a field, normalized: [width] float32. Raises ValueError for a zero vector."""
        vector: Tensor = getattr(self, name).double()
        length = vector.norm()
        if length == 0:
            raise ValueError(f"{self.name}: {name} is zero and has no direction")
        return (vector / length).float()


class PlacedSpec(Spec):
    """A spec with a site and positions."""

    site: Any
    positions: Any

    @property
    def name(self) -> str:
        """The spec's name in error messages."""
        return f"{type(self).__name__}({str(self.site)!r})"

    def written(self) -> Iterator[tuple[str, float]]:
        """(what, largest magnitude) of the numbers written into any state; the model's dtype must hold them."""
        yield from ()

    def fit(self, windows: tuple[Window, ...], prompt_len: int) -> Self:
        """The spec for the windows that its positions select in a prompt.

        Raises:
            ValueError: the spec does not fit these windows.
        """
        return self

    def sites_in(self, model: ModelSpec) -> tuple[Site, ...]:
        """The spec's sites in a model, in the order of the layers. Cached, since many requests may share a spec.

        Raises:
            ValueError: an unknown layer or kind of site, an unresolved name, a vector of another width than the site's,
                or a number that the model's dtype cannot hold.
        """
        found = self.__dict__.get("_sites")
        if found is None or found[0] is not model:
            found = model, self._checked_sites(model)
            self._set("_sites", found)
        return found[1]

    def _checked_sites(self, model: ModelSpec) -> tuple[Site, ...]:
        for name in self.names():
            raise ValueError(f"{self.name}: {name!r} is a name, and only an LM's `vectors` know whose")
        try:
            sites = expand(self.site, model.num_hidden_layers, model.family)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        kind = sites[0].kind
        width = model.width(kind)
        for name, tensor in self.tensors():
            if tensor.shape[-1] != width:
                raise ValueError(
                    f"{self.name}: {name} has {tensor.shape[-1]} values; at {kind} the model has {width} "
                    f"({' * '.join(model.settings(kind))})"
                )
        limit = torch.finfo(model.dtype).max
        for name, number in self.written():
            if abs(number) > limit:
                raise ValueError(
                    f"{self.name}: {name} reaches {abs(number):.3g}, which {model.dtype}, the model's dtype, cannot "
                    f"hold; its largest number is {limit:.3g}"
                )
        return tuple(sites)

    def _set_place(self) -> None:
        try:
            self._set("site", canonical(self.site))
            self._set("positions", checked_positions(self.positions))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
