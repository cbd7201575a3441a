"""Checkpoints of gpt-oss with experts in MXFP4, as its own have them, and the same with dequantised ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat((FP4, -FP4))
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def in_mxfp4(base: Path, stored: Path, plain: Path) -> tuple[Path, Path]:
    """Two checkpoints of the model in the folder `base`, with random experts: as blocks of 16 bytes with scales, and dequantised.

    A byte has two codes, the lower bits first; the exponents of the scales have bias 127.
    """
    tensors, draw = load_file(base / "model.safetensors"), torch.Generator().manual_seed(0)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    codes, values = dict(kept), dict(kept)
    for name in tensors.keys() - kept.keys():
        experts, width, rows = tensors[name].shape  # [experts, in, out]
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=draw).to(torch.uint8)
        scales = torch.randint(119, 124, (experts, rows, width // 32), generator=draw).to(torch.uint8)
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        value = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(3)
        value = value * torch.exp2(scales.float() - 127)[..., None]
        values[name] = value.flatten(2).transpose(1, 2).contiguous()
    config = json.loads((base / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    for folder, found, more in ((stored, codes, {"quantization_config": settings}), (plain, values, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file(found, folder / "model.safetensors", {"format": "pt"})
    return stored, plain
