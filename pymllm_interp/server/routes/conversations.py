"""Conversations of requests, as the chat template reads them."""

from __future__ import annotations

from typing import Any

from ...client.chat import render, template_messages
from ..http.state import ServerState
from ..protocol import ChatRequest
from .prompt_text import check_length


def conversation(state: ServerState, body: ChatRequest) -> Any:
    """A conversation as the chat template writes it, with its token ids."""
    given = [message.model_dump(exclude_unset=True) for message in body.messages]
    messages = template_messages(given, "the conversation")
    characters = sum(len(message["content"]) for message in messages)
    check_length(state.tokenizer, characters, state.info["limits"]["max_model_len"], "messages")
    tools = None if body.tool_choice == "none" or not body.tools else body.tools
    return render(
        state.tokenizer, messages, "the conversation",
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message, tools=tools and [tool.model_dump(exclude_unset=True) for tool in tools],
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip
