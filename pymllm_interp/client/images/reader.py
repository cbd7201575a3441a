"""`ImageReader`: puts the images of a prompt into its token ids, with the features that the vision tower reads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig

from ...config import MAX_IMAGES, ServerConfig
from ...core.image_input import ImageInput
from ...models.weights.source import ModelSource
from ...utils.arguments import PromptError
from ...utils.extras import library_of_extra
from ..chat import RenderedPrompt, tokenized
from .encoded import sources_of
from .families import IMAGE_FAMILIES, ImageFamily
from .parts import ImageSources
from .sources import decoded, digest_of, file_of


class ImageReader:
    """Reads images for one model, on the threads of its callers.

    Args:
        config: config of the whole model, with a vision config.
        tokenizer: tokenizer of the model, or None: prompts are then token ids.
        folder: folder with preprocessor_config.json, or None.
        cache_bytes: bytes of images that are kept for later prompts.
        dtype: dtype of the vision tower. The features of images have it, for smaller copies and caches.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        tokenizer: Any,
        folder: Path | None,
        max_images: int,
        cache_bytes: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.family: ImageFamily = IMAGE_FAMILIES[config.model_type](config, tokenizer)
        self.max_images, self.cache, self._dtype = max_images, ProcessedImages(cache_bytes), dtype
        self._tokenizer, self._folder, self._loading = tokenizer, folder, Lock()

    @property
    def word(self) -> str:
        """Text of an image's place in a prompt."""
        return self.family.word

    def to_json(self) -> dict[str, Any]:
        """Description for clients."""
        return {"word": self.word, "max_images": self.max_images}

    def placed(self, prompt: RenderedPrompt, what: str) -> RenderedPrompt:
        """A prompt with its images in `images`, and all their placeholders in `token_ids`.
        Raises PromptError: an image that cannot be read, or another number of images than the prompt has places for."""
        if prompt.images and isinstance(prompt.images[0], ImageInput):
            return prompt
        given = sources_of(prompt, self.family, what)
        items = given.items
        if len(items) > self.max_images:
            raise PromptError(
                f"{what} has {len(items)} images; at most {self.max_images} (limit_mm_per_prompt={{'image': {self.max_images}}})"
            )
        if not items:
            if places := prompt.token_ids.count(self.family.placeholder):
                raise PromptError(f"{what} has {places} image tokens ({self.word}) and no image")
            return prompt
        names = [f"image {i} of {what}" for i in range(len(items))]
        images = [self._processed(item, given, name) for item, name in zip(items, names, strict=True)]
        text = prompt.text
        ids = self._of_ids(prompt.token_ids, images, what) if text is None else self._of_text(text, given, images, what)
        return prompt._replace(token_ids=ids, images=self._inputs(ids, images, what))

    # -- one image ---------------------------------------------------------------------------

    def _processed(self, source: Any, given: ImageSources, what: str) -> ProcessedImage:
        if isinstance(source, Mapping):
            return self._of_features(source, what)
        file = file_of(source, what)
        family, alone = self.family, len(given.items) == 1
        alone = alone or family.nested(None, False) == family.nested(None, True)  # most read each by itself
        return self.cache.get(
            digest_of(file) + bytes([alone]) + given.scope.encode(), lambda: self._read(file, alone, what)
        )

    def _read(self, file: Any, alone: bool, what: str) -> ProcessedImage:
        image, family = decoded(file, what), self.family
        processor = self._processor
        try:
            outputs = processor(family.nested(image, alone), return_tensors="pt", **family.options)
            known = {**family.names, **family.optional}
            features = family.split(family.checked({name: outputs[name] for name in known if name in outputs}))[0]
            tokens, text = family.tokens(features), family.text(features, outputs)
        except (ValueError, TypeError, ZeroDivisionError, OverflowError, MemoryError) as error:
            raise PromptError(
                f"{what}: the image processor refuses it ({image.width} x {image.height}): {error}"
            ) from error
        return self._kept(features, tokens, text)

    def _kept(self, features: Mapping[str, torch.Tensor], tokens: int, text: str) -> ProcessedImage:
        """An image with features in memory of their own, in the dtype of the tower."""
        dtypes = {name: self._dtype if x.is_floating_point() else x.dtype for name, x in features.items()}
        made = ImageInput.of([], {name: x.to(dtypes[name], copy=True) for name, x in features.items()})
        return ProcessedImage(dict(made.features), made.content, tokens, text)

    def _of_features(self, outputs: Mapping[str, Any], what: str) -> ProcessedImage:
        """An image that a processor has read elsewhere."""
        try:
            images = self.family.split(self.family.checked(outputs))
            tokens = sum(map(self.family.tokens, images))
            if len(images) != 1:
                raise ValueError(f"{len(images)} images in one")
        except ValueError as error:
            raise PromptError(f"{what}: these are no outputs of this model's processor: {error}") from error
        return self._kept(images[0], tokens, self.word * tokens)

    @cached_property
    def _loaded(self) -> Any:
        with library_of_extra("an image in a prompt", "PIL", "images"):
            import PIL.Image as _  # noqa: F401
        if self._folder is None:
            raise PromptError("images need the files of the model's image processor, and the model has no folder")
        try:
            return transformers.AutoImageProcessor.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise PromptError(
                f"images need the model's image processor: put its preprocessor_config.json into {self._folder} ({error})"
            ) from error

    @property
    def _processor(self) -> Any:
        with self._loading:
            return self._loaded

    # -- places ------------------------------------------------------------------------------

    def _of_text(self, text: str, given: ImageSources, images: Sequence[ProcessedImage], what: str) -> list[int]:
        parts = text.split(self.word)
        if len(parts) - 1 != len(images):
            raise PromptError(
                f"{what} has {len(images)} images, and {len(parts) - 1} places for them: its text has {self.word} for each image"
            )
        whole = "".join(chain.from_iterable(zip(parts, [*(image.text for image in images), ""], strict=True)))
        return tokenized(self._tokenizer, whole, what, add_special_tokens=given.special).token_ids

    def _of_ids(self, ids: list[int], images: Sequence[ProcessedImage], what: str) -> list[int]:
        if ids.count(self.family.placeholder) == sum(image.tokens for image in images):
            return ids
        if (places := ids.count(self.family.marker)) != len(images):
            total = sum(image.tokens for image in images)
            raise PromptError(
                f"{what} has {len(images)} images, and {places} places for them: its token ids have {self.family.marker} for each "
                f"image, or {self.family.placeholder} {total} times, once for each position of an image"
            )
        left = iter(images)
        return list(
            chain.from_iterable(
                self._expanded(next(left)) if token == self.family.marker else (token,) for token in ids
            )
        )

    def _expanded(self, image: ProcessedImage) -> list[int]:
        if self._tokenizer is None:
            return [self.family.placeholder] * image.tokens
        return self._tokenizer(image.text, add_special_tokens=False)["input_ids"]

    def _inputs(self, ids: list[int], images: Sequence[ProcessedImage], what: str) -> tuple[ImageInput, ...]:
        places = (torch.tensor(ids) == self.family.placeholder).nonzero().flatten()
        counts = [image.tokens for image in images]
        if len(places) != sum(counts):
            raise PromptError(
                f"{what} has {len(places)} image tokens ({self.word}), and its images have {sum(counts)}: it may hold no others"
            )
        owns = places.split(counts)
        if not self.family.parted and any(len(own) and int(own[-1] - own[0]) >= len(own) for own in owns):
            raise PromptError(f"{what} has other tokens between the image tokens ({self.word}) of one image")
        parts = zip(owns, images, strict=True)
        return tuple(ImageInput(own.clone(), image.features, image.content) for own, image in parts)


