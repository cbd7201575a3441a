"""Exceptions as data, which the HTTP process passes on; `remote_errors` makes them exceptions again. Imports no torch."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field

from ..hooks.traces.caller_frames import block_traceback


@dataclass
class Failure:
    """An exception as data."""

    type: str
    """Name of the class."""
    message: str
    notes: list[str] = field(default_factory=list)
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    """(file, line, function) of the user's code that raised, outermost first; none of the server's."""
    bases: list[str] = field(default_factory=list)
    """Names of the builtin base classes, nearest first."""

    def is_a(self, *names: str) -> bool:
        """Whether its class, or a builtin base class of it, has one of these names."""
        return not {self.type, *self.bases}.isdisjoint(names)


class EngineError(Exception):
    """What the engine process answered with, as the HTTP process raises it.

    Attributes:
        failure: the exception of the engine process.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message or failure.type)
        self.failure = failure


_ORIGIN = re.compile(r" \[[0-9a-f]{16}\]$|^\[[^\]]*:\d+\] ")
"""What the server (`Sources`) and nnsight (for functions) add to the names of files."""


def failure_of(error: BaseException) -> Failure:
    """An exception as data."""
    if isinstance(error, EngineError):
        return error.failure
    found = block_traceback(error)
    entries = traceback.extract_tb(found) if found is not None else ()
    frames = [(_ORIGIN.sub("", entry.filename), entry.lineno or 1, entry.name) for entry in entries]
    bases = [cls.__name__ for cls in type(error).__mro__[1:] if cls.__module__ == "builtins"]
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return Failure(type(error).__name__, message, list(getattr(error, "__notes__", ())), frames, bases)
