"""The `attention_mask` among the inputs of the model, which blocks see as transformers' models have it.

The engine's passes have no mask: their batch is flat, and each request attends to its own tokens. A block gets a mask to read.
"""

from __future__ import annotations

from typing import Any

import torch

from ....utils.upload import upload
from ..blocks.errors import EditError
from ..blocks.trace import RequestTrace
from .rows import Padding

NAME = "attention_mask"
READ_ONLY = (
    "the attention_mask is there to be read: no pass uses one. Leave out tokens of the prompt, or edit the attention inside "
    "`self_attn.source`"
)


def mask_of(trace: RequestTrace) -> torch.Tensor:
    """int64 [prompts, tokens so far]: 1 for tokens, 0 for padding. On the CPU."""
    lengths = trace.prompt_lens
    left, width = trace.padding or Padding.on_the_left(lengths)
    mask = torch.ones(len(lengths), width + trace.visits.passes, dtype=torch.int64)
    for row, start, length in zip(mask, left, lengths, strict=True):
        row[:start] = row[start + length : width] = 0
    return mask


class ServedMasks:
    """The masks that the blocks of one value were served."""

    __slots__ = ("_masks",)

    def __init__(self) -> None:
        self._masks: dict[int, tuple[torch.Tensor, int]] = {}  # by id, with torch's version

    def add_to(self, inputs: tuple[tuple, dict[str, Any]], trace: RequestTrace) -> tuple[tuple, dict[str, Any]]:
        """The ``(args, kwargs)`` of a module that takes token ids, with the mask of the trace's prompts."""
        args, kwargs = inputs
        with torch.inference_mode(False):  # so that torch counts its edits
            (mask,) = upload(kwargs["input_ids"].device, mask_of(trace))
        self._masks[id(mask)] = mask, mask._version
        return args, {**kwargs, NAME: mask}

    def removed_from(self, inputs: Any) -> Any:
        """The ``(args, kwargs)`` that a block assigns, as the module takes them. Raises EditError: another mask."""
        if not (isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[1], dict) and NAME in inputs[1]):
            return inputs
        kwargs = dict(inputs[1])
        if id(kwargs.pop(NAME)) not in self._masks or self.edited():
            raise EditError(READ_ONLY)
        return inputs[0], kwargs

    def edited(self) -> bool:
        """Whether a block has written into one."""
        return any(mask._version != version for mask, version in self._masks.values())


def takes_token_ids(value: Any) -> bool:
    """Whether a value is the ``(args, kwargs)`` of the whole model, or of the part below its head."""
    return (
        type(value) is tuple
        and len(value) == 2
        and type(value[1]) is dict
        and {"input_ids", "forward_batch"} <= value[1].keys()
    )
