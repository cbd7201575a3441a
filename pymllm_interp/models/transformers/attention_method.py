"""Families with attention modules that compute scores in a method `_attn`, not through transformers' attention interface.

GPT-J, CodeGen, GPT-Neo and GPT-NeoX-Japanese. `serve_methods` makes the method of each module call the attention function of the
model's config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SCALINGS: dict[str, Callable[[Any], float]] = {
    "codegen": lambda module: 1 / module.scale_attn,
    "gpt_neo": lambda module: 1.0,
    "gpt_neox_japanese": lambda module: 1 / module.norm_factor,
    "gptj": lambda module: 1 / module.scale_attn,
}
"""`model_type` -> factor of an attention module's scores."""


class AttentionMethod:
    """Replacement of a module's `_attn`."""

    def __init__(self, model: PreTrainedModel, module: Any) -> None:
        self._config, self._module = model.config, module
        self._scaling = SCALINGS[model.config.model_type](module)
        local = getattr(module, "attention_type", None) == "local"
        self._window = int(module.bias[0, 0, -1].sum()) if local else None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([1, heads, tokens, head_dim], weights or None) of query, key and value [1, heads, tokens, head_dim]."""
        name = self._config._attn_implementation_internal
        if name == "eager":
            own: Any = type(self._module)._attn
            return own(self._module, query, key, value, attention_mask)
        attend: Any = ALL_ATTENTION_FUNCTIONS[name]
        query, key = query.to(value.dtype), key.to(value.dtype)
        # Without the model's mask, which does not have the window.
        out, weights = attend(self._module, query, key, value, None, scaling=self._scaling, sliding_window=self._window)
        return out.transpose(1, 2), weights


def serve_methods(model: PreTrainedModel) -> None:
    """Make the methods call the attention function, in families that have them."""
    if model.config.model_type in SCALINGS:
        for module in list(model.modules()):
            if hasattr(module, "_attn"):
                module._attn = AttentionMethod(model, module)  # pyright: ignore[reportArgumentType]


def eager_method_of(module: nn.Module) -> Callable[..., Any] | None:
    """The family's own `_attn`, with the signature and the result of an eager attention function."""
    own: Any = getattr(type(module), "_attn", None)
    if own is None:
        return None

    def eager(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, weights = own(module, query, key, value, mask)
        return out.transpose(1, 2), weights

    return eager
