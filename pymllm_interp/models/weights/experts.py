"""Weights of experts in a model with quantised weights: MXFP4 as gpt-oss' checkpoints have it, or unquantised.

`gate_up_proj_blocks` [experts, out, in / 32, 16] uint8 has two codes a byte, the low bits first. `gate_up_proj_scales`
[experts, out, in / 32] uint8 has exponents of 2 plus 127.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ...layers.quantization.experts import QuantizableExperts
from ...layers.quantization.weight import QuantizedWeight
from .loading import WeightsError, generator_of

logger = logging.getLogger(__name__)
PARTS = ("_blocks", "_scales")
MXFP4_GROUP = 32
CODES_RMS = 2.926
"""Root mean square of the values of random codes of FP4."""


def load_experts(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], device: str, loaded: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Give experts their weights as these come. Yields all other tensors.

    Args:
        loaded: receives the names of the weights.

    Raises:
        WeightsError: parts that are missing, or do not fit.
    """
    modules = experts_of(model)
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        part = next((part for part in PARTS if leaf.endswith(part)), "")
        module, kind = modules.get(path), leaf.removesuffix(part)
        if module is None or kind not in module.NAMES:
            yield name, tensor
            continue
        whole = f"{path}.{kind}"
        if part:
            found = waiting.setdefault(whole, {})
            found[part] = tensor
            if len(found) < len(PARTS):
                continue
            weight = _mxfp4(whole, module.shape_of(kind), found["_blocks"], found["_scales"], module.dtype)
            if not module.set_quantized(kind, weight, device):
                logger.warning("%s is dequantised: no kernel takes its shape", whole)
            del waiting[whole]
        else:
            rows = tensor.transpose(1, 2) if module.transposed and tensor.ndim == 3 else tensor
            _check(whole, tensor, rows, module.shape_of(kind))
            module.set_plain(kind, rows, device)
        loaded.add(whole)
    if waiting:
        lacking = [f"{whole}{part}" for whole, found in waiting.items() for part in PARTS if part not in found]
        raise WeightsError(
            f"these weights are not complete: {', '.join(lacking[:10])} are missing; download the folder again"
        )


def init_dummy_experts(model: nn.Module, device: str, seed: int) -> None:
    """Random weights in MXFP4, of the size of `init_dummy_weights`."""
    for path, module in experts_of(model).items():
        for kind in module.NAMES:
            experts, rows, width = module.shape_of(kind)
            generator = generator_of(f"{path}.{kind}", seed, device)
            codes = torch.randint(
                0, 256, (experts * rows, width // 2), generator=generator, device=device, dtype=torch.uint8
            )
            exponent = 127 - round(math.log2(math.sqrt(width) * CODES_RMS))
            scales = torch.full((experts * rows, -(-width // MXFP4_GROUP)), exponent, dtype=torch.uint8, device=device)
            module.set_quantized(kind, QuantizedWeight("fp4", codes, scales, None, MXFP4_GROUP, module.dtype), device)


def experts_of(model: nn.Module) -> dict[str, QuantizableExperts]:
    """Path -> experts."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizableExperts)}


def _mxfp4(
    name: str, shape: tuple[int, int, int], blocks: Tensor, scales: Tensor, dtype: torch.dtype
) -> QuantizedWeight:
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise WeightsError(
            f"{name} is quantised: its blocks are {blocks.dtype}, its scales {scales.dtype}; uint8 is read"
        )
    experts, rows, width = shape
    groups = width // MXFP4_GROUP
    expected = (experts, rows, groups, MXFP4_GROUP // 2), (experts, rows, groups)
    if (tuple(blocks.shape), tuple(scales.shape)) != expected or width % MXFP4_GROUP:
        raise WeightsError(
            f"{name} is quantised: its blocks are {list(blocks.shape)}, its scales {list(scales.shape)}; the model's are "
            f"{list(expected[0])} and {list(expected[1])}"
        )
    if bool((scales == 255).any()):
        raise WeightsError(f"{name} is quantised: some of its scales are NaN; use another checkpoint")
    return QuantizedWeight("fp4", blocks.flatten(0, 1).flatten(1), scales.flatten(0, 1), None, MXFP4_GROUP, dtype)


def _check(name: str, tensor: Tensor, rows: Tensor, shape: tuple[int, int, int]) -> None:
    if tuple(rows.shape) != shape:
        raise WeightsError(f"{name} is {list(tensor.shape)}, the model's rows are {list(shape)}")
    if rows.dtype.itemsize == 1:
        raise WeightsError(f"{name} is {rows.dtype}: quantised, without scales")
