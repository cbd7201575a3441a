"""Loading the linear layers of a native model quantised: from a quantised checkpoint, or while unquantised weights are read.

    with unallocated_weights():
        model = LlamaForCausalLM(...)
    load_quantized(model, tensors, format, quantize=None, device="cuda")

Each layer is read, quantised and moved to the device in turn. The device never holds the unquantised model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.fused_qkv import Conv1D
from ...layers.linear import Linear, MergedLinear, Projection
from ...layers.quantization.gemm import QuantizedGemm, laid_out, takes_rounded_rows
from ...layers.quantization.weight import QuantizedWeight, concatenated, quantized
from .experts import init_dummy_experts, load_experts, store_experts
from .formats import LEAVES, QuantizationFormat
from .loading import MARKS, WeightsError, draw, is_harmless, load_weights

logger = logging.getLogger(__name__)
Part = Tensor | QuantizedWeight
SCALES_OF_STATES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".output_scale", ".input_scale")
"""Suffixes of the names of scales for rounded states, which are not parameters."""
KV_SCALE = re.compile(r"\.(\d+)\.\w+\.(?:[kv]_proj\.)?([kv])_scale$")
"""The scale of a layer's K or V, of its attention module or of the projection."""


@dataclass(slots=True)
class LinearParts:
    """The modules of one product: a `Linear`, or the projections of a `MergedLinear`.

    Attributes:
        merged: computes the product; None: the module itself.
        modules: path -> module, in the order of the product.
    """

    merged: MergedLinear | None
    modules: dict[str, Any]

    @property
    def is_unallocated(self) -> bool:
        """Whether the weights have no memory yet."""
        return all(module.weight.is_meta for module in self.modules.values())

    def set_parts(self, parts: list[Part], device: str) -> None:
        """Give the product its weight [out, in], in parts by module."""
        quantised = [part for part in parts if isinstance(part, QuantizedWeight)]
        whole = concatenated(quantised) if len(quantised) == len(parts) else None
        if whole is not None:
            self._set_quantized(laid_out(whole.to(device)))
            return
        if quantised:
            logger.warning(
                "%s are one product, and their weights are quantised differently: it is dequantised",
                ", ".join(self.modules),
            )
        plain = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
        first = next(iter(self.modules.values()))
        self._set_plain(torch.cat([part.to(device, first.weight.dtype) for part in plain]))

    def _set_quantized(self, weight: QuantizedWeight) -> None:
        parts = [weight] if self.merged is None else self.merged.set_quantized(weight)
        for module, part in zip(self.modules.values(), parts, strict=True):
            module.set_quantized(part)

    def _set_plain(self, weight: Tensor) -> None:
        parts = [weight] if self.merged is None else self.merged.set_weight(weight)
        for module, part in zip(self.modules.values(), parts, strict=True):
            module.weight = (
                part if isinstance(part, nn.Parameter) else nn.Parameter(part.t() if module.transposed else part, False)
            )
            if self.merged is None:
                module.bind()


def linear_parts(model: nn.Module) -> list[LinearParts]:
    """The products of a model that have unallocated weights."""
    found: dict[int, LinearParts] = {}
    for path, module in model.named_modules():
        if isinstance(module, Projection):
            merged, _ = module.place
            found.setdefault(id(merged), LinearParts(merged, {})).modules[path] = module
        elif isinstance(module, Linear | Conv1D):
            found[id(module)] = LinearParts(None, {path: module})
    return [parts for parts in found.values() if parts.is_unallocated]


@torch.no_grad()
def load_quantized(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], stored: QuantizationFormat | None, quantize: str | None, device: str
) -> None:  # fmt: skip
    """Load a model that was built without memory for the weights of its linear layers.

    Args:
        weights: the checkpoint's tensors, by their names in the module tree.
        stored: the checkpoint's format; None: it is unquantised.
        quantize: format of `ModelConfig.quantize`. The head's weight is left.

    Raises:
        WeightsError: as `load_weights`; or quantised tensors that are missing or do not fit.
    """
    products = linear_parts(model)
    paths = {path for product in products for path in product.modules}
    own: dict[str, dict[str, Tensor]] = {path: {} for path in paths}
    experts: set[str] = set()
    rest = list(sorted_out(load_experts(model, weights, stored, partial(store_experts, device), experts), own))
    head = getattr(model, "lm_head", None)
    pending: list[LinearParts] = []
    for product in products:
        parts = [part_of(path, module, own[path], stored) for path, module in product.modules.items()]
        if all(part is None for part in parts):
            pending.append(product)  # load_weights lists missing tensors
            continue
        if any(part is None for part in parts):
            lacking = [path for path, part in zip(product.modules, parts, strict=True) if part is None]
            raise WeightsError(
                f"these weights are not complete: {', '.join(lacking)} have no weight; download the folder again"
            )
        found = [part for part in parts if part is not None]
        if quantize is not None and head not in product.modules.values():
            found = [_rounded(part, module) for part, module in zip(found, product.modules.values(), strict=True)]
        product.set_parts(found, device)
    _load_rest(
        model, rest, {path for product in products if product not in pending for path in product.modules}, experts
    )


