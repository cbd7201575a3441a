"""Families of vision-language models: shapes of the processor's outputs, and the text and tokens of an image in a prompt.

transformers' processors do the same. Without torchvision, which their videos need, they cannot be built.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig

from ...utils.arguments import PromptError

Features = dict[str, torch.Tensor]
MAX_SIDE = 1 << 20
"""Most pixels of a side that an output of a processor may name."""


class ImageFamily(ABC):
    """Images of one family.

    Args:
        config: config of the whole model.

    Attributes:
        placeholder: id at each position of an image.
        marker: id, and `word`: text, of an image's place in a prompt before it is expanded.
        names: outputs of the processor that the model needs -> whether they are whole numbers.
        optional: further outputs that it reads.
        options: arguments of the image processor.
        parted: whether an image's placeholders have other tokens between them.
    """

    parted: ClassVar[bool] = False
    names: ClassVar[dict[str, bool]] = {"pixel_values": False}
    optional: ClassVar[dict[str, bool]] = {}
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: PretrainedConfig, tokenizer: Any) -> None:
        self.config, self.vision = config, config.vision_config
        found = getattr(config, "image_token_id", None)
        self.placeholder: int = config.image_token_index if found is None else found
        self.marker: int = self.placeholder
        self.tokenizer = tokenizer
        self.word = self.word_of(self.placeholder)

    def word_of(self, token_id: int) -> str:
        """Text of a token; "" without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.convert_ids_to_tokens(token_id))

    @abstractmethod
    def tokens(self, features: Features) -> int:
        """Placeholders of one image. Raises ValueError for shapes that the vision tower does not take."""

    def text(self, features: Features, outputs: Mapping[str, Any]) -> str:
        """Text in place of an image's word.

        Args:
            outputs: further outputs of the image processor.
        """
        return self.word_of(self.placeholder) * self.tokens(features)

    def nested(self, image: Any, alone: bool) -> Any:
        """An image as the image processor takes it; `alone`: its prompt has no other."""
        return [[image]]

    @abstractmethod
    def split(self, outputs: Features) -> list[Features]:
        """The images of a processor's outputs. Raises ValueError for shapes that do not fit."""

    def of_rows(self, outputs: Features, rows: Sequence[Sequence[int]]) -> list[list[Features]]:
        """The images of each prompt.

        Args:
            rows: token ids of the prompts.

        Raises:
            ValueError: other numbers of placeholders than the images have.
        """
        images, found = self.split(outputs), list[list[Features]]()
        first = 0
        for row in rows:
            left, own = row.count(self.placeholder), list[Features]()
            while left > 0 and first < len(images):
                left -= self.tokens(images[first])
                own.append(images[first])
                first += 1
            if left != 0:
                raise ValueError(f"{row.count(self.placeholder)} placeholders do not fit the images")
            found.append(own)
        if first != len(images):
            raise ValueError(f"placeholders of {first} images, and {len(images)} images")
        return found

    def checked(self, outputs: Mapping[str, Any]) -> Features:
        """Outputs of a processor as tensors on the CPU.
        Raises ValueError: missing or further outputs, other dtypes, or numbers that are not finite."""
        known = {**self.names, **self.optional}
        given = {name: value for name, value in outputs.items() if value is not None}
        if given.keys() - known.keys() or self.names.keys() - given.keys():
            raise ValueError(f"expected {' and '.join(self.names)}, got {', '.join(sorted(given))[:200]}")
        found = Features()
        for name, value in given.items():
            tensor = _tensor_of(value, name)
            if known[name]:
                if tensor.is_floating_point() or tensor.is_complex():
                    raise ValueError(f"{name} is {tensor.dtype}: expected whole numbers")
                found[name] = tensor.to(torch.int64)
                continue
            if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise ValueError(f"{name} is {tensor.dtype}: expected float32, float16 or bfloat16")
            if not bool(tensor.sum(dtype=torch.float32).isfinite()):  # one read of a large tensor
                raise ValueError(f"{name} holds NaN or infinity")
            found[name] = tensor
        return found

    def _square(self, pixels: torch.Tensor, dims: int, size: int) -> int:
        """Patches of a side, of pixels [..., 3, size, size]."""
        shape = [*("..." for _ in range(dims - 3)), 3, size, size]
        if pixels.dim() != dims or list(pixels.shape[-3:]) != [3, size, size] or 0 in pixels.shape:
            raise ValueError(f"pixel_values is {list(pixels.shape)}: expected [{', '.join(map(str, shape))}]")
        return size // int(self.vision.patch_size)


