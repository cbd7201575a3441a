"""Weights of experts in a model with quantised weights: MXFP4 as gpt-oss' checkpoints have it, FP8, or unquantised.

`gate_up_proj_blocks` [experts, out, in / 32, 16] uint8 has two codes a byte, the low bits first. `gate_up_proj_scales`
[experts, out, in / 32] uint8 has exponents of 2 plus 127.

Of FP8, each expert has its own tensors: `experts.0.gate_proj.weight`, and `weight_scale_inv` or `weight_scale` beside it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.quantization.experts import QuantizableExperts
from ...layers.quantization.weight import QuantizedWeight, concatenated, quantized
from .formats import QuantizationFormat
from .loading import WeightsError, generator_of

logger = logging.getLogger(__name__)
PARTS = ("_blocks", "_scales")
MXFP4_GROUP = 32
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)")
SCALE_LEAVES = ("weight_scale_inv", "weight_scale")
IGNORED = ("input_scale", "activation_scale")
Pieces = dict[tuple[int, str], dict[str, Tensor]]
"""(expert, projection) -> its tensors by leaf name."""
PutExperts = Callable[[str, QuantizableExperts, str, Tensor | QuantizedWeight], None]
"""(path, module, name in the module, rows [experts, out, in] or a quantised [experts * out, in]) of a weight."""
CODES_RMS = 2.926
"""Root mean square of the values of random codes of FP4."""


def load_experts(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    stored: QuantizationFormat | None,
    put: PutExperts,
    loaded: set[str],
) -> Iterator[tuple[str, Tensor]]:
    """Give experts their weights as these come. Yields all other tensors.

    Args:
        stored: the checkpoint's format.
        put: function for each weight, such as ``partial(store_experts, device)``.
        loaded: receives the names of the weights.

    Raises:
        WeightsError: parts that are missing, or do not fit.
    """
    modules = experts_of(model)
    waiting, apart = dict[str, dict[str, Tensor]](), dict[str, Pieces]()
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        part = next((part for part in PARTS if leaf.endswith(part)), "")
        module, kind = modules.get(path), leaf.removesuffix(part)
        if module is not None and kind in module.NAMES:
            whole = f"{path}.{kind}"
            if not part:
                rows = tensor.transpose(1, 2) if module.transposed and tensor.ndim == 3 else tensor
                _check(whole, tensor, rows, module.shape_of(kind))
                put(whole, module, kind, rows)
                loaded.add(whole)
                continue
            found = waiting.setdefault(whole, {})
            found[part] = tensor
            if len(found) < len(PARTS):
                continue
            weight = _mxfp4(whole, module.shape_of(kind), found["_blocks"], found["_scales"], module.dtype)
            del waiting[whole]
        else:
            expert = EXPERT.fullmatch(name)
            module = None if expert is None else modules.get(expert[1])
            if module is None or expert is None or int(expert[2]) >= module.num_experts or stored is None:
                yield name, tensor
                continue
            if expert[4] in IGNORED:
                continue
            kind = "down_proj" if expert[3] == "down_proj" else "gate_up_proj"
            whole = f"{expert[1]}.{kind}"
            pieces = apart.setdefault(whole, {})
            pieces.setdefault((int(expert[2]), expert[3]), {})[_float8_leaf(name, expert[4])] = tensor
            if sum(map(len, pieces.values())) < 2 * len(_projections(module, kind)):
                continue
            weight = _joined(whole, module, kind, pieces, stored)
            del apart[whole]
        put(whole, module, kind, weight)
        loaded.add(whole)
    _refuse_incomplete(modules, waiting, apart)


def store_experts(
    device: str, whole: str, module: QuantizableExperts, kind: str, weight: Tensor | QuantizedWeight
) -> None:
    """Store a weight: rows [experts, out, in], or quantised [experts * out, in]. Raises WeightsError: codes that do not fit."""
    if isinstance(weight, Tensor):
        module.set_plain(kind, weight, device)
        return
    try:
        if not module.set_quantized(kind, weight, device):
            logger.warning("%s is dequantised: no kernel takes its shape", whole)
    except ValueError as error:
        raise WeightsError(f"{whole} is quantised: {error}") from error


def _projections(module: QuantizableExperts, kind: str) -> list[tuple[int, str]]:
    """The projections that a weight consists of, in its order."""
    parts = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
    return [(expert, part) for expert in range(module.num_experts) for part in parts]


def _float8_leaf(name: str, leaf: str) -> str:
    if leaf != "weight" and leaf not in SCALE_LEAVES:
        raise WeightsError(f"{name}: experts are read in FP8 and MXFP4; use such a checkpoint, or an unquantised one")
    return leaf


def _joined(
    whole: str, module: QuantizableExperts, kind: str, pieces: Pieces, stored: QuantizationFormat
) -> QuantizedWeight:
    """The weight of all experts [experts * out, in]."""
    path, (experts, rows, width) = whole.rpartition(".")[0], module.shape_of(kind)
    order = _projections(module, kind)
    found = [stored.read(f"{path}.{i}.{part}", pieces.get((i, part), {}), module.dtype) for i, part in order]
    expected = rows * experts // len(order), width
    for (i, part), weight in zip(order, found, strict=True):
        if tuple(weight.shape) != expected:
            raise WeightsError(f"{path}.{i}.{part}.weight is {list(weight.shape)}, the model's is {list(expected)}")
    weight = concatenated(found)
    if weight is None:
        raise WeightsError(f"{whole}: the experts' weights are quantised differently; use another checkpoint")
    return weight


def _refuse_incomplete(
    modules: dict[str, QuantizableExperts], waiting: dict[str, dict[str, Tensor]], apart: dict[str, Pieces]
) -> None:
    lacking = [f"{whole}{part}" for whole, found in waiting.items() for part in PARTS if part not in found]
    for whole, pieces in apart.items():
        path, _, kind = whole.rpartition(".")
        lacking += [
            f"{path}.{i}.{part} ({' or '.join(leaves)})"
            for i, part in _projections(modules[path], kind)
            for leaves in (("weight",), SCALE_LEAVES)
            if not set(leaves) & pieces.get((i, part), {}).keys()
        ]
    if lacking:
        raise WeightsError(
            f"these weights are not complete: {', '.join(lacking[:10])} are missing; download the folder again"
        )


def init_dummy_experts(model: nn.Module, stored: QuantizationFormat | None, device: str, seed: int) -> None:
    """Random weights in the format's codes, of the size of `init_dummy_weights`."""
    for path, module in experts_of(model).items():
        for kind in module.NAMES:
            generator = generator_of(f"{path}.{kind}", seed, device)
            if stored is not None and stored.kind == "fp8":
                weight = _random_fp8(module, kind, stored.group_size, generator)
            else:
                weight = _random_mxfp4(module, kind, generator)
            module.set_quantized(kind, weight, device)


