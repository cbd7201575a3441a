"""The caller's frames: where warnings and errors of a trace point, and how a call differs from a ``with`` statement."""

from __future__ import annotations

import dis
import sys
import warnings
from functools import lru_cache
from types import CodeType, FrameType, TracebackType

OURS = ("nnsight.", "pymllm_interp.", "greenlet")
"""Name prefixes of modules with frames that a user does not see."""


def warn_at_caller(texts: list[str]) -> None:
    """Issue each text as a UserWarning at the line of the user's ``with``."""
    if texts:
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OURS):
            level, frame = level + 1, frame.f_back
        for text in texts:
            warnings.warn(text, UserWarning, stacklevel=level)


def block_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of a block's error, with the user's frames only."""
    traceback = getattr(error, "__intervention_tb__", error.__traceback__)
    kept = []
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if not module.startswith(OURS):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def opens_with(frame: FrameType) -> bool:
    """Whether the call that `frame` makes now is the context of a ``with`` statement: ``with lm.generate(...):``."""
    return _enters_context(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _enters_context(code: CodeType, offset: int) -> bool:
    following = [i.opname for i in dis.get_instructions(code) if i.offset > offset and i.opname != "CACHE"][:2]
    return following[:1] in (["BEFORE_WITH"], ["BEFORE_ASYNC_WITH"]) or following == ["COPY", "LOAD_SPECIAL"]
