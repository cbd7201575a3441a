"""`unlocked_cached_property`: `functools.cached_property` without a lock. `versioned_property`: computed anew after an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar, overload

from torch import Tensor

T = TypeVar("T")


class unlocked_cached_property(Generic[T]):  # used as a decorator, like `property`
    """A property that is computed once for an object. Threads that ask at the same time may each compute it.

    Up to Python 3.11 a `cached_property` has one lock for all objects. Two that need each other's values wait for each other
    forever. Threads wait while one of them hashes.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class versioned_property(Generic[T]):  # used as a decorator, like `property`
    """A property that is computed once for each `version` of its object. The version is a number that grows with every edit in
    place.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_versioned_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Self | T:
        if instance is None:
            return self
        version = instance.version  # before the value: an edit meanwhile leads to another one
        kept = instance.__dict__.get(self._key)
        if kept is None or kept[0] != version:
            kept = instance.__dict__[self._key] = version, self._compute(instance)
        return kept[1]


def version_of(tensors: Iterable[Tensor]) -> int:
    """Grows with every edit in place that torch counts (weights/model_state.py). Edits of inference tensors are not counted."""
    return sum([0 if tensor.is_inference() else tensor._version for tensor in tensors])