class QwenImages(ImageFamily):
    """Qwen2.5-VL and Qwen3-VL: patches [patches, values] of any grid."""

    names: ClassVar = {"pixel_values": False, "image_grid_thw": True}

    def tokens(self, features: Features) -> int:
        return math.prod(features["image_grid_thw"][0].tolist()) // self.vision.spatial_merge_size**2

    def split(self, outputs: Features) -> list[Features]:
        pixels, grid, vision = outputs["pixel_values"], outputs["image_grid_thw"], self.vision
        channels = getattr(vision, "in_channels", 3)
        width, merge = channels * vision.temporal_patch_size * vision.patch_size**2, vision.spatial_merge_size
        if pixels.dim() != 2 or pixels.shape[1] != width:
            raise ValueError(f"pixel_values is {list(pixels.shape)}: expected [patches, {width}]")
        if grid.dim() != 2 or grid.shape[1] != 3:
            raise ValueError(f"image_grid_thw is {list(grid.shape)}: expected [images, 3]")
        sizes = list[int]()
        for frames, height, width in grid.tolist():
            if frames != 1 or not all(0 < side < MAX_SIDE and side % merge == 0 for side in (height, width)):
                raise ValueError(f"image_grid_thw has {[frames, height, width]}: expected 1, and multiples of {merge}")
            sizes.append(height * width)
        if sum(sizes) != len(pixels):
            raise ValueError(f"pixel_values has {len(pixels)} patches, and image_grid_thw {sum(sizes)}")
        parts = zip(pixels.split(sizes), grid.split(1), strict=True)
        return [{"pixel_values": own, "image_grid_thw": its} for own, its in parts]


class LlavaImages(ImageFamily):
    """LLaVA 1.5: one square [images, 3, size, size] each, of a CLIP or SigLIP tower."""

    def tokens(self, features: Features) -> int:
        side = self._square(features["pixel_values"], 4, int(self.vision.image_size))
        classes = int(self.vision.model_type.startswith("clip"))
        return side**2 + classes - int(self.config.vision_feature_select_strategy == "default")

    def split(self, outputs: Features) -> list[Features]:
        self.tokens(outputs)
        return [{"pixel_values": own} for own in outputs["pixel_values"].split(1)]


