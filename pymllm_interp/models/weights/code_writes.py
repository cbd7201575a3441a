"""Writes of quantised weights into the memory of those that are served."""

from __future__ import annotations

import torch

from ...layers.quantization.expert_tiles import ExpertTiles, shift_of
from ...layers.quantization.experts import QuantizableExperts, StoredExperts
from ...layers.quantization.gemm import laid_out
from ...layers.quantization.weight import QuantizedWeight


def other_form(held: QuantizedWeight, given: QuantizedWeight) -> str:
    """Difference of two quantised weights' forms; "" for equal ones."""
    for name, ours, theirs in (
        ("kind", held.kind, given.kind),
        ("group size", held.group_size, given.group_size),
        ("shape", list(held.shape), list(given.shape)),
        ("zero points", held.zeros is not None, given.zeros is not None),
        ("scales", list(held.scales.shape), list(given.scales.shape)),
    ):
        if ours != theirs:
            return f"its {name} is {theirs}, the model's is {ours}"
    dtype = held.scale_dtype or held.scales.dtype
    if given.scales.dtype != dtype != torch.float32:  # which has all of them exactly
        return f"its scales are {given.scales.dtype}, the model's are {dtype}"
    return ""


def write_codes(held: QuantizedWeight, given: QuantizedWeight) -> None:
    """Write a weight of the same form into the memory of `held`."""
    new = laid_out(given.to(held.device))
    for name, tensor in held.tensors.items():
        tensor.copy_(new.tensors[name])


def other_experts(held: StoredExperts, given: QuantizedWeight) -> str:
    """`other_form` of experts' weights."""
    if isinstance(held, QuantizedWeight):
        return other_form(held, given)
    if given.kind != "fp4" or given.shape != held.shape:
        return f"it is {given.kind} {list(given.shape)}, the model's is fp4 {list(held.shape)}"
    try:
        shift = shift_of(given.scales)
    except ValueError as error:
        return str(error)
    return "" if shift == held.shift else f"its scales need the factor 2^{shift}, captured passes have 2^{held.shift}"


def write_experts(held: StoredExperts, given: QuantizedWeight, module: QuantizableExperts, kind: str) -> None:
    """`write_codes` of the experts' weight `kind` of a module."""
    if isinstance(held, QuantizedWeight):
        new: StoredExperts = given.to(held.device)
    else:
        new = ExpertTiles.of(given.to(held.words.device), held.experts, kind == "gate_up_proj", module.interleaved)
    for name, tensor in held.tensors.items():
        tensor.copy_(new.tensors[name])
