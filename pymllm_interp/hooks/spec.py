"""What every declared spec shares: checks, names of vectors, fingerprint, equality."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from .positions import (
    _checked_positions,
)
from .site import canonical
from .vectors import checked_vector


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

    def _set_place(self) -> None:
        try:
            self._set("site", canonical(self.site))
            self._set("positions", _checked_positions(self.positions))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


def _unit(vector: Tensor, who: str) -> Tensor:
    length = vector.double().norm()
    if length == 0:
        raise ValueError(f"{who} is zero and has no direction")
    return (vector.double() / length).float()


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
