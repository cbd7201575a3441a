"""Outputs of transformers' processors as prompts: token ids with placeholders, and the features of their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...utils.arguments import PromptError
from ..chat import RenderedPrompt
from .families import ImageFamily
from .parts import ImageSources


class EncodedBatch:
    """The outputs of a processor for some prompts.

    Args:
        features: outputs that describe images.
        rows: token ids of each prompt, without padding.
    """

    def __init__(self, features: Mapping[str, Any], rows: Sequence[list[int]]) -> None:
        self.features, self.rows = features, rows
        self._found: tuple[ImageFamily, list[list[dict[str, torch.Tensor]]]] | None = None

    def images_of(self, family: ImageFamily) -> list[list[dict[str, torch.Tensor]]]:
        """The features of each prompt's images.
        Raises ValueError: outputs of another model's processor, or other numbers of placeholders."""
        if self._found is None or self._found[0] is not family:
            given = {name: value for name, value in self.features.items() if name != "num_crops"}
            self._found = family, family.of_rows(family.checked(given), self.rows)
        return self._found[1]


class EncodedPrompt(NamedTuple):
    """One prompt of a batch."""

    batch: EncodedBatch
    row: int


def sources_of(prompt: RenderedPrompt, family: ImageFamily, what: str) -> ImageSources:
    """Images of a prompt. Outputs of a processor become features of each image.
    Raises PromptError: outputs of another model's processor."""
    given = prompt.images
    if not isinstance(given, EncodedPrompt):
        return given or ImageSources([])
    try:
        return ImageSources(list(given.batch.images_of(family)[given.row]))
    except ValueError as error:
        raise PromptError(f"{what}: these are no outputs of this model's processor: {error}") from error
