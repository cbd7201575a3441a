"""Encoders with attention biases by relative position, which their modules compute themselves: MPNet and DeBERTa-v2 and -v3.

An attention runs once for each request of a pass. A pass has the biases of its longest request, since they depend on distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....core.current_pass import current_batch
from ....core.forward_batch import ForwardBatch
from ....core.unsupported import UnsupportedModelError
from ..recurrent import PartModule
from .rows import CallRows, taken

BY_DISTANCE = ("position_bias", "relative_pos")
"""Arguments [..., tokens, tokens] that follow from distances."""


class RelativeAttention(PartModule):
    """Replacement of the forward of an attention module."""

    why = "has relative positions"

    def __init__(self, path: str, module: nn.Module, config: Any) -> None:
        super().__init__(path, module)
        self._config = config

    def _keeps(self, batch: ForwardBatch) -> bool:
        return False

    def _call(self, given: dict[str, Any], rows: int, part: CallRows, batch: ForwardBatch) -> Any:
        h = taken(given["hidden_states"], rows, part)
        size = h.shape[1]
        own = {name: given[name][..., :size, :size] for name in BY_DISTANCE if given.get(name) is not None}
        mask = h.new_ones(1, 1, 1, 1) if "relative_pos" in self._names else None  # DeBERTa hides keys where it is 0
        return self._forward(**given | own | {"hidden_states": h, "attention_mask": mask})

    def _probe(self, given: dict[str, Any], rows: int) -> Any:
        module: Any = self._module
        project = module.v if hasattr(module, "v") else module.value_proj
        value = project(given["hidden_states"]).unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2)
        attend: Any = ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation_internal]
        out = attend(module, value, value, value, None)[0].flatten(2)
        return (module.o(out),) if hasattr(module, "o") else (out, None)


def serve_relative(model: PreTrainedModel) -> None:
    """Make attention modules with relative positions run for each request.
    Raises UnsupportedModelError: a DeBERTa with a convolution."""
    if model.config.model_type not in ("mpnet", "deberta-v2"):
        return
    for path, module in list(model.named_modules()):
        found: Any = module
        if hasattr(module, "compute_position_bias"):
            found.compute_position_bias = _of_longest(found.compute_position_bias)
        elif hasattr(module, "get_rel_pos"):
            if found.conv is not None:
                raise UnsupportedModelError(
                    "DeBERTa with conv_kernel_size cannot be served: its convolution changes the stream between two layers"
                )
            found.get_rel_pos = _of_longest(found.get_rel_pos)
            found.get_attention_mask = _only_padding(found.get_attention_mask)
        elif hasattr(module, "attention_head_size"):
            own = RelativeAttention(path, module, model.config)
            found.forward = vars(module)["part_module"] = own  # traces wrap `forward`


def _of_longest(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The method, of as many rows as the longest request of the pass has."""

    def made(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch = current_batch()
        longest = None if batch is None else max(size for _, size in batch.batch_groups)
        return method(hidden_states[:, :longest], *args, **kwargs)

    return made


def _only_padding(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The method, that makes a mask [tokens, tokens], outside of passes. A pass has no padding inside of requests."""

    def made(attention_mask: torch.Tensor) -> torch.Tensor:
        return attention_mask if current_batch() is not None else method(attention_mask)

    return made
