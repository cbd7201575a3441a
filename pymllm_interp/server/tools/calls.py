"""Tool calls in the texts of models, by the format that a model writes them in."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from .parts import JsonEnd, Part, SteppedParser, before_mark

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def _is_name(value: Any) -> bool:
    """Whether it is a text, without half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _name(quoted: str) -> str | None:
    """The name in a JSON string, or None."""
    try:
        name = json.loads(quoted)
    except ValueError:
        return None
    return name if _is_name(name) else None


class JsonCall:
    """One call as a JSON object with `name`, and `arguments` or `parameters`. Its arguments are passed on as they come.

    Attributes:
        raw: the text so far.
        rest: the text behind the object, once `done`.
    """

    def __init__(self) -> None:
        self.raw, self.rest = "", ""
        self.done = self.begun = self.failed = False
        self._object, self._arguments = JsonEnd(), JsonEnd()
        self._open = False  # its arguments are not complete
        self._plain = False  # its fields come in another order, or its name is not JSON

    def push(self, text: str) -> list[Part]:
        """Parse more text."""
        known = len(self.raw)
        end = self._object.find(text)
        self.raw += text if end is None else text[:end]
        parts: list[Part] = []
        new = self.raw[known:]
        if not self.begun and not self._plain and "{" in new and (head := _HEAD.match(self.raw)):
            name = _name(head[1])
            if name is None:
                self._plain = True
            else:
                self.begun = self._open = True
                parts.append(Part("call", name))
                new = self.raw[head.end() :]
        if self._open and new:
            stop = self._arguments.find(new)
            self._open = stop is None
            parts.append(Part("arguments", new[:stop]))
        if end is not None:
            self.done, self.rest = True, text[end:]
            if not self.begun:
                parts += self._whole()
        return parts

    def _whole(self) -> list[Part]:
        """The call of an object with its fields in another order, if it is a call."""
        try:
            found = json.loads(self.raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not _is_name(found.get("name")):
            self.failed = True
            return []
        arguments = found.get("arguments", found.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [Part("call", found["name"]), Part("arguments", text)]


class HermesCalls(SteppedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._called = False
        self._call: JsonCall | None = None
        self._after = False  # a call is complete, its end mark has not come

    def _step(self, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        if self._call is not None:
            parts += self._call.push(text)
            if not self._call.done:
                return False
            if self._call.failed:
                parts.append(Part("content", self.BEGIN + self._call.raw))
            self._text, self._after, self._call = self._call.rest, not self._call.failed, None
            return True
        if self._after:
            _, mark, self._text = before_mark(text, [self.END, self.BEGIN])
            if mark is not None:
                self._after = False
                self._text = self._text if mark == self.END else mark + self._text
            return mark is not None
        before, mark, self._text = before_mark(text, [self.BEGIN])
        if self._called and not before.strip():  # white space between calls
            before, self._text = ("", before + self._text) if mark is None and before else ("", self._text)
            if mark is None:
                return False
        if before:
            parts.append(Part("content", before))
        if mark is None:
            return False
        self._call, self._called = JsonCall(), True
        return True

    def end(self) -> list[Part]:
        if self._call is not None and not self._call.begun:
            return [Part("content", self.BEGIN + self._call.raw)]
        left = "" if self._called and not self._text.strip() else self._text
        return [] if self._after or not left else [Part("content", left)]


class LlamaCalls(SteppedParser):
    """`{"name": ..., "parameters": {...}}` in place of a text, several with `;` between them: Llama 3.

    Args:
        names: names of the tools. An object with another name is text.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names, self._plain = names, False
        self._call: JsonCall | None = None
        self._num_calls = 0

    def _step(self, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        if self._plain:
            parts += [Part("content", text)] if text else []
            return False
        if self._call is None:
            found = text.lstrip(" \n\t;" if self._num_calls else " \n\t").removeprefix(self.TAG).lstrip()
            if not found or self.TAG.startswith(found):
                self._text = text
                return False
            if not found.startswith("{"):
                self._text, self._plain = text, True
                return True
            self._call, self._text = JsonCall(), found
            return True
        found = self._call.push(text)
        if any(part.kind == "call" and part.text not in self._names for part in found) or self._call.failed:
            self._text, self._plain, self._call = self._call.raw + self._call.rest, True, None
            return True
        parts += found
        if not self._call.done:
            return False
        self._text, self._call, self._num_calls = self._call.rest, None, self._num_calls + 1
        return True

    def end(self) -> list[Part]:
        left = self._text if self._call is None else "" if self._call.begun else self._call.raw
        return [Part("content", left)] if left.strip(" \n\t;" if self._num_calls else "") else []


class MistralCalls(SteppedParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`: Mistral. All else is a text."""

    BEGIN, ARGS, BETWEEN = "[TOOL_CALLS]", "[ARGS]", " \n\t,"

    def __init__(self) -> None:
        super().__init__()
        self._in = ""  # "" the text, "mark" behind a mark, "list", "name", "arguments"
        self._taken, self._called = "", False  # since the mark, or the last call; whether one came since the mark
        self._call: JsonCall | None = None
        self._arguments = JsonEnd()

    def _step(self, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        if self._call is not None:
            return self._in_call(self._call, text, parts)
        return getattr(self, f"_in_{self._in or 'text'}")(text, parts)

    def _in_call(self, call: JsonCall, text: str, parts: list[Part]) -> bool:
        found = call.push(text)
        if found:
            self._taken, self._called = "", True
        parts += found
        if not call.done:
            return False
        self._call = None
        if call.failed:
            return self._is_text(call.raw + call.rest, parts)
        self._text = call.rest
        return True

    def _is_text(self, text: str, parts: list[Part]) -> bool:
        """Treat the taken text, and what follows, as text and not as a call. Returns True."""
        parts.append(Part("content", self._taken + text[:1]))
        self._in, self._taken, self._text = "", "", text[1:]
        return True

    def _in_text(self, text: str, parts: list[Part]) -> bool:
        before, mark, self._text = before_mark(text, [self.BEGIN])
        if before:
            parts.append(Part("content", before))
        if mark is not None:
            self._in, self._taken, self._called = "mark", mark, False
        return mark is not None

    def _in_mark(self, text: str, parts: list[Part]) -> bool:
        found = text.lstrip()
        self._taken += text[: len(text) - len(found)]
        if found[:1] == "[":
            self._in, self._taken, self._text = "list", self._taken + "[", found[1:]
        elif found:
            self._in, self._text = "name", found
        return bool(found)

    def _in_list(self, text: str, parts: list[Part]) -> bool:
        found = text.lstrip(self.BETWEEN)
        self._taken += text[: len(text) - len(found)]
        if not found:
            return False
        if found[0] == "{":
            self._call, self._text = JsonCall(), found
        elif found[0] == "]" and self._called:
            self._in, self._taken, self._text = "", "", found[1:]
        else:
            return self._is_text(found, parts)
        return True

    def _in_name(self, text: str, parts: list[Part]) -> bool:
        brace = text.find("{")
        if brace < 0:
            self._text = text
            return False
        name = text[:brace].partition("[CALL_ID]")[0].strip().removesuffix(self.ARGS).strip()
        if not name or name.split() != [name]:
            return self._is_text(text, parts)
        parts.append(Part("call", name))
        self._in, self._taken, self._text, self._arguments = "arguments", "", text[brace:], JsonEnd()
        return True

    def _in_arguments(self, text: str, parts: list[Part]) -> bool:
        end = self._arguments.find(text)
        if text:
            parts.append(Part("arguments", text[:end]))
        if end is None:
            return False
        self._in, self._text = "", text[end:]
        return bool(self._text)

    def end(self) -> list[Part]:
        if self._call is not None and self._call.begun:
            return []
        left = self._taken + (self._text if self._call is None else self._call.raw)
        return [Part("content", left)] if left.strip(self.BETWEEN if self._called else "") else []


class HarmonyParts(SteppedParser):
    """Channels of gpt-oss: `<|channel|>analysis<|message|>...<|end|>`, its calls (`commentary to=functions.NAME`) and `final`."""

    MESSAGE = "<|message|>"
    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    _NAME = re.compile(r"to=functions\.([^\s<]+)")

    def __init__(self) -> None:
        super().__init__()
        self._head = self._first = True
        self._kind: Any = "content"

    def _step(self, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        if self._head:
            head, message, behind = text.partition(self.MESSAGE)
            if not message:
                self._text = text
                return False
            parts += self._before_channels(head)
            self._head, self._text = False, behind
            name, channel = self._NAME.search(head), head.rpartition("<|channel|>")[2].strip()
            self._kind = "arguments" if name else "reasoning" if channel.startswith("analysis") else "content"
            if name:
                parts.append(Part("call", name[1]))
            return True
        before, mark, self._text = before_mark(text, self.ENDS)
        if before:
            parts.append(Part(self._kind, before))
        self._head = mark is not None
        return mark is not None

    def _before_channels(self, head: str) -> list[Part]:
        """The text before the first channel."""
        plain = head.partition("<|")[0] if self._first else ""
        self._first = False
        return [Part("content", plain)] if plain else []

    def end(self) -> list[Part]:
        if not self._head:
            return [Part(self._kind, self._text)] if self._text else []
        if self._NAME.search(self._text):  # a call that ended before its arguments
            return [Part("content", self._text)]
        return self._before_channels(self._text)
