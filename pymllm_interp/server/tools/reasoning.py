"""Reasoning before an answer, between `<think>` and `</think>`."""

from __future__ import annotations

from .parts import Part, before_mark

BEGIN, END = "<think>", "</think>"


class ThinkParts:
    """Splits off the reasoning at the beginning of a text.

    Args:
        inside: the text begins inside of it: the template, or the model's habit, has opened it.
    """

    def __init__(self, inside: bool) -> None:
        self._text, self._inside = "", inside
        self._begins, self._content = True, False
        self._answered = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        if self._begins:
            found = self._text.lstrip()
            if len(found) < len(BEGIN) and BEGIN.startswith(found):
                return []
            self._begins = False
            if found.startswith(BEGIN):
                self._inside, self._text = True, found[len(BEGIN) :]
            self._content = not self._inside
            self._answered = self._content
        return self._rest()

    def _rest(self) -> list[Part]:
        parts: list[Part] = []
        if not self._content:
            before, mark, self._text = before_mark(self._text, [END])
            if before:
                parts.append(Part("reasoning", before))
            if mark is None:
                return parts
            self._content = True
        text, self._text = self._text, ""
        if not self._answered:  # white space behind the mark
            text = text.lstrip()
            self._answered = bool(text)
        return [*parts, Part("content", text)] if text else parts

    def end(self) -> list[Part]:
        text, self._text = self._text, ""
        kind = "content" if self._content or (self._begins and not self._inside) else "reasoning"
        return [Part(kind, text)] if text else []
