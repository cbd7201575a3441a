"""Parts of an assistant's text, and the search for marks in a text that is still growing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol


class Part(NamedTuple):
    """A piece of a message.

    "call" is the name of a new tool call, and "arguments" continues its arguments.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str


class TextParser(Protocol):
    """Splits the text of one message, as it comes. The parts do not depend on how the text is cut into pieces, joined by kind."""

    def push(self, text: str) -> list[Part]:
        """The parts that are known by now."""
        ...

    def end(self) -> list[Part]:
        """The rest, when the text has ended."""
        ...


class SteppedParser(ABC):
    """A `TextParser` that takes its text part by part."""

    def __init__(self) -> None:
        self._text = ""
        """Text that is not parsed yet."""

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Parse as much of the text as possible. Returns whether to call it again."""

    @abstractmethod
    def end(self) -> list[Part]: ...


def before_mark(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """The text before the first of the marks, the mark, and the text behind it.

    Without a mark: the text outside of any mark, None, and the rest. The rest may be the beginning of a mark.
    """
    places = [(text.find(mark), mark) for mark in marks if mark in text]
    if places:
        place, mark = min(places)
        return text[:place], mark, text[place + len(mark) :]
    for length in range(min(max(map(len, marks)) - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], None, text[-length:]
    return text, None, ""


class JsonEnd:
    """Finds the end of a JSON object or list in a text that grows."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """Take more text; the index behind the value's last character in it, or None."""
        for i, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None
