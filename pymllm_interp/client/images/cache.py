"""`ProcessedImages`: images that the processor has read, by the digest of their source."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch


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
