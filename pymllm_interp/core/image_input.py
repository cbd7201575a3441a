"""Images in a prompt: their places among its tokens, and the processor's features of them."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..utils.upload import flat_bytes


class ImageError(ValueError):
    """An image that the model's vision tower cannot read.

    Attributes:
        request_ids: requests with this image.
    """

    request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image of a prompt. Requests of a prompt share the object.

    Attributes:
        positions: [tokens] int64, its placeholders among the prompt's token ids, ascending; tiles may have separators between.
        features: its part of the processor's outputs: pixel_values of patches or tiles, image_grid_thw [1, 3], image_sizes,
            pixel_attention_mask; on the CPU.
        content: digest of the features. Images of equal content share KV, and the output of the vision tower (`scoped`).
    """

    positions: Tensor
    features: Mapping[str, Tensor]
    content: bytes

    @classmethod
    def of(cls, positions: Sequence[int] | Tensor, features: Mapping[str, Tensor]) -> ImageInput:
        """An image with the digest of its features."""
        found = {name: features[name].detach().contiguous() for name in sorted(features)}
        digest = hashlib.sha256()
        for name, tensor in found.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(flat_bytes(tensor).numpy().data)
        return cls(torch.as_tensor(positions, dtype=torch.int64), found, digest.digest())

    @property
    def num_tokens(self) -> int:
        """Number of placeholders."""
        return len(self.positions)

    def scoped(self, salt: str | None, owner: str | None) -> ImageInput:
        """The image with a content of its own for each cache salt and owner of a prefix cache. Without both, the image."""
        if salt is None and owner is None:
            return self
        digest = hashlib.sha256(repr((salt, owner)).encode() + self.content).digest()
        return replace(self, content=digest)

    def part(self, start: int, stop: int) -> ImageInput | None:
        """The image in a prompt's part from `start` to `stop`; None if it is elsewhere. Raises ValueError if it is partly there."""
        first, end = self.within(start, stop)
        if 0 < end - first < self.num_tokens:
            raise ValueError(f"an image has tokens on both sides of position {start if first else stop}")
        return ImageInput(self.positions - start, self.features, self.content) if first < end else None

    def num_rows(self, per_tile: int) -> int:
        """Rows in the vision tower: the patches of all tiles. Arguments: `ModelSpec.context_len` of the tower."""
        if (grid := self.features.get("image_grid_thw")) is not None:
            return int(grid.prod())
        return self.features["pixel_values"].shape[:-3].numel() * per_tile

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """First and last + 1 of its placeholders, counted in the image, among the prompt's positions from `start` to `stop`."""
        first, end = torch.searchsorted(self.positions, torch.tensor((start, stop))).tolist()
        return first, end


def image_namespaces(
    images: Sequence[ImageInput], page_size: int, edits: str | None = None
) -> list[tuple[int, Hashable]]:
    """(page, namespace from that page on), ascending (`RadixKey`): the images of each page, and their first placeholders there.

    Args:
        edits: fingerprint of the ops in the vision tower, which are part of the images; None without.
    """
    pages: dict[int, list[tuple[Hashable, int]]] = {}
    for image in images:
        content = image.content if edits is None else (image.content, edits)
        own, counts = torch.unique_consecutive(image.positions // page_size, return_counts=True)
        for page, first in zip(own.tolist(), (counts.cumsum(0) - counts).tolist(), strict=True):
            pages.setdefault(page, []).append((content, first))
    found: list[tuple[int, Hashable]] = []
    for page, contents in sorted(pages.items()):
        if found and found[-1][0] == page:
            found.pop()
        found += [(page, tuple(contents)), (page + 1, None)]
    return found


def mrope_positions(length: int, images: Sequence[ImageInput], merge: int) -> tuple[Tensor, int]:
    """Positions of a prompt for mrope (Qwen2-VL, Wang et al., 2024): time, row and column in an image.

    Args:
        length: tokens of the prompt.
        merge: patches that merge into one token along each side.

    Returns:
        [3, length] int64, and the distance of later positions from the number of tokens.
    """
    found, at, following = torch.zeros(3, length, dtype=torch.int64), 0, 0
    for image in images:
        time, height, width = (image.features["image_grid_thw"][0] // torch.tensor((1, merge, merge))).tolist()
        if time * height * width != image.num_tokens:
            continue  # the tower refuses it
        first = int(image.positions[0])
        found[:, at:first] = torch.arange(following, following := following + first - at)
        grid = torch.meshgrid(torch.arange(time), torch.arange(height), torch.arange(width), indexing="ij")
        found[:, image.positions] = torch.stack(grid).flatten(1) + following
        at, following = int(image.positions[-1]) + 1, following + max(height, width)
    found[:, at:] = torch.arange(following, following + length - at)
    return found, following - at
