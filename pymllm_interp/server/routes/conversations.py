"""Conversations of requests, as the chat template reads them."""

from __future__ import annotations

from typing import Any

from ...client.chat import RenderedPrompt, render
from ...client.images.parts import is_image_part
from ...utils.arguments import PromptError
from ...wire.messages import PromptImages
from ..http.state import ServerState
from ..protocol import ChatRequest
from .prompt_text import check_length, num_characters


def conversation(state: ServerState, body: ChatRequest) -> Any:
    """A conversation as the chat template writes it, with its token ids."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    tools = None if body.tool_choice == "none" or not body.tools else body.tools
    tools = tools and [tool.model_dump(exclude_unset=True) for tool in tools]
    room = state.info["limits"]["max_model_len"]
    said = [_without_images(message) for message in messages]
    for name, part in (("messages", said), ("tools", tools), ("chat_template_kwargs", body.chat_template_kwargs)):
        check_length(state.tokenizer, num_characters(part), room, name)
    return render(
        state.tokenizer, messages, "the conversation",
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message, tools=tools, chat_template_kwargs=body.chat_template_kwargs,
        check=lambda text: check_length(state.tokenizer, len(text), room, "the conversation, as the chat template writes it,"),
    )  # fmt: skip


def _without_images(message: dict[str, Any]) -> list[Any]:
    """The values of a message, without parts that hold images: those are no text."""
    content = message.get("content")
    if not isinstance(content, list):
        return list(message.values())
    kept = [part for part in content if not is_image_part(part)]
    return [kept if name == "content" else value for name, value in message.items()]


def fetched(state: ServerState, read: list[RenderedPrompt]) -> list[RenderedPrompt]:
    """Prompts with the files of their images. Blocks while they are fetched.
    Raises PromptError: the model takes text only, too many images, or an image that is not read."""
    known = state.info.get("images")
    most = 0 if known is None else known["max_images"]
    found = list[RenderedPrompt]()
    for prompt in read:
        items = prompt.images.items if prompt.images else []
        if items and known is None:
            raise PromptError(f"the conversation has images, and {state.info['architecture']} takes text only")
        if len(items) > most:
            raise PromptError(f"the conversation has {len(items)} images; at most {most} (limit_mm_per_prompt)")
        bodies = [state.media.read(item, f"image {i} of the conversation") for i, item in enumerate(items)]
        images = PromptImages(bodies, prompt.text, prompt.images.special) if bodies else ()
        found.append(prompt._replace(images=images))
    return found


def text_only(prompt: RenderedPrompt) -> RenderedPrompt:
    """A prompt without images. Raises PromptError for another one."""
    if prompt.images:
        raise PromptError("the conversation has images: this route reads text; /v1/chat/completions reads images")
    return prompt
