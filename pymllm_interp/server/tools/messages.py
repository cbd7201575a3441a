"""The assistant's messages as OpenAI's JSON, from the text of a model: reasoning, content and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from typing import Any

from .calls import HarmonyParts
from .formats import TOOL_FORMATS
from .parts import Part, TextParser, before_mark


class MessageParser:
    """One message, from its text.

    Args:
        tool_format: name of the format of its tool calls; None: they are not parsed.
        names: names of the tools.
        reasoning: name of the format of its reasoning; None: it is not split off.
        inside: the text begins inside of its reasoning.
        several: more than one call may come; others are left out.
    """

    def __init__(
        self, tool_format: str | None, names: Collection[str], reasoning: str | None, inside: bool, several: bool
    ) -> None:
        harmony = tool_format == "openai" or reasoning == "openai_gptoss"
        self._thoughts: TextParser | None = None if harmony or reasoning is None else ThinkParts(inside)
        self._calls: TextParser | None = HarmonyParts() if harmony else None
        if tool_format is not None and not harmony:
            self._calls = TOOL_FORMATS[tool_format].parser(names)
        self._several, self._short_ids = several, tool_format == "mistral"
        self.num_calls = 0

    def push(self, text: str, ended: bool) -> list[Part]:
        """The parts of more text.

        Args:
            ended: whether this is the last text.
        """
        first = [Part("content", text)] if self._thoughts is None else self._thoughts.push(text)
        if ended and self._thoughts is not None:
            first += self._thoughts.end()
        if self._calls is None:
            return first
        parts: list[Part] = []
        for part in first:
            parts += self._calls.push(part.text) if part.kind == "content" else [part]
        return parts + self._calls.end() if ended else parts

    def delta(self, text: str, ended: bool) -> dict[str, Any]:
        """The message's delta for more text, as streamed."""
        found: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for part in self.parts(text, ended):
            if part.kind == "call":
                calls.append(self._new_call(part.text))
            elif part.kind == "arguments":
                _add_arguments(calls, self.num_calls - 1, part.text)
            else:
                found[part.kind] = found.get(part.kind, "") + part.text
        return found | ({"tool_calls": calls} if calls else {})

    def parts(self, text: str, ended: bool) -> Iterator[Part]:
        """The parts of more text, without calls that may not come."""
        for part in self.push(text, ended):
            self.num_calls += part.kind == "call"
            counts = self._several or self.num_calls == 1
            if counts if part.kind in ("call", "arguments") else part.text:
                yield part

    def call_id(self) -> str:
        """The id of a new call."""
        number = uuid.uuid4().hex
        return number[:9] if self._short_ids else f"call_{number[:24]}"

    def _new_call(self, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": ""}
        return {"index": self.num_calls - 1, "id": self.call_id(), "type": "function", "function": function}

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of a text."""
        found = self.delta(text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": found.get("content")}
        if calls := found.get("tool_calls"):
            message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        elif message["content"] is None:
            message["content"] = ""
        if "reasoning" in found:
            message["reasoning"] = found["reasoning"]
        return message


def _add_arguments(calls: list[dict[str, Any]], index: int, text: str) -> None:
    if calls and calls[-1]["index"] == index:
        calls[-1]["function"]["arguments"] += text
    else:
        calls.append({"index": index, "function": {"arguments": text}})


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
