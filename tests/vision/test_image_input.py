"""Images of a prompt: their digest, and their part of the prefix cache's key."""

from __future__ import annotations

import torch

from pymllm_interp.core.image_input import ImageInput, image_namespaces
from pymllm_interp.mem_cache.radix_cache import RadixKey


def image(first: int, count: int, seed: int = 0) -> ImageInput:
    pixels = torch.rand(count, 5, generator=torch.Generator().manual_seed(seed))
    return ImageInput.of(torch.arange(first, first + count), {"pixel_values": pixels})


def test_the_digest_is_of_names_dtypes_shapes_and_bytes() -> None:
    pixels = torch.rand(4, 6)
    near = pixels.clone()
    near[-1, -1] = torch.nextafter(near[-1, -1], torch.tensor(9.0))
    others = [
        {"pixel_values": near}, {"pixel_values": pixels.view(6, 4)}, {"pixel_values": pixels.view(torch.int32)},
        {"patches": pixels}, {"pixel_values": pixels, "image_sizes": torch.tensor([2, 2])},
    ]  # fmt: skip
    digests = [ImageInput.of([0], each).content for each in ({"pixel_values": pixels}, *others)]
    assert len(set(digests)) == len(digests)
    again = ImageInput.of([7, 9], {"pixel_values": pixels.t().contiguous().t()})
    assert again.content == digests[0] and again.within(0, 8) == (0, 1) and again.within(8, 99) == (1, 2)


def test_pages_of_images_have_their_contents_in_the_key() -> None:
    """Pages of 4: an image over pages 1 and 2, one that begins in page 2, text behind them."""
    both = [image(5, 4, 1), image(10, 3, 2)]
    found = image_namespaces(both, 4)
    one, two = (each.content for each in both)
    assert found == [(1, ((one, 0),)), (2, ((one, 3), (two, 0))), (3, ((two, 2),)), (4, None)]
    keys = {
        tuple(RadixKey([7] * 20, 4, image_namespaces(given, 4)).edge(page) for page in range(5))
        for given in ([], both, [both[0]], [image(5, 4, 3), both[1]], [image(5, 4, 1), image(10, 3, 2)])
    }
    assert len(keys) == 4
