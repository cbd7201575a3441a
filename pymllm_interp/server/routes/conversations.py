"""Conversations of requests, as the chat template reads them."""

from __future__ import annotations

import json
from typing import Any

from ...client.chat import render
from ...utils.arguments import PromptError
from ..http.state import ServerState
from ..protocol import ChatRequest
from .prompt_text import check_length

MAX_CALLS = 128
"""Most tool calls of one message."""


def conversation(state: ServerState, body: ChatRequest) -> Any:
    """A conversation as the chat template writes it, with its token ids."""
    messages = [_message(i, message.model_dump(exclude_unset=True)) for i, message in enumerate(body.messages)]
    characters = sum(len(message.get("content") or "") for message in messages)
    check_length(state.tokenizer, characters, state.info["limits"]["max_model_len"], "messages")
    tools = None if body.tool_choice == "none" or not body.tools else body.tools
    return render(
        state.tokenizer, messages, "the conversation",
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message, tools=tools and [tool.model_dump(exclude_unset=True) for tool in tools],
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message with its parts as one text, which is what templates read."""
    parts = message.get("content")
    if isinstance(parts, list):
        texts = []
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise PromptError(
                    f"messages.{index}: its content has a part that is no text; the model reads text alone"
                )
            texts.append(part["text"])
        message["content"] = "".join(texts)
    if parts is None:
        message["content"] = ""  # of a message with tool calls; templates would write null as "None"
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
    else:
        message["tool_calls"] = [_call(f"messages.{index}.tool_calls", call) for call in _list(calls, index)]
    return message


def _list(calls: Any, index: int) -> list[Any]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise PromptError(f"messages.{index}.tool_calls: expected a list of at most {MAX_CALLS} calls")
    return calls


def _call(where: str, call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where}: a call has a function with its name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where}: the arguments of {function['name'][:80]!r} are no JSON: {error}") from None
    return call | {"function": function | {"arguments": {} if arguments is None else arguments}}
