"""Text and conversations as token ids, by the tokenizer and its chat template. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ..utils.arguments import PromptError


class RenderedPrompt(NamedTuple):
    """A prompt that is tokenized already."""

    text: str | None
    token_ids: list[int]


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages: dicts with a `role`."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in prompt)


def tokenized(tokenizer: Any, text: str, what: str, *, add_special_tokens: bool = True) -> RenderedPrompt:
    """A text and its token ids.

    Raises:
        PromptError: no tokenizer, or a lone surrogate in the text.
    """
    if tokenizer is None:
        raise PromptError(f"{what} is text, but this model has no tokenizer: pass a list of token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what} has a lone surrogate, {text[error.start]!r}, at character {error.start}, which no tokenizer reads: "
            "prompt.encode('utf-8', 'replace').decode() replaces it"
        ) from None
    return RenderedPrompt(text, tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    what: str = "the prompt",
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> RenderedPrompt:
    """The text and the token ids of a conversation. The template writes the special tokens, so none are added to its text.

    Args:
        what: names the prompt in messages.
        chat_template: in place of the tokenizer's.
        add_generation_prompt: end where the assistant's answer begins.
        continue_final_message: leave the last message open, to be continued.
        tools: for templates that describe tools.
        chat_template_kwargs: further variables of the template.

    Raises:
        PromptError: no tokenizer, no chat template, or a conversation or arguments that the template refuses.
    """
    template = chat_template or getattr(tokenizer, "chat_template", None)
    if tokenizer is None or not template:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise PromptError(
            f"{what} is a conversation, and this model has no {missing}: pass text or token ids"
            + ("" if tokenizer is None else ", or lm.chat(messages, chat_template=...)")
        )
    if tools and "tools" not in str(template):
        raise PromptError(
            f"{what} has tools, which the model's chat template does not mention: describe them in a message"
        )
    for name in chat_template_kwargs or ():
        if not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise PromptError(
                f"{what}: chat_template_kwargs names {name!r}, which the chat template does not mention: leave it out"
            )
    for i, message in enumerate(messages):
        if not isinstance(message.get("content"), str | None) and not isinstance(message.get("content"), list):
            raise PromptError(f"{what}: the content of message {i} is a {type(message['content']).__name__}, not text")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=tools, chat_template=chat_template, tokenize=False,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )  # fmt: skip
    except (TemplateError, ValueError, TypeError, RecursionError) as error:
        raise PromptError(f"{what}: the chat template refuses this conversation: {error}") from error
    return RenderedPrompt(text, tokenizer(text, add_special_tokens=False)["input_ids"])
