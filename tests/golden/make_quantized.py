"""Golden files of quantised checkpoints: what compressed-tensors stores of a weight, and what it makes of that again.

    python -m venv env && env/bin/pip install compressed-tensors==0.20.0 numpy torch
    env/bin/python tests/golden/make_quantized.py

Writes tests/golden/quantized: for each case NAME.json, its `quantization_config`, and NAME.safetensors. That has the stored tensors
of a layer, and its weight before ("original") and after ("expected").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

OUT = Path(__file__).parent / "quantized"
ROWS, WIDTH = 24, 64
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
    "w4a16-group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}),
    "w4a16-asymmetric": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "w4a16-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "w8a16-channel": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "w8a16-group": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}  # fmt: skip


def qparams(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points by the extremes of each group."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "tensor":
        grouped = weight.reshape(1, -1)
    elif strategy == "channel":
        grouped = weight[:, None]
    elif strategy == "block":
        high, wide = args.block_structure
        rows = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % high))
        grouped = rows.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
    else:
        grouped = weight.unflatten(1, (-1, args.group_size))
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    return (scale.flatten(), zero.flatten()) if strategy == "tensor" else (scale, zero)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for i, (name, (form, settings)) in enumerate(CASES.items()):
        weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16()
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        scale, zero = qparams(weight, args)
        compressor = BaseCompressor.get_value_from_registry(form)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(state, scheme)
        expected = compressor.decompress(stored, scheme)["weight"]
        group = json.loads(scheme.model_dump_json())
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
        (OUT / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n")
        tensors = {**stored, "original": weight, "expected": expected.to(torch.bfloat16)}
        save_file({key: value.contiguous() for key, value in tensors.items()}, OUT / f"{name}.safetensors")
        print(name, {key: (list(value.shape), value.dtype) for key, value in stored.items()}, expected.dtype)


if __name__ == "__main__":
    main()