def max_images(config: ServerConfig) -> int:
    """Most images of a prompt."""
    return (config.limit_mm_per_prompt or {}).get("image", MAX_IMAGES)


def image_reader(source: ModelSource, tokenizer: Any, config: ServerConfig, dtype: torch.dtype) -> ImageReader | None:
    """Reader of a model's images; None for text models. Arguments: see `ImageReader`."""
    if source.hf_config.model_type not in IMAGE_FAMILIES:
        return None
    most, cached = max_images(config), int(config.mm_processor_cache_gb * 2**30)
    return ImageReader(source.hf_config, tokenizer, source.tokenizer_path or source.folder, most, cached, dtype)


class ProcessedImage(NamedTuple):
    """An image as the vision tower reads it.

    Attributes:
        features: the processor's outputs, on the CPU.
        content: digest of the features.
        tokens: number of placeholders.
        text: text that stands in place of the image's token in a prompt.
    """

    features: dict[str, torch.Tensor]
    content: bytes
    tokens: int
    text: str

    @property
    def size(self) -> int:
        """Bytes of the features."""
        return sum(tensor.nbytes for tensor in self.features.values())


class ProcessedImages:
    """A cache of images, least recently used first out.

    Args:
        max_bytes: upper bound of their features' bytes; 0: none is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.hits = self.misses = 0
        self._lock = threading.Lock()
        self._images: OrderedDict[bytes, Future[ProcessedImage]] = OrderedDict()

    def get(self, key: bytes, make: Callable[[], ProcessedImage]) -> ProcessedImage:
        """The image, which `make` reads unless it is known. Another thread's reading of it is waited for."""
        own = Future[ProcessedImage]()
        with self._lock:
            found = self._images.get(key)
            if found is not None:
                self._images.move_to_end(key)
                self.hits += 1
            else:
                self.misses += 1
                self._images[key] = own
        if found is not None:  # an error names the image of another prompt, or ends another thread
            return found.result() if found.exception() is None else make()
        try:
            image = make()
        except BaseException as error:
            with self._lock:
                self._images.pop(key, None)
            own.set_exception(error)
            raise
        with self._lock:
            if self._images.get(key) is own:
                self.num_bytes += image.size
            own.set_result(image)
            self._evict()
        return image

    def clear(self) -> None:
        """Forget all images. Requests keep their images."""
        with self._lock:
            self._images.clear()
            self.num_bytes = 0

    def _evict(self) -> None:
        for key, image in list(self._images.items()):
            if self.num_bytes <= self.max_bytes:
                return
            if image.done():
                del self._images[key]
                self.num_bytes -= image.result().size
