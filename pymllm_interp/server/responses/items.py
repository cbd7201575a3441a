"""Items of the Responses API as messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...utils.arguments import PromptError
from ...wire.strict import Strict
from ..http.body import at_most
from ..protocol import MAX_MESSAGES

Status = Literal["in_progress", "completed", "incomplete"] | None


class TextPart(Strict):
    """A part of a message: text."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = Field(None, description="of the openai client's `.parse`, without effect")


class RefusalPart(Strict):
    """A part of an assistant's message: its refusal."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Text of the refusal."""
        return self.refusal


class ImagePart(Strict):
    """A part of a message: an image."""

    type: Literal["input_image"]
    image_url: str = Field(description="a data URL, or an address that the server may fetch")
    detail: str | None = None


MessagePart = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]
Content = str | Annotated[list[MessagePart], at_most(MAX_MESSAGES)]


class MessageItem(Strict):
    """A message, of the client or of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status = None
    phase: str | None = None


class CallItem(Strict):
    """A call of a function, of an earlier response."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str
    arguments: str
    id: str | None = None
    status: Status = None
    parsed_arguments: Any = Field(None, description="of the openai client's `.parse`, without effect")


class CallOutputItem(Strict):
    """Output of a function that a client called."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Content
    id: str | None = None
    status: Status = None


class ReasoningPart(Strict):
    """A part of reasoning: text."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], at_most(MAX_MESSAGES)] | None = None
    summary: Annotated[list[ReasoningPart], at_most(MAX_MESSAGES)] = Field(default=[])
    encrypted_content: None = None
    id: str | None = None
    status: Status = None


InputItem = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
PARTS = ("input_text", "input_image", "output_text", "refusal", "reasoning_text", "summary_text")


def served_items(items: Sequence[Any]) -> list[Any]:
    """Items with their types, which messages may omit. Raises ValueError: a type that is not served, by its place and name."""
    found: list[Any] = []
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):  # errors name the first wrong item
            return [*found, item]
        kind = item.get("type", "message")
        if kind == "item_reference":
            raise ValueError(f"input.{i}: items are not kept by id: send the item, or use previous_response_id")
        if kind not in ITEMS:
            raise ValueError(f"input.{i}: items of type {str(kind)[:80]!r} are not served: {', '.join(ITEMS)} are")
        for name in ("content", "output"):
            _check_parts(f"input.{i}.{name}", item.get(name))
        found.append({"type": kind, **item})
    return found


def _check_parts(where: str, parts: Any) -> None:
    """Refuse parts by their types, up to the first one that is not an object."""
    for part in parts if isinstance(parts, list) and len(parts) <= MAX_MESSAGES else ():
        if not isinstance(part, Mapping):
            return
        kind = part.get("type")
        if kind is not None and kind not in PARTS:
            raise ValueError(
                f"{where}: parts of type {str(kind)[:80]!r} are not served: input_text and input_image are read"
            )


def item_of(item: dict[str, Any]) -> MessageItem | CallItem | ReasoningItem:
    """An item of a response's output. A model's text is not validated: a call may have any name."""
    if item["type"] == "function_call":
        return CallItem.model_construct(**item)
    (part,) = item["content"]
    if item["type"] == "reasoning":
        return ReasoningItem.model_construct(content=[ReasoningPart.model_construct(**part)])
    return MessageItem.model_construct(role="assistant", content=part["text"])


def messages_of(
    before: Sequence[dict[str, Any]], items: Iterable[MessageItem | CallItem | CallOutputItem | ReasoningItem]
) -> list[dict[str, Any]]:
    """The messages of some items. The items of one answer (reasoning, text, calls) become one message.

    Args:
        before: messages of the conversation so far.

    Raises:
        PromptError: the output of a call that there is not.
    """
    messages: list[dict[str, Any]] = []
    calls = {call["id"] for message in before for call in message.get("tool_calls", ())}
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if isinstance(item, CallOutputItem):
            if item.call_id not in calls:
                raise PromptError(
                    f"input: there is no function_call with the call_id {item.call_id[:80]!r} before its output"
                )
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, CallItem):
            calls.add(item.call_id)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if last is None:
                messages.append(last := {"role": "assistant", "content": None})
            last.setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            text = "".join(part.text for part in item.content or item.summary)
            if text:  # by both names that templates read
                messages.append({"role": "assistant", "content": None, "reasoning": text, "reasoning_content": text})
        elif item.role == "assistant" and last is not None and last["content"] is None and "tool_calls" not in last:
            last["content"] = _text(item.content)
        else:
            messages.append({"role": item.role, "content": _content(item.content)})
    return messages


def _content(content: Content) -> str | list[dict[str, Any]]:
    """The text of a message, or its parts if it has images."""
    if isinstance(content, str) or not any(isinstance(part, ImagePart) for part in content):
        return _text(content)
    return [
        part.model_dump(exclude_none=True) if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in content
    ]


def _text(content: Content) -> str:
    """The text of a message, its parts joined by newlines, as in chats.
    Raises PromptError: it has images, which only messages of users and systems have."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, ImagePart) for part in content):
        raise PromptError("input: images are parts of messages; outputs of calls and answers of the assistant are text")
    return "\n".join(part.text for part in content if not isinstance(part, ImagePart))
