"""`ByName`: values that specs may name, of one engine: vectors, SAEs, monitors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from difflib import get_close_matches
from typing import ClassVar, TypeVar

from ..utils.arguments import shown

T = TypeVar("T")
SIMILAR = 200
"""Characters of a name that similar ones are looked for by: a client's may be long."""


class ByName(MutableMapping[str, T]):
    """Values by name, in the order of the names. Names are resolved when a request is submitted.

    Attributes:
        kind: noun of the values, for messages.
        attribute: attribute of `LM`.
        example: value that is assigned.
        over_http: route or option that gives one to a server; "" without any.
    """

    kind: ClassVar[str]
    attribute: ClassVar[str]
    example: ClassVar[str]
    over_http: ClassVar[str] = ""

    def __init__(self) -> None:
        self._found: dict[str, T] = {}

    def _keep(self, name: str, value: T) -> None:
        """Store a value. Raises ValueError for an empty name."""
        self._check_name(name)
        self._found[name] = value

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"the {self.kind}'s name is a string that is not empty, not {name!r}")

    def __getitem__(self, name: str) -> T:
        """The value. Raises KeyError for an unknown name; the message lists similar ones."""
        if name not in self._found:
            how = f"lm.{self.attribute}[{shown(name)}] = {self.example} puts one there"
            how += f"; over HTTP, {self.over_http}" if self.over_http else ""
            raise KeyError(f"no {self.kind} {shown(name)}; {nearest(name, self._found)} ({how})")
        return self._found[name]

    def __delitem__(self, name: str) -> None:
        ByName.__getitem__(self, name)  # raises with the known names
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


def nearest(name: str, names: Iterable[str]) -> str:
    """Names that are similar, or the first ones, for messages."""
    if near := get_close_matches(name[:SIMILAR], names, n=3):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"there are: {listed(names) or 'none'}"


def listed(names: Iterable[str]) -> str:
    """The first names, for messages."""
    found = sorted(names)
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
