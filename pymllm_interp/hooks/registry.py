"""The registry of ops and reductions: classes by their name in JSON.

    @op
    @dataclass(frozen=True, eq=False)
    class Negate(Op):
        '''``-state``.'''

        site: Site | str

JSON, the OpenAPI schema, limits of sizes and checks are made of the classes' fields (`spec.arguments_of`). So an op is one class,
and on CUDA a branch of the kernel; a reduction is one class.
"""

from __future__ import annotations

from typing import TypeVar

from .spec import Spec, arguments_of

SpecClass = TypeVar("SpecClass", bound=type[Spec])
OPS: dict[str, type[Spec]] = {}
"""Name in JSON -> class of interventions, of the files that are imported so far; `catalogue.ops` imports all."""
REDUCTIONS: dict[str, type[Spec]] = {}
"""Name in JSON -> class of reductions, of the files that are imported so far."""


def op(cls: SpecClass) -> SpecClass:
    """Register a class of interventions."""
    return _registered(OPS, cls)


def reduction(cls: SpecClass) -> SpecClass:
    """Register a class of reductions. A string stands for one without fields: ``Capture(site, reduce="mean")``."""
    return _registered(REDUCTIONS, cls)


def json_name(cls: type[Spec]) -> str:
    """The name of a class in JSON: ``setfeature`` for `SetFeature`."""
    return cls.__name__.lower()


def is_spelled(cls: type[Spec]) -> bool:
    """Whether a string, its name, says all of a reduction: it has no fields."""
    return json_name(cls) in REDUCTIONS and not arguments_of(cls)


def _registered(known: dict[str, type[Spec]], cls: SpecClass) -> SpecClass:
    other = known.setdefault(json_name(cls), cls)
    if other is not cls:
        raise ValueError(f"{json_name(cls)!r} is the name of {other.__module__}.{other.__qualname__}: choose another")
    return cls
