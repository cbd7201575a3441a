"""The exceptions that a server's failures are, in the client's process."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ...core.events import EngineClosedError, EngineSleepingError
from ...hooks.captures.activations import CaptureError
from ...hooks.traces.blocks.errors import EditError, GangError, TraceError, TraceTimeoutError
from ...hooks.traces.nnsight_compat import OutOfOrderError
from ...utils.arguments import PromptError
from ...wire.failures import Failure, ends

LAST_LINE = (1 << 31) - 1
"""The largest line number that a traceback can have."""
_CLASSES: tuple[type[BaseException], ...] = (
    PromptError, EngineClosedError, EngineSleepingError, CaptureError,
    EditError, GangError, TraceError, TraceTimeoutError, OutOfOrderError,
)  # fmt: skip
OURS: dict[str, type[BaseException]] = {cls.__name__: cls for cls in _CLASSES}
OURS["EngineDiedError"] = EngineClosedError
"""Exceptions, beside Python's, that a client gets back with their class."""


class RemoteError(RuntimeError):
    """An exception of the server, of a class that the client does not have. The message begins with the class."""


def exception_of(failure: Failure) -> BaseException:
    """The exception, with its class if it is this package's or Python's; else with its nearest builtin class."""
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
    """A traceback with these lines, which are mostly lines of the client's files.

    Their sender is not trusted: a line number is never expanded to a source with that many lines.
    """
    found = None
    for filename, line, name in reversed(ends(frames)):
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
