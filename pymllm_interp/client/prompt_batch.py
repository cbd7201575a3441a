"""The prompts of an invoke: one, or a batch of them, as text, token ids or a tokenizer's encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from ..hooks.traces.blocks.trace import RequestTrace
from ..hooks.traces.serving.rows import Padding
from ..utils.arguments import PromptError
from .chat import RenderedPrompt

ENCODED = ("input_ids", "attention_mask", "position_ids")
"""Keys of an encoding that are read."""
UNUSED = (
    "token_type_ids",
    "mm_token_type_ids",
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflow_to_sample_mapping",
)
"""Keys of an encoding that say nothing to a causal model."""
EMBEDS = ("prompt_embeds", "embeds")
"""Keys of a prompt dict with vectors in place of token embeddings."""
MEDIA = "multi_modal_data"
"""Key of vLLM's prompt dict with images."""
FEATURES = "input_features"
"""Key of an encoding with features of audio."""
IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "batch_num_images", "num_crops")
"""Keys of an encoding that describe its images."""


class PromptBatch(NamedTuple):
    """Prompts that one block sees together.

    Attributes:
        prompts: text or token ids of each.
        padding: padding of the encoding that the prompts came from; None without padding.
    """

    prompts: list[Any]
    padding: Padding | None = None


def prompts_of(args: tuple, kwargs: Mapping[str, Any], what: str) -> tuple[PromptBatch, dict[str, Any]]:
    """(prompts, the other keywords) of an invoke; empty prompts without any.

    Raises:
        PromptError: an encoding that cannot be served as it is.
        TypeError: several inputs.
    """
    rest = dict(kwargs)
    read = (*ENCODED, *IMAGES, *UNUSED) if "pixel_values" in rest else ENCODED
    encoded = {name: rest.pop(name) for name in read if name in rest} if rest else {}
    if "labels" in rest:
        raise PromptError(f"{what} has labels: compute the loss in the block, from lm.lm_head.output")
    if (embeds := rest.pop("inputs_embeds", None)) is not None:  # transformers' name, [prompts, tokens, width]
        args = (*args, list(embeds) if isinstance(embeds, torch.Tensor) and embeds.dim() == 3 else embeds)
    if FEATURES in rest:
        args = (*args, {FEATURES: rest.pop(FEATURES)})
    if "images" in rest:  # transformers' and nnsight's name
        args = _with_images(args, rest, what)
    if not args and "input_ids" not in encoded:
        if encoded:
            raise PromptError(f"{what} has {', '.join(encoded)} and no input_ids")
        return PromptBatch([]), rest
    if len(args) > 1 or (args and "input_ids" in encoded):
        raise TypeError(f"{what}: one prompt is expected, or a list of them, got {len(args) + len(encoded)} inputs")
    prompt: Any = args[0] if args else encoded
    if args and encoded:
        prompt = {"input_ids": prompt, **encoded}
    return split(prompt, what), rest


def _with_images(args: tuple, rest: dict[str, Any], what: str) -> tuple:
    """The arguments of an invoke with its `images` in its prompts. They are one, a list, or a list for each text."""
    given = rest.pop("images")
    texts = args or tuple(rest.pop(name) for name in ("text",) if name in rest)
    if given is None:
        return texts
    if len(texts) != 1:
        raise PromptError(f"{what} has images and {len(texts)} texts: expected one text, or a list of them")
    images = list(given) if isinstance(given, list | tuple) else [given]
    if not isinstance(texts[0], list | tuple) or not texts[0] or isinstance(texts[0][0], int):
        images = list(images[0]) if len(images) == 1 and isinstance(images[0], list | tuple) else images
        return ({"prompt": texts[0], "multi_modal_data": {"image": images}},)
    if len(images) != len(texts[0]):
        raise PromptError(
            f"{what} has {len(texts[0])} texts, and images for {len(images)}: expected a list for each text"
        )
    return ([{"prompt": text, "multi_modal_data": {"image": own}} for text, own in zip(texts[0], images, strict=True)],)


