"""The linear modules of a served model that adapters can target, by their paths in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...layers.linear import LinearForward, Product, Projection
from ...layers.lora import LoRASlots
from ...layers.quantization.weight import QuantizedWeight
from ..base import CausalLM


class AdaptedProduct(Protocol):
    """Module that computes a product with adapters: a `Product`, a `MergedLinear`, or the forward of a transformers module."""

    lora: LoRASlots | None


class Target(NamedTuple):
    """A linear module.

    Attributes:
        product: computes it.
        part: index of the module among the projections of the product.
        in_features: input features of the product.
        sizes: out features of all projections of the product.
        weight: weight of the product; it gives dtype and device.
    """

    product: AdaptedProduct
    part: int
    in_features: int
    sizes: Sequence[int]
    weight: torch.Tensor | QuantizedWeight

    @property
    def out_features(self) -> int:
        """Output features of the module."""
        return self.sizes[self.part]


def targets_of(model: CausalLM) -> dict[str, Target]:
    """The modules by path, without those with rows that are not the rows of the pass.

    These are the head, experts, and modules inside of a module that runs prompt by prompt.
    """
    head = model.get_submodule(model.spec.family.head)
    found: dict[str, Target] = {}
    for path, module in model.named_modules():
        left_out = module is head or "experts" in path.split(".") or _parts_around(model, path)
        if not left_out and (target := _target(module)) is not None:
            found[path] = target
    return found


def _parts_around(model: nn.Module, path: str) -> str:
    """The module that runs prompt by prompt, and that the module at `path` lies in; "" for none."""
    parts = path.split(".")
    around = (".".join(parts[:size]) for size in range(1, len(parts)))
    return next((outer for outer in around if hasattr(model.get_submodule(outer), "part_module")), "")


def _target(module: nn.Module) -> Target | None:
    if isinstance(module, Projection):
        merged, index = module.place
        return Target(merged, index, module.in_features, merged.sizes, merged.gemm.weight)
    if isinstance(module, Product):
        out_features, in_features = module.gemm.weight.shape
        return Target(module, 0, in_features, [out_features], module.gemm.weight)
    forward: Any = vars(module).get("_linear_forward")
    if isinstance(forward, LinearForward) and isinstance(module, nn.Linear):
        return Target(forward, 0, module.in_features, [module.out_features], module.weight)
    return None


def unsupported_reason(model: nn.Module, path: str) -> str:
    """Reason that an adapter cannot target a module."""
    parts = path.split(".")
    if "experts" in parts:
        return "it belongs to experts, and adapters of experts are not supported"
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return "the model has no such module"
    if outer := _parts_around(model, path):
        own: Any = model.get_submodule(outer)
        return f"it lies inside {outer}, which {own.part_module.why}, and runs prompt by prompt"
    if isinstance(module, nn.Embedding):
        return "it is an embedding, and adapters change linear layers only"
    return f"it is a {type(module).__name__}, and adapters change linear layers other than the head"
