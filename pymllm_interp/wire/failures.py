"""Exceptions as data, which the HTTP process passes on; `remote_errors` makes them exceptions again. Imports no torch."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ..utils.arguments import plain_text
from ..utils.caller_frames import block_traceback


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
    """An error from the engine process, as the HTTP process raises it.

    Attributes:
        failure: the exception of the engine process.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message or failure.type)
        self.failure = failure


MOST_FRAMES = 64
"""Frames of a failure at most."""
_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)
"""Folders of the server's own files."""
_ORIGIN = re.compile(r" \[[0-9a-f]{16}\]$|^\[[^\]]*:\d+\] ")
"""Suffix and prefix of file names added by the server (`Sources`) and by nnsight (for functions)."""


def failure_of(error: BaseException) -> Failure:
    """The `Failure` of an exception."""
    if isinstance(error, EngineError):
        return error.failure
    found = block_traceback(error)
    frames = [_frame(frame, line) for frame, line in traceback.walk_tb(found)]
    bases = [plain_text(cls.__name__) for cls in type(error).__mro__[1:] if cls.__module__ == "builtins"]
    message = plain_text(error.args[0] if isinstance(error, KeyError) and error.args else error)
    notes = getattr(error, "__notes__", [])
    notes = [plain_text(note) for note in (notes if isinstance(notes, list | tuple) else [notes])]
    return Failure(plain_text(type(error).__name__), message, notes, ends(frames), bases)


def _frame(frame: FrameType, line: int | None) -> tuple[str, int, str]:
    """A frame of a traceback. Of the client's own file it has the path; of the server's files, the module."""
    path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    shown = _ORIGIN.sub("", path)
    servers = path.startswith(_FOLDERS) or path == getattr(sys.modules.get(module), "__file__", None)
    if shown == path and servers:
        shown = f"<{module}>"
    return plain_text(shown), line or 1, plain_text(frame.f_code.co_name)


def ends(frames: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """The outermost and the innermost frames of a deep recursion."""
    return [*frames[: MOST_FRAMES // 2], *frames[MOST_FRAMES // 2 :][-MOST_FRAMES // 2 :]]
