"""Prompts of experiments with their token ids. A server knows the ids of images, and is asked."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.positions import Positions
from ..hooks.site import Site
from ..utils.arguments import PromptError

PASS = SamplingParams(temperature=0.0, max_tokens=0)


class ReadPrompt(NamedTuple):
    """A prompt that has been read.

    Attributes:
        token_ids: its token ids, with placeholders of images.
        prompt: the prompt for `lm.generate` and `lm.trace`: these ids, or an object with its embeddings or images.
        embedded: positions with vectors in place of embeddings.
        has_images: whether it has images.
    """

    token_ids: list[int]
    prompt: Any
    embedded: frozenset[int]
    has_images: bool

    @property
    def ids_only(self) -> bool:
        """Whether its token ids are all of it."""
        return not (self.embedded or self.has_images)

    @classmethod
    def of(cls, lm: Any, prompt: Any, what: str) -> ReadPrompt:
        """Read a prompt. A server is asked for the token ids of images. Raises PromptError: a prompt that cannot be served."""
        found = lm._requests.read(prompt, what)
        ids = found.token_ids
        if found.embeds is not None:
            vectors = dict(zip(found.embeds.positions.tolist(), found.embeds.vectors, strict=True))
            return cls(ids, {"prompt_token_ids": ids, "embeds": vectors}, frozenset(vectors), False)
        if found.images and not lm.backend.in_process:
            ids = lm.generate([found], PASS)[0].prompt_token_ids
        return cls(ids, found if found.images else ids, frozenset(), bool(found.images))

    @classmethod
    def ids_of(cls, lm: Any, prompt: Any) -> list[int]:
        """Token ids of a prompt that has nothing else. Raises PromptError."""
        read = cls.of(lm, prompt, "the prompt")
        if not read.ids_only:
            raise PromptError("the prompt has token ids only: no images, and no vectors in place of embeddings")
        return read.token_ids

    def places(self, lm: Any, site: Site, positions: Positions) -> list[int]:
        """Positions that words for images select, ascending, as the engine finds them.
        Raises PromptError: an image that the prompt does not have."""
        (out,) = lm.generate([self.prompt], PASS, capture=[Capture(site, positions=positions)])
        return out.activations.positions[str(site)].tolist()
