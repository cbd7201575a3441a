"""Exceptions as data, and back."""

from __future__ import annotations

import builtins
import linecache
import traceback
from dataclasses import dataclass, field
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
    traceback: str = ""
    """Lines of the block that raised; "" elsewhere."""
    bases: list[str] = field(default_factory=list)
    """Names of the builtin base classes, nearest first."""


OURS: dict[str, type[BaseException]] = {
    cls.__name__: cls
    for cls in (
        PromptError, EngineClosedError, CaptureError, EditError, GangError, TraceError, TraceTimeoutError, OutOfOrderError,
    )
}  # fmt: skip
"""Exceptions that a client gets back as what they are, beside Python's own."""


class RemoteError(RuntimeError):
    """An exception of the server, of a class that the client does not have. The message begins with the class."""


def failure_of(error: BaseException) -> Failure:
    """An exception as data. The traceback has the lines of the user's block, and nothing of the server's."""
    lines = ""
    if (found := block_traceback(error)) is not None:
        for entry in traceback.extract_tb(found):
            linecache.checkcache(entry.filename)
        lines = "".join(traceback.format_tb(found))
    bases = [cls.__name__ for cls in type(error).__mro__[1:] if cls.__module__ == "builtins"]
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return Failure(type(error).__name__, message, list(getattr(error, "__notes__", ())), lines, bases)


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
    if failure.traceback:
        error.add_note("On the server, in the block:\n" + failure.traceback.rstrip())
    return error


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
