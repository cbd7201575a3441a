"""Images in the messages of a conversation, before they are decoded. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...utils.arguments import PromptError, shown

IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")
"""Types of a part with an image: OpenAI's two, transformers', and vLLM's."""
SOURCES = ("image_url", "image", "url", "path", "base64", "image_pil")
"""Fields of a part that may hold the image."""
DETAILS = (None, "auto", "high", "original")
"""Values of `detail` under which the processor's own resolution is right."""


class ImageSources(NamedTuple):
    """Images of a prompt, one for each image token of its text or ids.

    Attributes:
        items: Pillow images, uint8 arrays, paths, data URLs, or files' bytes.
        special: whether the tokenizer adds special tokens to the text.
        scope: the reader's cache shares processed images within it: a served client's.
    """

    items: list[Any]
    special: bool = True
    scope: str = ""


def is_image_part(part: Any) -> bool:
    """Whether a part of a message's content holds an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def source_of(part: Mapping[str, Any], name: str) -> Any:
    """The image of a part, as it is given.

    Args:
        name: message name used in error messages.

    Raises:
        PromptError: no image, several, or a `detail` that is not served.
    """
    found = [part[field] for field in SOURCES if part.get(field) is not None]
    detail = part.get("detail")
    if len(found) == 1 and isinstance(found[0], Mapping):  # OpenAI's {"url": ..., "detail": ...}
        detail = found[0].get("detail", detail)
        found = [found[0]["url"]] if found[0].get("url") is not None else []
    if len(found) != 1:
        raise PromptError(f"{name}: a part of type {part['type']!r} has {len(found)} images: one is expected")
    if detail not in DETAILS:
        raise PromptError(
            f"{name}: detail={shown(detail)}: images have the resolution of the model's processor: leave it out, or say 'auto'"
        )
    if part.get("base64") is not None:
        return f"data:image;base64,{found[0]}"
    return found[0]
