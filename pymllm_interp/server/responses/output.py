"""The output of a response: its items, and the events of a stream that make them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..tools.parts import Part

Event = dict[str, Any]


class OutputItems:
    """Items of a response: reasoning, messages and calls of functions, in the order of the text.

    Args:
        call_id: makes the ids of calls.

    Attributes:
        items: items as OpenAI's JSON.
    """

    def __init__(self, call_id: Callable[[], str]) -> None:
        self._call_id = call_id
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    def push(self, parts: Iterable[Part], logprobs: Iterable[dict[str, Any]] = ()) -> Iterator[Event]:
        """Take more text; its events, without their numbers.

        Args:
            logprobs: log probabilities of the text's tokens.
        """
        self._logprobs += logprobs
        for part in parts:
            if part.kind == "call":
                yield from self._close("completed")
                made = {"call_id": self._call_id(), "name": part.text, "arguments": ""}
                yield from self._begin("function_call", "fc", made)
            elif part.kind == "arguments":
                self.items[-1]["arguments"] += part.text
                yield self._event("function_call_arguments.delta", delta=part.text)
            else:
                yield from self._text(part)

    def end(self, complete: bool) -> Iterator[Event]:
        """The events of the end of the text.

        Args:
            complete: whether it was not cut.
        """
        if not self.items:  # an empty text is a message
            yield from self._text(Part("content", ""))
        yield from self._close("completed" if complete else "incomplete")

    def texts(self, kind: str) -> str:
        """The texts of all items of a type, joined."""
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == kind)

    def _begin(self, kind: str, prefix: str, more: dict[str, Any]) -> Iterator[Event]:
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **more}
        self.items.append(item)
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _text(self, part: Part) -> Iterator[Event]:
        reasoning = part.kind == "reasoning"
        kind = "reasoning" if reasoning else "message"
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            if reasoning:
                more: dict[str, Any] = {"summary": [], "content": []}
                first: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            else:
                more = {"role": "assistant", "content": []}
                first = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin(kind, "rs" if reasoning else "msg", more)
            self.items[-1]["content"] = [first]
            yield self._event("content_part.added", content_index=0, part=_copied(first))
        text = self.items[-1]["content"][0]
        text["text"] += part.text
        if reasoning:
            yield self._event("reasoning_text.delta", content_index=0, delta=part.text)
        elif part.text or self._logprobs:
            found, self._logprobs = self._logprobs, []
            text["logprobs"] += found
            yield self._event("output_text.delta", content_index=0, delta=part.text, logprobs=found)

    def _close(self, status: str) -> Iterator[Event]:
        """End the item that is open."""
        if not self._open:
            return
        item, self._open = self.items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            if item["type"] == "message":
                found = part["logprobs"] = [*part["logprobs"], *self._logprobs]  # the end's have no text
                self._logprobs = []
                yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=found)
            else:
                yield self._event("reasoning_text.done", content_index=0, text=part["text"])
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **more: Any) -> Event:
        index = len(self.items) - 1
        return {"type": f"response.{kind}", "item_id": self.items[-1]["id"], "output_index": index, **more}


def _copied(part: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
