"""Exceptions as data, and back."""

from __future__ import annotations

import builtins
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..core.arguments import PromptError
from ..core.closed import EngineClosedError
from ..hooks.captures.activations import CaptureError
from ..hooks.traces.caller_frames import block_traceback
from ..hooks.traces.errors import EditError, GangError, TraceError, TraceTimeoutError
from ..hooks.traces.nnsight_compat import OutOfOrderError


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


_CLASSES: tuple[type[BaseException], ...] = (
    PromptError, EngineClosedError, CaptureError, EditError, GangError, TraceError, TraceTimeoutError, OutOfOrderError,
)  # fmt: skip
OURS: dict[str, type[BaseException]] = {cls.__name__: cls for cls in _CLASSES}
OURS["EngineDiedError"] = EngineClosedError
"""Exceptions that a client gets back as what they are, beside Python's own."""


MOST_FRAMES = 64
"""Frames of a failure at most."""
LAST_LINE = (1 << 31) - 1
"""The largest line number that a traceback can have."""
_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)
"""Folders of the server's own files."""
_ORIGIN = re.compile(r" \[[0-9a-f]{16}\]$|^\[[^\]]*:\d+\] ")
"""What the server (`Sources`) and nnsight (for functions) add to the names of files."""


class RemoteError(RuntimeError):
    """An exception of the server, of a class that the client does not have. The message begins with the class."""


def failure_of(error: BaseException) -> Failure:
    """An exception as data."""
    found = block_traceback(error)
    frames = [_frame(frame, line) for frame, line in traceback.walk_tb(found)]
    bases = [cls.__name__ for cls in type(error).__mro__[1:] if cls.__module__ == "builtins"]
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return Failure(type(error).__name__, message, list(getattr(error, "__notes__", ())), _ends(frames), bases)


def _frame(frame: FrameType, line: int | None) -> tuple[str, int, str]:
    """A frame of a traceback. Of the client's own file it has the path; of the server's files, the module."""
    path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    shown = _ORIGIN.sub("", path)
    servers = path.startswith(_FOLDERS) or path == getattr(sys.modules.get(module), "__file__", None)
    if shown == path and servers:
        shown = f"<{module}>"
    return shown, line or 1, frame.f_code.co_name


def _ends(frames: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """The outermost and the innermost frames of a deep recursion."""
    return [*frames[: MOST_FRAMES // 2], *frames[MOST_FRAMES // 2 :][-MOST_FRAMES // 2 :]]


def exception_of(failure: Failure) -> BaseException:
    """The exception, of its own class where that is one of ours or Python's; else of its nearest builtin class."""
    cls, message = _class(failure.type), failure.message
    if cls is None:
        message = f"{failure.type}: {message}"
        named = next((name for name in failure.bases if name not in ("Exception", "BaseException", "object")), "")
        cls = _class(named) or RemoteError
    error = _made(cls, message)
    for note in failure.notes:
        error.add_note(note)
    error.__intervention_tb__ = error.__traceback__ = _traceback_of(failure.frames)  # pyright: ignore[reportAttributeAccessIssue]
    return error


def _traceback_of(frames: Sequence[tuple[str, int, str]]) -> TracebackType | None:
    """A traceback with these lines, which are most often those of the client's own files.

    Who sends them is not trusted: a line number is a number, and never a source of so many lines.
    """
    found = None
    for filename, line, name in reversed(_ends(frames)):
        line = max(1, min(int(line), LAST_LINE))
        code = compile("raise RuntimeError", str(filename).replace("\0", ""), "exec").replace(
            co_name=str(name), co_firstlineno=line
        )
        try:
            exec(code, {"__name__": "block"})
        except RuntimeError as raised:
            inner = raised.__traceback__.tb_next if raised.__traceback__ else None
            if inner is not None:
                found = TracebackType(found, inner.tb_frame, inner.tb_lasti, line)
    return found


def _class(name: str) -> Any:
    if name in OURS:
        return OURS[name]
    found = getattr(builtins, name, None)
    ok = isinstance(found, type) and issubclass(found, Exception)  # no SystemExit of a server ends its client
    return found if ok else None


def _made(cls: type[BaseException], message: str) -> BaseException:
    try:
        return cls(message)
    except TypeError:  # UnicodeDecodeError and its like take other arguments
        return RemoteError(f"{cls.__name__}: {message}")