class OneVisionImages(ImageFamily):
    """LLaVA-OneVision: tiles [images, tiles, 3, size, size]; one tile each, where a prompt has several images."""

    names: ClassVar = {"pixel_values": False, "image_sizes": True}
    optional: ClassVar = {"batch_num_images": True}

    def tokens(self, features: Features) -> int:
        from transformers.models.llava_onevision import modeling_llava_onevision as model

        size, pixels = int(self.vision.image_size), features["pixel_values"]
        side = self._square(pixels, 5, size)
        less = int(self.config.vision_feature_select_strategy == "default")
        if int(features["batch_num_images"][0]) > 1:
            return side**2 + 1 - less
        sizes = features["image_sizes"][0].tolist()
        if not all(0 < one < MAX_SIDE for one in sizes):
            raise ValueError(f"image_sizes has {sizes}: expected height and width")
        pinpoints = self.config.image_grid_pinpoints
        if pixels.shape[1] != (tiles := model.image_size_to_num_patches(sizes, pinpoints, size)):
            raise ValueError(f"pixel_values has {pixels.shape[1]} tiles: an image of {sizes} has {tiles}")
        rows, columns = model.get_anyres_image_grid_shape(tuple(sizes), pinpoints, size)
        shown = model.unpad_image(torch.empty(1, rows * side, columns * side, device="meta"), tuple(sizes))
        height, width = shown.shape[1:]
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        if (ratio := math.sqrt(height * width / (most * side**2))) > 1.1:
            height, width = int(height // ratio), int(width // ratio)
        return side**2 + height * (width + 1) - less  # the whole image, and tiles with a newline for each row

    def nested(self, image: Any, alone: bool) -> Any:
        return [[image]] if alone else [[image, image]]

    def split(self, outputs: Features) -> list[Features]:
        pixels, sizes = outputs["pixel_values"], outputs["image_sizes"]
        if sizes.dim() != 2 or sizes.shape[1] != 2 or pixels.dim() != 5 or len(pixels) != len(sizes):
            raise ValueError(
                f"pixel_values is {list(pixels.shape)} and image_sizes {list(sizes.shape)}: expected [images, tiles, 3, side, "
                "side] and [images, 2]"
            )
        counts = outputs["batch_num_images"].tolist() if "batch_num_images" in outputs else [1] * len(sizes)
        alone = len(sizes) == len(counts) == 1  # of a prompt that may have others
        if not alone and (not all(0 < count <= len(sizes) for count in counts) or sum(counts) != len(sizes)):
            raise ValueError(f"batch_num_images has {sum(counts)} images, and image_sizes {len(sizes)}")
        found = list[Features]()
        together = counts if alone else [count for count in counts for _ in range(count)]
        for i, count in enumerate(together):
            found.append(
                {
                    "pixel_values": pixels[i : i + 1, : 1 if count > 1 else self._tiles(sizes[i].tolist())],
                    "image_sizes": sizes[i : i + 1],
                    "batch_num_images": torch.tensor([count]),
                }
            )
            self.tokens(found[-1])
        return found

    def _tiles(self, size: list[int]) -> int:
        from transformers.models.llava_onevision import modeling_llava_onevision as model

        if not all(0 < one < MAX_SIDE for one in size):
            raise ValueError(f"image_sizes has {size}: expected height and width")
        return model.image_size_to_num_patches(size, self.config.image_grid_pinpoints, int(self.vision.image_size))


class Gemma3Images(ImageFamily):
    """Gemma 3: one square [images, 3, size, size] each, between lines of their own."""

    options: ClassVar = {"do_pan_and_scan": False}

    def __init__(self, config: PretrainedConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.marker = config.boi_token_index
        self.word = self.word_of(self.marker)

    def tokens(self, features: Features) -> int:
        self._square(features["pixel_values"], 4, int(self.vision.image_size))
        return self.config.mm_tokens_per_image

    def text(self, features: Features, outputs: Mapping[str, Any]) -> str:
        soft, end = self.word_of(self.placeholder), self.word_of(self.config.eoi_token_index)
        return f"\n\n{self.word}{soft * self.tokens(features)}{end}\n\n"

    def split(self, outputs: Features) -> list[Features]:
        self.tokens(outputs)
        return [{"pixel_values": own} for own in outputs["pixel_values"].split(1)]


class TiledImages(ImageFamily):
    """SmolVLM and Idefics 3: tiles [1, tiles, 3, size, size] by rows, then the whole image. Each is behind its own token."""

    parted = True
    optional: ClassVar = {"pixel_attention_mask": True}
    options: ClassVar = {"return_row_col_info": True}
    AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"

    @property
    def tile(self) -> int:
        """Placeholders of one tile."""
        return (self.vision.image_size // self.vision.patch_size) ** 2 // self.config.scale_factor**2

    def tokens(self, features: Features) -> int:
        self._square(features["pixel_values"], 5, int(self.vision.image_size))
        return features["pixel_values"].shape[1] * self.tile

    def text(self, features: Features, outputs: Mapping[str, Any]) -> str:
        tile, rows, columns = self.word * self.tile, outputs["rows"][0][0], outputs["cols"][0][0]
        lines = [
            "".join(f"{self.AROUND}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join([*lines, "\n" if lines else "", self.AROUND, self.WHOLE, tile, self.AROUND])

    def split(self, outputs: Features) -> list[Features]:
        self.tokens(outputs)
        mask, pixels = outputs.get("pixel_attention_mask"), outputs["pixel_values"]
        if mask is not None and mask.shape != (*pixels.shape[:2], *pixels.shape[3:]):
            raise ValueError(f"pixel_attention_mask is {list(mask.shape)}, and pixel_values {list(pixels.shape)}")
        return [{name: value[i : i + 1] for name, value in outputs.items()} for i in range(len(pixels))]

    def of_rows(self, outputs: Features, rows: Sequence[Sequence[int]]) -> list[list[Features]]:
        prompts = self.split(outputs)
        if len(prompts) != len(rows):
            raise ValueError(f"pixel_values has {len(prompts)} prompts, and input_ids {len(rows)}")
        return [self._of_row(own, row) for own, row in zip(prompts, rows, strict=True)]

    def _of_row(self, features: Features, row: Sequence[int]) -> list[Features]:
        """The images of a prompt: each ends with the tile of the whole image."""
        places = [i for i, token in enumerate(row) if token == self.placeholder]
        if len(places) % self.tile or len(places) > self.tokens(features):
            raise ValueError(f"{len(places)} placeholders do not fit {features['pixel_values'].shape[1]} tiles")
        firsts = places[:: self.tile]
        whole = None if self.tokenizer is None else self.tokenizer.convert_tokens_to_ids(self.WHOLE)
        ends = [i + 1 for i, first in enumerate(firsts) if first and row[first - 1] == whole]
        ends = ends if ends and ends[-1] == len(firsts) else [len(firsts)] if firsts else []
        starts = [0, *ends[:-1]]
        return [
            {name: value[:, start:end] for name, value in features.items()}
            for start, end in zip(starts, ends, strict=True)
        ]


class PixtralImages(ImageFamily):
    """Mistral 3: pixels [images, 3, height, width] of any size. Each row of patches ends with a token of its own."""

    parted = True
    names: ClassVar = {"pixel_values": False, "image_sizes": True}
    BREAK, END = "[IMG_BREAK]", "[IMG_END]"

    @property
    def side(self) -> int:
        """Pixels of a side that merge into one token."""
        return int(self.vision.patch_size) * self.config.spatial_merge_size

    @property
    def options(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Sizes are whole numbers of tokens."""
        return {"patch_size": self.side}

    def tokens(self, features: Features) -> int:
        pixels, size = features["pixel_values"], features["image_sizes"][0].tolist()
        most = int(self.vision.image_size)
        if list(pixels.shape) != [1, 3, *size] or not all(0 < one <= most and one % self.side == 0 for one in size):
            raise ValueError(
                f"pixel_values is {list(pixels.shape)} and image_sizes {size}: expected multiples of {self.side} up to {most}"
            )
        return math.prod(size) // self.side**2

    def text(self, features: Features, outputs: Mapping[str, Any]) -> str:
        rows, columns = (features["image_sizes"][0] // self.side).tolist()
        return self.BREAK.join([self.word * columns] * rows) + self.END

    def split(self, outputs: Features) -> list[Features]:
        pixels, sizes = outputs["pixel_values"], outputs["image_sizes"]
        if sizes.dim() != 2 or sizes.shape[1] != 2 or pixels.dim() != 4 or len(pixels) != len(sizes):
            raise ValueError(
                f"pixel_values is {list(pixels.shape)} and image_sizes {list(sizes.shape)}: expected [images, 3, height, width] "
                "and [images, 2]"
            )
        found = list[Features]()
        for i, (height, width) in enumerate(sizes.tolist()):
            own = {"pixel_values": pixels[i : i + 1, :, :height, :width], "image_sizes": sizes[i : i + 1]}
            self.tokens(own)
            found.append(own)
        return found


class InternImages(ImageFamily):
    """InternVL: tiles [tiles, 3, height, width] of each image, which has one run of tokens."""

    options: ClassVar = {"crop_to_patches": True}

    @property
    def size(self) -> list[int]:
        """Height and width of a tile."""
        return list(self.vision.image_size)

    @property
    def tile(self) -> int:
        """Placeholders of one tile."""
        sides = zip(self.vision.image_size, self.vision.patch_size, strict=True)
        return int(math.prod(size // patch for size, patch in sides) * self.config.downsample_ratio**2)

    def tokens(self, features: Features) -> int:
        pixels, size = features["pixel_values"], self.size
        if pixels.dim() != 4 or list(pixels.shape[1:]) != [3, *size] or not len(pixels):
            raise ValueError(f"pixel_values is {list(pixels.shape)}: expected [tiles, 3, {size[0]}, {size[1]}]")
        return len(pixels) * self.tile

    def text(self, features: Features, outputs: Mapping[str, Any]) -> str:
        first, last = (getattr(self.tokenizer, f"{end}_image_token", None) for end in ("start", "end"))
        return f"{first or '<img>'}{self.word * self.tokens(features)}{last or '</img>'}"

    def split(self, outputs: Features) -> list[Features]:
        self.tokens(outputs)
        return [{"pixel_values": outputs["pixel_values"]}]

    def runs(self, row: Sequence[int]) -> list[int]:
        """Placeholders of each image of a prompt."""
        return [len(list(own)) for token, own in groupby(row) if token == self.placeholder]

    def of_rows(self, outputs: Features, rows: Sequence[Sequence[int]]) -> list[list[Features]]:
        runs = list(map(self.runs, rows))
        counts = [length // self.tile for own in runs for length in own]
        if any(length % self.tile for own in runs for length in own) or sum(counts) != len(outputs["pixel_values"]):
            raise ValueError(f"runs of {runs} placeholders do not fit {len(outputs['pixel_values'])} tiles")
        tiles = iter(outputs["pixel_values"].split(counts))
        return [[self.split({"pixel_values": next(tiles)})[0] for _ in own] for own in runs]


class AyaImages(InternImages):
    """Aya Vision: tiles [tiles, 3, size, size] of each image, with a token before each, and others around them."""

    parted = True
    FIRST, LAST, TILE, WHOLE = "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"

    def __init__(self, config: PretrainedConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.word = "<image>"
        if tokenizer is not None:
            self.marker = tokenizer.convert_tokens_to_ids(self.word)

    @property
    def size(self) -> list[int]:
        return [int(self.vision.image_size)] * 2

    @property
    def tile(self) -> int:
        return (int(self.vision.image_size) // (self.vision.patch_size * self.config.downsample_factor)) ** 2

    def text(self, features: Features, outputs: Mapping[str, Any]) -> str:
        own, count = self.word_of(self.placeholder) * self.tile, len(features["pixel_values"])
        tiles = [f"{self.TILE}_{i}{own}" for i in range(1, count)]
        return "".join([self.FIRST, *tiles, self.WHOLE, own, self.LAST])

    def runs(self, row: Sequence[int]) -> list[int]:
        last = None if self.tokenizer is None else self.tokenizer.convert_tokens_to_ids(self.LAST)
        counts = [0]
        for token in row:
            counts[-1] += token == self.placeholder
            if token == last:
                counts.append(0)
        return [count for count in counts if count]


IMAGE_FAMILIES: dict[str, type[ImageFamily]] = {
    "qwen2_5_vl": QwenImages, "qwen3_vl": QwenImages, "llava": LlavaImages, "llava_onevision": OneVisionImages,
    "gemma3": Gemma3Images, "smolvlm": TiledImages, "idefics3": TiledImages, "mistral3": PixtralImages, "internvl": InternImages,
    "aya_vision": AyaImages,
}  # fmt: skip
"""Model type -> its images."""


def _tensor_of(value: Any, name: str) -> torch.Tensor:
    try:
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            value = torch.stack(value)
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(f"{name} is no array of numbers ({str(error)[:200]})") from None
