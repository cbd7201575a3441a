"""Quantised checkpoints of tiny models, made by the formulas of each format, and the weights that they stand for."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A layer's tensors, and the weight [out, in] float32 that they stand for."""
GROUP = 8
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns has each place of a word, from the lowest bits."""


def in_words(codes: torch.Tensor, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [rows, n] -> words [rows, n * bits / 32] int32, low bits first."""
    per = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // per, dtype=torch.int64)
    for place, column in enumerate(columns or range(per)):
        words |= codes[:, column::per].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def rounded(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric codes [out, in], zeros [out, groups], scales [out, groups] float16, of groups of inputs."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).half().clamp(min=1e-4)
    zeros = (-low / scales).round().clamp(1, (1 << bits) - 1)  # 0 has no place in GPTQ's files
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, (1 << bits) - 1)
    return codes.flatten(1).int(), zeros.int(), scales


def value_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The formula of integers with zeros."""
    per = codes.shape[1] // zeros.shape[1]
    return (codes - zeros.repeat_interleave(per, 1)).float() * scales.float().repeat_interleave(per, 1)


def awq(weight: torch.Tensor, group: int = GROUP) -> Stored:
    codes, zeros, scales = rounded(weight, 4, group)
    tensors = {
        "qweight": in_words(codes.T, 4, AWQ_COLUMNS), "qzeros": in_words(zeros.T, 4, AWQ_COLUMNS), "scales": scales.T,
    }  # fmt: skip
    return tensors, value_of(codes, zeros, scales)


def gptq(weight: torch.Tensor, group: int = GROUP, bits: int = 4, version: int = 1) -> Stored:
    codes, zeros, scales = rounded(weight, bits, group)
    tensors = {
        "qweight": in_words(codes.T.contiguous().T, bits).T,
        "qzeros": in_words((zeros - (2 - version)).T, bits),
        "scales": scales.T,
        "g_idx": torch.arange(weight.shape[1]).int() // group,
    }
    return tensors, value_of(codes, zeros, scales)


def fp8_blocks(weight: torch.Tensor, group: int = 2 * GROUP, rows: int = 24) -> Stored:
    """DeepSeek's: a scale for a block of `rows` and `group` columns, which the last blocks may not fill."""
    block = rows, group
    scales = torch.empty(*(-(-size // own) for size, own in zip(weight.shape, block, strict=True)))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = part.abs().max() / 448
    spread = scales.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def fp8_tensor(weight: torch.Tensor, group: int = 0) -> Stored:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}, codes.float() * scale


def fp8_channel(weight: torch.Tensor, group: int = 0) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def compressed(weight: torch.Tensor, group: int, bits: int) -> Stored:
    """compressed-tensors' pack-quantized: signed codes, symmetric."""
    half = 1 << (bits - 1)
    groups = weight.unflatten(1, (-1, group))
    scales = groups.abs().amax(-1) / (half - 1)
    codes = (groups / scales[..., None]).round().clamp(-half, half - 1).flatten(1).int()
    tensors = {
        "weight_packed": in_words(codes + half, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    return tensors, value_of(codes, torch.zeros_like(scales).int(), scales)


def _group(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Stored]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}, gptq),
    "gptq-8": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2"},
        lambda weight, group=GROUP: gptq(weight, group, 8, 2),
    ),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [24, 16], "activation_scheme": "dynamic"}, fp8_blocks),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8-channel": (
        _group(num_bits=8, type="float", strategy="channel") | {"format": "float-quantized"}, fp8_channel,
    ),
    "w4a16": (
        _group(num_bits=4, type="int", strategy="group", group_size=GROUP) | {"format": "pack-quantized"},
        lambda weight, group=GROUP: compressed(weight, group, 4),
    ),
    "w8a16": (
        _group(num_bits=8, type="int", strategy="group", group_size=GROUP) | {"format": "pack-quantized"},
        lambda weight, group=GROUP: compressed(weight, group, 8),
    ),
}  # fmt: skip
"""Name -> quantization_config, and what stores a weight [out, in]."""


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the weight of a layer that quantisers take."""
    other = ("embed", "wte", "wpe", "lm_head", "norm", "ln_")
    return name.endswith(".weight") and tensor.ndim == 2 and not any(part in name for part in other)


def write_quantized(
    source: Path,
    folder: Path,
    form: str,
    transposed: bool = False,
    keep: tuple[str, ...] = (),
    group: int | None = None,
    rows: int | None = None,
    **settings: Any,
) -> Path:
    """Write `source`'s model quantised, and beside it what its weights stand for, in ``folder/plain``.

    Args:
        transposed: the weights are [in, out] (Conv1D).
        keep: parts of the names of layers that stay unquantised.
        rows: of a block of scales, in place of the format's.
        group: inputs of a group, in place of the format's.
        settings: more of the quantization_config.

    Returns:
        the folder.
    """
    config, store = copy.deepcopy(FORMATS[form][0]), FORMATS[form][1]
    if group is not None and "group_size" in config:
        config["group_size"] = group
    for weights in (own["weights"] for own in config.get("config_groups", {}).values()):
        weights |= {"group_size": group} if group is not None and "group_size" in weights else {}
    how = {name: value for name, value in (("group", group), ("rows", rows)) if value is not None}
    plain = folder / "plain"
    shutil.copytree(source, plain)
    tensors, quantised, read = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if not is_linear(name, tensor) or any(part in name for part in keep):
            quantised[name] = read[name] = tensor
            continue
        stored, value = store((tensor.T if transposed else tensor).float(), **how)
        read[name] = (value.T if transposed else value).contiguous()
        path = name.removesuffix("weight")
        quantised |= {f"{path}{leaf}": own.contiguous() for leaf, own in stored.items()}
    save_file(read, plain / "model.safetensors", {"format": "pt"})
    save_file(quantised, folder / "model.safetensors", {"format": "pt"})
    given = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | {"quantization_config": config | settings}))
    return folder