def split(prompt: Any, what: str) -> PromptBatch:
    """The prompts in a list of them, a tensor [prompts, tokens] or an encoding of several."""
    if type(prompt) is str or (
        type(prompt) is list and prompt and type(prompt[0]) is int
    ):  # most are, so they are asked first
        return PromptBatch([prompt])
    if (
        isinstance(prompt, RenderedPrompt)
        or has_embeds(prompt)
        or (isinstance(prompt, Mapping) and "encoder_prompt" in prompt)
    ):
        return PromptBatch([prompt])
    if is_audio(prompt):
        features: Any = prompt.get(FEATURES)
        several = getattr(features, "ndim", 0) == 3 and len(prompt) == 1
        return PromptBatch([{FEATURES: each} for each in features] if several else [prompt])
    if isinstance(prompt, Mapping):
        inner = vllm_prompt(prompt, what)
        if inner is None:
            return _encoding(prompt, what)
        return PromptBatch([prompt if prompt.get(MEDIA) is not None else inner])
    if isinstance(prompt, torch.Tensor | np.ndarray):
        return PromptBatch(rows_of(prompt, what))
    if (
        isinstance(prompt, list | tuple)
        and prompt
        and (isinstance(prompt[0], str | list | tuple | torch.Tensor | np.ndarray) or _is_one(prompt[0]))
    ):
        if isinstance(prompt[0], torch.Tensor) and prompt[0].dim() == 0:
            return PromptBatch([[int(token) for token in prompt]])
        return PromptBatch(list(prompt))
    return PromptBatch([prompt])


def repeated(batch: PromptBatch, copies: int) -> PromptBatch:
    """Each prompt `copies` times, one after the other. Raises PromptError: no whole number above 0."""
    if not isinstance(copies, int) or copies < 1:
        raise PromptError(f"num_return_sequences={copies!r}: a whole number above 0 is expected")
    prompts, padding = batch
    if padding is not None:
        padding = Padding(tuple(left for left in padding.left for _ in range(copies)), padding.width)
    return PromptBatch([prompt for prompt in prompts for _ in range(copies)], padding)


def pad_together(traces: Sequence[RequestTrace], lengths: Mapping[str, int]) -> None:
    """Pad prompts of traces that request it to the longest prompt of the ``with`` block, on the left."""
    padded = [trace for trace in traces if trace.padded]
    for trace in padded:
        trace.padding = trace.padding or Padding.on_the_left([lengths[rid] for rid in trace.request_ids])
    width = max((trace.padding.width for trace in padded if trace.padding), default=0)
    for trace in padded:
        if trace.padding is not None:
            trace.padding = trace.padding.widened(width)


def vllm_prompt(prompt: Any, what: str) -> Any:
    """Contents of vLLM's prompt dicts, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; None for other prompts.
    Raises PromptError: the dict has other keys than these and `multi_modal_data`."""
    if not isinstance(prompt, Mapping) or not {"prompt", "prompt_token_ids"} & prompt.keys():
        return None
    unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", MEDIA) and prompt[key] is not None]
    if unknown:
        raise PromptError(f"{what} has {', '.join(map(repr, unknown))}, which is not supported: leave it out")
    return prompt.get("prompt_token_ids", prompt.get("prompt"))


def images_in(prompt: Any, what: str) -> list[Any]:
    """Images of vLLM's prompt dict, ``{"multi_modal_data": {"image": [...]}}``; none of other prompts.
    Raises PromptError: media other than images."""
    media = prompt.get(MEDIA) if isinstance(prompt, Mapping) else None
    if media is None:
        return []
    if not isinstance(media, Mapping) or media.keys() - {"image"}:
        others = ", ".join(map(repr, media)) if isinstance(media, Mapping) else type(media).__name__
        raise PromptError(f"{what}: {MEDIA} has {others[:200]}: expected {{'image': [...]}}")
    given = media.get("image")
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def has_embeds(prompt: Any) -> bool:
    """Whether a prompt has vectors in place of token embeddings: a dict, or an array [tokens, width] of real numbers."""
    if isinstance(prompt, Mapping):
        return any(prompt.get(key) is not None for key in EMBEDS)
    if isinstance(prompt, torch.Tensor):
        return prompt.is_floating_point() and prompt.ndim > 1
    return isinstance(prompt, np.ndarray) and prompt.dtype.kind == "f" and prompt.ndim > 1


def _is_one(prompt: Any) -> bool:
    """Whether it is one prompt: a dict with images, embeddings or an encoder's side, or an array of embeddings."""
    return has_embeds(prompt) or (
        isinstance(prompt, Mapping)
        and ("encoder_prompt" in prompt or prompt.get(MEDIA) is not None or FEATURES in prompt)
    )


