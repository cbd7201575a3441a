"""`VisionTower`: transformers' vision tower and projector of a vision-language model, for images of requests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from ...core.current_pass import inner_pass
from ...core.forward_batch import ForwardBatch, SiteOps, part_batch
from ...core.image_input import ImageError, ImageInput
from ...core.model_spec import EMBED_SITE, mlp_add, residual_site
from ...utils.upload import upload
from .packed import precomputed, use_packed_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAILURES = (RuntimeError, ValueError, TypeError, LookupError)
"""Errors of a tower over features that do not fit it, or its memory."""
DUMMY_TOKENS = 1024
"""Tokens of an image in a profile run, where images have any size."""


def without_layers(config: PretrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """transformers' model of a config, on the device, with a language model of no layers and one token. Weights are undefined."""
    from transformers import AutoModelForImageTextToText, PreTrainedModel  # which imports transformers' models
    from transformers.initialization import no_init_weights
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id, text.layer_types = 0, 1, None, []
    with torch.device(device), no_init_weights():
        found = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    for module in found.modules():
        if isinstance(module, PreTrainedModel):
            maybe_install_capturing_hooks(module)  # later on, torch's hooks are refused
    return found


class CheckpointNames:
    """Names of a checkpoint's tensors in the module tree, by transformers' table of older names.

    Args:
        model: `without_layers`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key

        renamings: Any = get_model_conversion_mapping(model)
        self._rename = partial(rename_source_key, weight_renamings=renamings, weight_converters=[])

    def __call__(self, name: str) -> str:
        return self._rename(name)[0]


class TowerOps(NamedTuple):
    """Ops and captures of one request, at the sites of the tower, `VISION_OUT` and `DEEPSTACK`. None: it has none there."""

    inside: SiteOps | None = None
    out: SiteOps | None = None
    deep: SiteOps | None = None


class VisionTower:
    """The tower and the projector.

    Args:
        model: transformers' model without its head. It shares the vision modules with the served model.
        width: width of the language model's embeddings.
        device: device of the modules.
        paths: paths of the modules, which end with a dot.

    Attributes:
        num_deepstack: layers of the language model that further states of images are added behind (Qwen3-VL).
    """

    def __init__(self, model: Any, width: int, dtype: torch.dtype, device: str, paths: tuple[str, ...]) -> None:
        self._model, self.width, self._dtype, self._device, self.paths = model, width, dtype, device, paths
        vision = model.config.vision_config
        self._packs = hasattr(vision, "spatial_merge_size")  # patches of all images are one sequence
        if self._packs:
            use_packed_parts(model.visual)
        self.num_deepstack = len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of one token."""
        return self.width * (1 + self.num_deepstack) * self._dtype.itemsize

    @torch.no_grad()
    def encode(self, images: Sequence[ImageInput], most: int) -> list[Tensor]:
        """The states [tokens, width * (1 + num_deepstack)] of each image's placeholders. Images of one shape are one call.

        Args:
            most: tokens of the images of a call, at most. A larger image is computed by itself.

        Raises:
            ImageError: features that do not fit the tower or its memory, or another number of states than placeholders.
        """
        found: dict[int, Tensor] = {}
        for group in self._groups(images, most):
            states = self._states([images[i] for i in group])
            found |= zip(group, states, strict=True)
        return [found[i] for i in range(len(images))]

    def encode_hooked(self, images: Sequence[ImageInput], ops: TowerOps, query: Any) -> list[Tensor]:
        """`encode` for one request's images, in one call with its ops and captures.

        Args:
            query: serves blocks of the request; None without any.
        """
        named: Any = [None if own is None else _RequestHooks(own) for own in ops]
        ops = TowerOps(*named)
        batch = part_batch(1, self._device, ops.inside, query)
        with inner_pass(batch):
            return self._states(images, ops, batch)

    def zeros(self, count: int) -> Tensor:
        """Zeros for `count` placeholders of an image that cannot be read."""
        return torch.zeros(count, self.width * (1 + self.num_deepstack), dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def profile_run(self, tokens: int) -> int:
        """Compute made-up images of `tokens` tokens, or of one square if that has more. Returns the tokens that they have."""
        if self._packs:
            sizes = [DUMMY_TOKENS] * (tokens // DUMMY_TOKENS) + [tokens % DUMMY_TOKENS]
            return self._num_states(self._patches([size for size in sizes if size]))
        one = self._num_states(self._squares(1))
        return self._num_states(self._squares(max(tokens // one, 1)))

    def _num_states(self, features: dict[str, Tensor]) -> int:
        inputs = self._inputs([ImageInput(torch.arange(0), features, b"")], None)
        return len(_flat(self._model.get_image_features(**inputs).pooler_output))

    def _patches(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """Features of images of these numbers of tokens, for towers that read the patches of all images as one sequence."""
        vision = self._model.config.vision_config
        merge = vision.spatial_merge_size
        width = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(sum(sizes) * merge**2, width, dtype=self._dtype),
            "image_grid_thw": torch.tensor([[1, merge, merge * size] for size in sizes]),
        }

    def _squares(self, count: int) -> dict[str, Tensor]:
        """Features of images, or tiles, of the one size that the tower reads."""
        kind, size = self._model.config.model_type, self._model.config.vision_config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.ones(count, 3, height, width, dtype=self._dtype)
        if kind in ("idefics3", "smolvlm"):
            return {"pixel_values": pixels[None]}
        sizes = torch.tensor([[height, width]] * count)
        if kind == "mistral3":
            return {"pixel_values": pixels, "image_sizes": sizes}
        if kind != "llava_onevision":
            return {"pixel_values": pixels}
        several = torch.tensor([count + 1])  # of a prompt with several
        return {"pixel_values": pixels[:, None], "image_sizes": sizes, "batch_num_images": several}

    def _groups(self, images: Sequence[ImageInput], most: int) -> list[list[int]]:
        """Indices of images that are computed together."""
        groups: list[list[int]] = []
        open_groups: dict[Any, tuple[int, list[int]]] = {}
        for i, image in enumerate(images):
            shape = None if self._packs else tuple((name, x.shape) for name, x in sorted(image.features.items()))
            size, group = open_groups.get(shape, (0, []))
            if not group or size + image.num_tokens > most:
                size, group = 0, []
                groups.append(group)
            group.append(i)
            open_groups[shape] = size + image.num_tokens, group
        return groups

    def _states(
        self, images: Sequence[ImageInput], ops: TowerOps | None = None, batch: ForwardBatch | None = None
    ) -> list[Tensor]:
        ops = ops or TowerOps()
        try:
            output = self._model.get_image_features(**self._inputs(images, batch))
        except ImageError:
            raise
        except FAILURES as error:
            shapes = {name: list(x.shape) for image in images for name, x in image.features.items()}
            raise ImageError(f"the vision tower of this model cannot read {shapes}: {error}") from error
        states = _acted(ops.out, EMBED_SITE, output.pooler_output)
        if self.num_deepstack:
            deep = enumerate(output.deepstack_features)
            states = torch.cat((states, *(_acted(ops.deep, residual_site(mlp_add(i)), own) for i, own in deep)), -1)
        counts = [image.num_tokens for image in images]
        if len(states) != sum(counts):
            raise ImageError(f"{len(images)} images have {sum(counts)} placeholders, and {len(states)} states")
        return [part.clone() for part in states.to(self._dtype).split(counts)]  # a part that is kept keeps no other

    def _inputs(self, images: Sequence[ImageInput], batch: ForwardBatch | None) -> dict[str, Any]:
        """Arguments of `get_image_features`, on the device. With hooks they are transformers' own.

        Args:
            batch: pass of hooks in the tower, which is given the images; None without.
        """
        names, count = list(images[0].features), len(images)
        plans = dict[str, Any]()
        if self._packs and batch is None:
            names.remove("image_grid_thw")
            grid = torch.cat([image.features["image_grid_thw"] for image in images])
            plans = precomputed(self._model.visual, grid) | {"image_grid_thw": grid}
        sent = [name for name, plan in plans.items() if name != "image_grid_thw" and isinstance(plan, Tensor)]
        given = [image.features[name] for name in names for image in images] + [plans[name] for name in sent]
        if self._model.config.model_type == "mistral3":  # which cuts each to its size
            given = _padded(given)
        parts = upload(self._device, *given)
        plans |= zip(sent, parts[len(given) - len(sent) :], strict=True)
        first = names.index("pixel_values") * count
        several = len({part.shape[1:] for part in parts[first : first + count]}) > 1
        dim = int(several and not self._packs)  # [1, tiles of all images of a prompt, ...]
        joined = {name: torch.cat(parts[i * count : (i + 1) * count], dim) for i, name in enumerate(names)}
        found = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in joined.items()}
        if batch is not None:
            batch.pixel_values, batch.image_grid_thw = found["pixel_values"], found.get("image_grid_thw")
        return found | plans


class _RequestHooks:
    """Ops and captures of a request in the tower. An error in one of them is named as such: the image can be read."""

    def __init__(self, ops: SiteOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def at(self, site: int, value: Tensor) -> Tensor:
        """`SiteOps.at`."""
        return self._run("an op", self._ops.at, site, value)

    def capture(self, site: int, value: Tensor) -> None:
        """`SiteOps.capture`."""
        self._run("a capture", self._ops.capture, site, value)

    def _run(self, what: str, run: Callable[[int, Tensor], Any], site: int, value: Tensor) -> Any:
        try:
            return run(site, value)
        except (*FAILURES, ArithmeticError, AttributeError, AssertionError) as error:  # they may be code of callers
            raise ImageError(f"{what} in the vision tower failed: {type(error).__name__}: {error}") from error


def _acted(ops: SiteOps | None, site: int, states: Any) -> Tensor:
    """States [tokens, width] of images behind the ops at a site."""
    states = _flat(states)
    if ops is not None:
        states = ops.at(site, states[None])[0]
        ops.capture(site, states[None])
    return states


def _padded(tensors: list[Tensor]) -> list[Tensor]:
    """Pixels [1, 3, height, width] with zeros up to the largest size. Others are left as they are."""
    sizes = [x.shape[2:] for x in tensors if x.dim() == 4]
    height, width = (max(size[i] for size in sizes) for i in range(2))
    return [pad(x, (0, width - x.shape[3], 0, height - x.shape[2])) if x.dim() == 4 else x for x in tensors]


def _flat(states: Any) -> Tensor:
    """[tokens, width] of a tensor [images, tokens, width], or of a list of [tokens, width]."""
    joined = torch.cat(tuple(states)) if isinstance(states, (list, tuple)) else states
    return joined.reshape(-1, joined.shape[-1])
