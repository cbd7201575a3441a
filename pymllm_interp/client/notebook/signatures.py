"""Signatures that name the keywords of a call, as notebooks show them, in place of ``**options``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any, TypeVar

from ..request_options import RequestOptions

CallT = TypeVar("CallT", bound=Callable[..., Any])
OF_REQUESTS = {
    name: getattr(annotation, "__forward_arg__", annotation)
    for name, annotation in RequestOptions.__annotations__.items()
}
"""Keyword of a request -> its type."""
OF_TRACES = OF_REQUESTS | {"device": "Any", "grad": "bool | None", "on_step": "Callable[[int, int], None] | None"}
"""Keyword of a trace -> its type."""
DEFAULTS = {"priority": 0, "device": "cpu"}
"""Defaults other than None."""


def names_options(
    *without: str, options: Mapping[str, str] = OF_REQUESTS, rest: bool = False
) -> Callable[[CallT], CallT]:
    """A decorator: the signature has a keyword for each option in place of ``**options``. The function is as it was.

    Args:
        without: options that the call does not take.
        rest: keep the ``**`` argument, since the call takes further keywords.
    """

    def decorate(function: CallT) -> CallT:
        named = [name for name in options if name not in without]
        shown = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=options[name])
            for name in named
        ]
        _show(function, function, shown, rest)
        return function

    return decorate


def signature_of(call: Callable[..., Any]) -> Callable[[CallT], CallT]:
    """A decorator for a method that passes its arguments on to `call`: it has its signature, and takes further keywords."""

    def decorate(function: CallT) -> CallT:
        _show(function, call, [Parameter("sampling", Parameter.VAR_KEYWORD, annotation="Any")], rest=False)
        return function

    return decorate


def _show(function: Any, source: Callable[..., Any], more: Iterable[Parameter], rest: bool) -> None:
    found = inspect.signature(source)
    given = list(found.parameters.values())
    last = [part for part in given if part.kind is Parameter.VAR_KEYWORD]
    own = [part for part in given if part not in last]
    function.__signature__ = found.replace(parameters=[*own, *more, *(last if rest else [])])