def is_audio(prompt: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a prompt is a dict with audio: vLLM's, or the output of transformers' processor."""
    if not isinstance(prompt, Mapping):
        return False
    media = prompt.get(MEDIA)
    return FEATURES in prompt or (isinstance(media, Mapping) and "audio" in media)


def rows_of(ids: Any, what: str) -> list[list[int]]:
    """Token ids of each row of a list, or of a tensor or array [tokens] or [prompts, tokens].
    Raises PromptError: values that are not integers."""
    if type(ids) is list and set(map(type, ids)) == {int}:
        return [list(ids)]
    given = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else ids
    rows = list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else None
    if rows is not None and not (rows and isinstance(rows[0], list | tuple | torch.Tensor | np.ndarray)):
        rows = [rows]
    if rows is not None:
        rows = [row.tolist() if isinstance(row, torch.Tensor | np.ndarray) else list(row) for row in rows]
    if rows is None or not all(
        issubclass(kind, int) and kind is not bool for row in rows for kind in set(map(type, row))
    ):
        kind = type(ids).__name__ + (f" of {ids.dtype}" if isinstance(ids, torch.Tensor | np.ndarray) else "")
        raise PromptError(f"{what} is a {kind}: expected text, or token ids as whole numbers")
    return rows


def _encoding(encoding: Mapping[str, Any], what: str) -> PromptBatch:
    if "input_ids" not in encoding:
        text = ': of a row of a data set, pass row["text"]' if "text" in encoding else f": {sorted(encoding)}"
        raise PromptError(f"{what} is a dict without `input_ids`{text}")
    unknown = [key for key in encoding if key not in (*ENCODED, *UNUSED, *IMAGES) and encoding[key] is not None]
    if unknown:
        raise PromptError(f"{what} has {', '.join(map(repr, unknown))}, which is not supported: leave it out")
    rows = rows_of(encoding["input_ids"], what)
    mask, positions = encoding.get("attention_mask"), encoding.get("position_ids")
    kept = [[1] * len(row) for row in rows] if mask is None else rows_of(mask, f"the attention_mask of {what}")
    if [len(row) for row in kept] != [len(row) for row in rows]:
        raise PromptError(f"the attention_mask of {what} has another shape than its input_ids")
    spans = [_span(row, f"prompt {i} of {what}" if len(rows) > 1 else what) for i, row in enumerate(kept)]
    prompts = [row[start:end] for row, (start, end) in zip(rows, spans, strict=True)]
    if positions is not None:
        _check_positions(positions, spans, what)
    if features := {key: encoding[key] for key in IMAGES if encoding.get(key) is not None}:
        prompts = _with_features(prompts, features)
    if len(prompts) == 1 or all(start == 0 and end == len(row) for (start, end), row in zip(spans, rows, strict=True)):
        return PromptBatch(prompts)
    return PromptBatch(prompts, Padding(tuple(start for start, _ in spans), max(map(len, rows))))


def _with_features(rows: list[list[int]], features: Mapping[str, Any]) -> list[Any]:
    """Prompts with the features of their images, which are assigned to them when their model is known."""
    from .images.encoded import EncodedBatch, EncodedPrompt

    batch = EncodedBatch(features, rows)
    return [RenderedPrompt(None, row, images=EncodedPrompt(batch, i)) for i, row in enumerate(rows)]


def _span(mask: Sequence[int], what: str) -> tuple[int, int]:
    """(first position, end) of the tokens that a mask keeps."""
    kept = [place for place, one in enumerate(mask) if one]
    if not kept:
        raise PromptError(f"{what} is empty: its attention_mask keeps no token")
    if len(kept) != kept[-1] + 1 - kept[0]:
        hole = next(place for place in range(kept[0], kept[-1]) if not mask[place])
        raise PromptError(
            f"the attention_mask of {what} has a hole at position {hole}: padding is served before and after a prompt. To "
            "keep positions from attending to others, edit the attention, or leave the tokens out"
        )
    return kept[0], kept[-1] + 1


def _check_positions(positions: Any, spans: Sequence[tuple[int, int]], what: str) -> None:
    """Raise PromptError unless each prompt's positions count from 0."""
    rows = rows_of(positions, f"the position_ids of {what}")
    rows = rows * len(spans) if len(rows) == 1 else rows
    for row, (start, end) in zip(rows, spans, strict=True):
        if list(row[start:end]) != list(range(end - start)):
            raise PromptError(
                f"the position_ids of {what} do not count its tokens from 0: other positions are not served"
            )