def init_dummy_quantized(model: nn.Module, stored: QuantizationFormat | None, device: str, seed: int) -> None:
    """Random weights, as `init_dummy_weights` draws them, rounded to the codes of the format; the head's are not.

    With MXFP4 only experts have codes.
    """
    head = getattr(model, "lm_head", None)
    only_experts = stored is not None and stored.method == "mxfp4"
    init_dummy_experts(model, stored, device, seed)
    kind, group = ("fp8", None) if stored is None else (stored.kind, stored.group_size)
    for product in linear_parts(model):
        parts: list[Part] = []
        for path, module in product.modules.items():
            weight = torch.empty(*module.weight.shape, dtype=module.weight.dtype, device=device)
            draw(weight, f"{path}.weight", seed)
            weight = weight.t() if module.transposed else weight
            if module is not head and not only_experts:
                found = quantized(weight.contiguous(), "uint4" if kind == "fp4" else kind, group)
                # As in checkpoints, where integers have scales in the weight's dtype, and FP8 in float32.
                parts.append(found if kind == "fp8" else replace(found, scales=found.scales.to(weight.dtype)))
            else:
                parts.append(weight)
        product.set_parts(parts, device)


def round_rows(model: nn.Module) -> None:
    """Have the products with FP8 weights round their inputs, too, if they have many rows (`scaled_product`)."""
    for module in model.modules():
        gemm = module.place[0].gemm if isinstance(module, Projection) else getattr(module, "gemm", None)
        if isinstance(gemm, QuantizedGemm):
            gemm.rounds_rows = takes_rounded_rows(gemm.weight)


def sorted_out(
    weights: Iterable[tuple[str, Tensor]], own: Mapping[str, dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Put the tensors of the modules of `own` there; yield the others."""
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        if path in own and leaf in LEAVES:
            own[path][leaf] = tensor
        else:
            yield name, tensor


def part_of(path: str, module: Any, tensors: dict[str, Tensor], stored: QuantizationFormat | None) -> Part | None:
    """A module's weight [out, in] as it is stored; None: it has no tensors."""
    weight, own = tensors.get("weight"), own_weight(module)
    quantised = bool(MARKS & tensors.keys()) or (weight is not None and weight.dtype.itemsize == 1)
    if not quantised and weight is None:
        return None
    if not quantised:
        assert weight is not None
        weight = weight.to(own.dtype)
        found: Part = weight.t() if module.transposed else weight
    elif stored is None:
        raise WeightsError(
            f"{path} has quantised tensors ({', '.join(sorted(tensors))}), and config.json has no quantization_config: download "
            "both from the same place"
        )
    elif module.transposed and "qweight" not in tensors:
        raise WeightsError(
            f"{path} is a Conv1D in {stored.method} format, which is not read: use quantize='fp8', or AWQ or GPTQ"
        )
    else:
        found = stored.read(path, tensors, own.dtype)
    expected = own.shape if not module.transposed else own.shape[::-1]
    if found.shape != expected:
        raise WeightsError(f"{path}.weight is {list(found.shape)}, the model's is {list(expected)}")
    return found


def own_weight(module: Any) -> Tensor:
    """The module's parameter `weight`; of a quantised module a tensor without memory, of its shape and dtype."""
    if module.quantized is None:
        return module.weight
    shape = module.quantized.shape[::-1] if module.transposed else module.quantized.shape
    return torch.empty(shape, dtype=module.quantized.dtype, device="meta")


def _rounded(part: Part, module: Any) -> Part:
    return quantized(part.to(module.weight.dtype).contiguous()) if isinstance(part, Tensor) else part


def _kv_scales(tensors: list[tuple[str, Tensor]]) -> dict[int, tuple[float, float]]:
    """The scales of K and of V by layer; 1 by default. Raises WeightsError: a scale is not one positive number."""
    found: dict[int, dict[str, float]] = {}
    for name, tensor in tensors:
        if (at := KV_SCALE.search(name)) is None:
            continue
        if tensor.numel() != 1 or not 0 < float(tensor) < float("inf"):
            raise WeightsError(f"{name} is not one positive number; download the checkpoint anew, or remove the tensor")
        found.setdefault(int(at[1]), {})[at[2]] = float(tensor)
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in found.items()}


def _load_rest(model: nn.Module, rest: list[tuple[str, Tensor]], loaded: set[str], experts: set[str]) -> None:
    """Load the other tensors. Loaded names are not reported as missing.

    Args:
        loaded: paths of modules.
        experts: names of weights.
    """
    model.kv_scales = _kv_scales(rest)  # pyright: ignore[reportArgumentType]
    have = [
        (name, tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if (name.rpartition(".")[0] in loaded and not name.endswith(".bias"))
        or name.removesuffix("_codes").removesuffix("_scales") in experts
    ]
    load_weights(model, [*rest, *have], ignore=lambda name: is_harmless(name) or name.endswith(SCALES_OF_STATES))
