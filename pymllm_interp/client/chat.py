"""Text and conversations as token ids, by the tokenizer and its chat template. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ..utils.arguments import PromptError, shown
from .images.parts import ImageSources, is_image_part, source_of

MAX_CALLS = 128
"""Most tool calls of one message."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part of a message's content -> the field with its text."""
PLACEHOLDER = 0
"""Token id at the positions of a prompt that has embeddings only, as in vLLM. Penalties do not count it."""


class RenderedPrompt(NamedTuple):
    """A prompt that is tokenized already."""

    text: str | None
    token_ids: list[int]
    embeds: Any = None
    """Vectors in place of token embeddings (`core.pass_parts.PromptEmbeds`), or None."""
    images: Any = ()
    """Images in the order of their places. They are sources (`ImageSources`), outputs of a processor (`EncodedPrompt`), or read
    (`core.image_input.ImageInput`)."""
    encoder: Any = None
    """Input of the encoder (`core.encoder_input.EncoderInput`); None in a model without one."""

    def part(self, start: int, stop: int) -> RenderedPrompt:
        """The positions from `start` to `stop`. Raises ValueError if an image is partly there."""
        embeds = None if self.embeds is None else self.embeds.part(start, stop)
        images = tuple(part for image in self.images if (part := image.part(start, stop)) is not None)
        return RenderedPrompt(None, self.token_ids[start:stop], embeds, images)


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages: dicts with a `role`."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in prompt)


def tokenized(
    tokenizer: Any, text: str, what: str, *, add_special_tokens: bool = True, **truncation: Any
) -> RenderedPrompt:
    """A text and its token ids.

    Args:
        truncation: `truncation` and `max_length` of the tokenizer.

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
    return RenderedPrompt(text, tokenizer(text, add_special_tokens=add_special_tokens, **truncation)["input_ids"])


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
    check: Callable[[str], None] | None = None,
) -> RenderedPrompt:
    """The text and the token ids of a conversation. The template writes the special tokens, so none are added to its text.

    Args:
        messages: OpenAI's messages; the template gets the result of `template_messages`.
        what: prompt name used in error messages.
        chat_template: template to use instead of the tokenizer's.
        add_generation_prompt: end at the beginning of the assistant's answer.
        continue_final_message: leave the last message open, to be continued.
        tools: tool descriptions for the template.
        chat_template_kwargs: further variables of the template.
        check: called with the text before it is tokenized; it may refuse the text.

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
    words = set(re.findall(r"\w+", str(template))) if chat_template_kwargs else set[str]()
    for name in chat_template_kwargs or ():
        if name not in words:
            raise PromptError(
                f"{what}: chat_template_kwargs names {shown(name)}, which the chat template does not mention: leave it out"
            )
    try:
        said, images = template_messages(as_system(messages, str(template)), what, str(template))
        text = tokenizer.apply_chat_template(
            said, tools=tools or None, chat_template=chat_template, tokenize=False,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )  # fmt: skip
    except (TemplateError, ValueError, TypeError, RecursionError) as error:
        raise PromptError(f"{what}: the chat template refuses this conversation: {error}") from error
    if check is not None:
        check(text)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return RenderedPrompt(text, ids, images=ImageSources(images, special=False) if images else ())


def rendered_conversations(tokenizer: Any, messages: Any, **how: Any) -> list[RenderedPrompt]:
    """The prompts of one conversation, or of each of a list. Keywords as `render`.
    Raises PromptError: neither, or an error of `render`."""
    conversations = [messages] if is_conversation(messages) else messages
    if not isinstance(conversations, list | tuple) or not all(map(is_conversation, conversations)):
        raise PromptError("messages: expected a list of {'role': ..., 'content': ...}, or a list of such lists")
    names = (
        ["the conversation"] if len(conversations) == 1 else [f"conversation {i}" for i in range(len(conversations))]
    )
    return [render(tokenizer, own, name, **how) for own, name in zip(conversations, names, strict=True)]


def as_system(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """The messages, with one system message for all developers' messages if the template knows no such role, as in vLLM.

    Templates leave out a role that they do not know. Many take a system message in the first place only, so all become one.
    """
    roles = [message.get("role") for message in messages]
    if "developer" not in roles or "'developer'" in template or '"developer"' in template:
        return messages
    found = [dict(message, role="system") if message.get("role") == "developer" else message for message in messages]
    system = [message for message in found if message.get("role") == "system"]
    contents = [message.get("content") for message in system]
    if any(isinstance(content, list | tuple) and any(map(is_image_part, content)) for content in contents):
        return found  # images keep their places
    texts = [_text(content, "a system message") for content in contents]
    others = [message for message in found if message.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def template_messages(
    messages: Sequence[Mapping[str, Any]], what: str, template: str = ""
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages as chat templates read them, and their images: text or parts as content, objects as arguments of tool calls.

    Text parts are joined by newlines, and null becomes no text, as in vLLM. Parts are for templates that write images.

    Raises:
        PromptError: content other than text and images, images where the template writes none, or a call without a function.
    """
    found, images = [], list[Any]()
    shows = re.search(r"\bimage\b", template) is not None
    lists = shows and "is string" not in template  # it reads no strings
    for index, given in enumerate(messages):
        message, name = dict(given), f"{what}: message {index}"
        content = message.get("content")
        if lists or (shows and isinstance(content, list | tuple) and any(map(is_image_part, content))):
            message["content"] = _parts(content, name, images)
        else:
            message["content"] = _text(content, name)
        calls = message.pop("tool_calls", None)
        if calls:
            if not isinstance(calls, list | tuple) or len(calls) > MAX_CALLS:
                raise PromptError(f"{name}: tool_calls: expected a list of at most {MAX_CALLS} calls")
            message["tool_calls"] = [_call(call, name) for call in calls]
        found.append(message)
    return found, images


def _parts(content: Any, name: str, images: list[Any]) -> list[dict[str, Any]]:
    """Content as parts of text and images, of which the images are added to `images`."""
    found = list[dict[str, Any]]()
    for part in [content or ""] if isinstance(content, str | None) else content:
        if isinstance(part, Mapping) and is_image_part(part):
            images.append(source_of(part, name))
            found.append({"type": "image"})
        else:
            found.append({"type": "text", "text": _text([part], name)})
    return found


def _text(content: Any, name: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise PromptError(f"{name}: the content is a {type(content).__name__}, not text")
    texts = []
    for part in content:
        field = TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get(field) if field is not None else None
        if not isinstance(text, str):
            raise PromptError(f"{name}: its content has a part that is not text; the model reads text only")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, name: str) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"{name}: tool_calls: a call has a function with its name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"{name}: tool_calls: the arguments of {function['name'][:80]!r} are not JSON: {error}"
            ) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
