"""Images of prompts for a server, which decodes and processes them: only their files are sent."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from transformers import PretrainedConfig

from ...utils.arguments import PromptError
from ..chat import RenderedPrompt
from ..images.encoded import sources_of
from ..images.families import IMAGE_FAMILIES
from ..images.parts import ImageSources
from ..images.sources import encoded, file_of


class SentImages:
    """Makes files of the images of prompts. Outputs of transformers' processors become safetensors.

    Args:
        config: config of the server's model.
    """

    def __init__(self, config: PretrainedConfig, tokenizer: Any, max_images: int) -> None:
        self.family = IMAGE_FAMILIES[config.model_type](config, tokenizer)
        self.max_images = max_images

    def placed(self, prompt: RenderedPrompt, what: str) -> RenderedPrompt:
        """A prompt with the files of its images. The server puts them into its token ids.
        Raises PromptError: too many images, or an image that cannot be read."""
        given = sources_of(prompt, self.family, what)
        if len(given.items) > self.max_images:
            raise PromptError(f"{what} has {len(given.items)} images; at most {self.max_images} (limit_mm_per_prompt)")
        bodies = [_body_of(item, f"image {i} of {what}") for i, item in enumerate(given.items)]
        return prompt._replace(images=ImageSources(bodies, given.special) if bodies else ())


def _body_of(source: Any, what: str) -> bytes:
    if isinstance(source, Mapping):
        return save({name: tensor.contiguous() for name, tensor in source.items()})
    if isinstance(source, bytes) and source[8:9] == b"{":  # safetensors, of a prompt that was read before
        return source
    return encoded(file_of(source, what), what)


def images_to_json(prompt: RenderedPrompt) -> dict[str, Any] | None:
    """The JSON of a prompt's images; None without any."""
    if not prompt.images:
        return None
    bodies = [base64.b64encode(body).decode() for body in prompt.images.items]
    return {"bodies": bodies, "text": prompt.text, "special": prompt.images.special}
