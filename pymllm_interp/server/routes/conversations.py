"""Conversations of requests, as the chat template reads them."""

from __future__ import annotations

from typing import Any

from ...client.chat import render
from ..http.state import ServerState
from ..protocol import ChatRequest
from .prompt_text import check_length, num_characters


def conversation(state: ServerState, body: ChatRequest) -> Any:
    """A conversation as the chat template writes it, with its token ids."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    tools = None if body.tool_choice == "none" or not body.tools else body.tools
    tools = tools and [tool.model_dump(exclude_unset=True) for tool in tools]
    room = state.info["limits"]["max_model_len"]
    said = [list(message.values()) for message in messages]
    for name, part in (("messages", said), ("tools", tools), ("chat_template_kwargs", body.chat_template_kwargs)):
        check_length(state.tokenizer, num_characters(part), room, name)
    return render(
        state.tokenizer, messages, "the conversation",
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message, tools=tools, chat_template_kwargs=body.chat_template_kwargs,
        check=lambda text: check_length(state.tokenizer, len(text), room, "the conversation, as the chat template writes it,"),
    )  # fmt: skip