def _random_fp8(
    module: QuantizableExperts, kind: str, group_size: int | None, generator: torch.Generator
) -> QuantizedWeight:
    experts, rows, width = module.shape_of(kind)
    found = []
    for _ in range(experts):
        values = torch.randn(rows, width, generator=generator, device=generator.device, dtype=torch.float32)
        found.append(quantized((values / math.sqrt(width)).to(module.dtype), "fp8", group_size))
    weight = concatenated(found)
    assert weight is not None, "all have one form"
    return weight


def _random_mxfp4(module: QuantizableExperts, kind: str, generator: torch.Generator) -> QuantizedWeight:
    experts, rows, width = module.shape_of(kind)
    device: Any = generator.device
    codes = torch.randint(0, 256, (experts * rows, width // 2), generator=generator, device=device, dtype=torch.uint8)
    exponent = 127 - round(math.log2(math.sqrt(width) * CODES_RMS))
    scales = torch.full((experts * rows, -(-width // MXFP4_GROUP)), exponent, dtype=torch.uint8, device=device)
    return QuantizedWeight("fp4", codes, scales, None, MXFP4_GROUP, module.dtype)


def experts_of(model: nn.Module) -> dict[str, QuantizableExperts]:
    """Quantizable experts by module path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizableExperts)}


def _mxfp4(
    name: str, shape: tuple[int, int, int], blocks: Tensor, scales: Tensor, dtype: torch.dtype
) -> QuantizedWeight:
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise WeightsError(f"{name} is quantised: blocks are {blocks.dtype}, scales {scales.dtype}; uint8 is read")
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
