"""Errors of arguments: prompts that cannot be served, and unknown keywords. Warnings of names that go."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any

SHOWN = 200
"""Characters of a value in a message."""


class PromptError(ValueError):
    """A prompt, or a parameter beside it, that cannot be served."""


def check_names(who: str, given: Iterable[str], known: Sequence[str], elsewhere: Mapping[str, str]) -> None:
    """Look for a keyword that is not `known`.

    Args:
        who: is called with them, for the message.
        elsewhere: name that other projects use -> advice.

    Raises:
        TypeError: an unknown name; the message has the first.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(name[:SHOWN], [*known, *elsewhere], n=1)
            hint = f"there are {', '.join(known)}"
            if near:
                other = elsewhere.get(near[0])
                hint = other if other and near[0] == name else f"did you mean {near[0]}?{f' {other}' if other else ''}"
            raise TypeError(f"{who}() has no argument {shown(name)}: {hint}")


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Issue a DeprecationWarning for a name that works for one more version.

    Args:
        stacklevel: see `warnings.warn`; 3 is the caller of the function that calls this one.
    """
    warnings.warn(f"pymllm-interp 0.2 removes {old}: use {new}", DeprecationWarning, stacklevel)


def plain_text(value: Any, form: Callable[[Any], str] = str) -> str:
    """Text of a value of any class: UTF-8, and a plain str. If the methods of the class raise, the text says so.

    Args:
        form: str or repr.
    """
    try:
        found = form(value)
    except BaseException as error:  # also SystemExit, which would end an engine's thread
        found = f"({type(value).__name__} without a text: {type(error).__name__})"
    return str.encode(found, "utf-8", "backslashreplace").decode()


def shown(value: Any) -> str:
    """`value` as messages show it: tensors and arrays by shape and dtype, other values by repr, cut at 200 characters.

    Of a long value only the beginning is read.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__}(shape={list(value.shape)}, dtype={value.dtype})"
    if isinstance(value, list | tuple) and any(hasattr(item, "dtype") for item in value[:3]):
        rest = ", ..." if len(value) > 3 else ""
        return f"[{', '.join(map(shown, value[:3]))}{rest}]"
    text = repr(_beginning(value, [SHOWN]))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _beginning(value: Any, room: list[int]) -> Any:
    """A value with as much of its strings and containers as a message shows.

    Args:
        room: number of further containers and items to read, updated in place.
    """
    if isinstance(value, str | bytes):
        return value[: SHOWN + 1] if len(value) > SHOWN else value
    if type(value) not in (list, tuple, dict):
        return value
    items = []
    for item in value.items() if isinstance(value, dict) else value:
        room[0] -= 1
        if room[0] < 0:
            break
        items.append(_beginning(item, room))
    return type(value)(items)


def is_whole(value: object) -> bool:
    """Whether `value` is an integer, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
