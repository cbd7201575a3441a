"""LoRA adapters in PEFT's format, random or zero, and transformers' model with them, by PEFT's formula."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The linear modules of a transformers model by path, without the head."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not path.endswith(("lm_head", "embed_out"))
    }


def shape_of(module: Any) -> tuple[int, int]:
    """(in, out) features."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return module.in_features, module.out_features


def write_adapter(
    folder: Path, model: nn.Module, *, targets: list[str] | None = None, rank: int = 4, seed: int = 0, scale: float = 0.1,
    ranks: Mapping[str, int] | None = None, **config: Any,
) -> Path:  # fmt: skip
    """Write an adapter of `model` with random A and B, as PEFT writes one. Returns the folder.

    Args:
        targets: ends of module paths; None: all linear modules.
        scale: of B; 0: an adapter that changes nothing.
        ranks: `rank_pattern`.
        config: further fields of adapter_config.json.
    """
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in linear_modules(model).items():
        if targets is not None and not any(path == name or path.endswith(f".{name}") for name in targets):
            continue
        own = next((r for key, r in (ranks or {}).items() if re.match(rf"(.*\.)?({key})$", path)), rank)
        n_in, n_out = shape_of(module)
        tensors[f"{PREFIX}{path}.lora_A.weight"] = torch.randn(own, n_in, generator=draw) / math.sqrt(n_in)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = torch.randn(n_out, own, generator=draw) * scale
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    known = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets or "all-linear",
        "rank_pattern": dict(ranks or {}), "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(known))
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change: Any) -> None:
    """Write the tensors that `change` makes of the folder's, {name: tensor}."""
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)


class LoRALinear(nn.Module):
    """A linear module with an adapter, as PEFT computes it: ``base(x) + B(A(x)) * scaling``."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scaling = base, a, b, scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.T) @ self.b.T * self.scaling


def adapted(model: Any, folder: Path) -> Any:
    """A copy of a transformers model with an adapter, without PEFT."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, found = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(model)
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        alpha = _of(config.get("alpha_pattern"), path, config["lora_alpha"])
        scaling = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        parent, _, own = path.rpartition(".")
        module = LoRALinear(found.get_submodule(path), a, tensors[f"{PREFIX}{path}.lora_B.weight"], scaling)
        setattr(found.get_submodule(parent), own, module)
    return found.eval()


@torch.no_grad()
def merged_folder(model: Any, folder: Path, tokenizer: Path, to: Path) -> Path:
    """A checkpoint of a transformers model with an adapter in its weights, and the tokenizer of another folder."""
    found = adapted(model, folder)
    for path, module in list(found.named_modules()):
        if isinstance(module, LoRALinear):
            delta = module.b @ module.a * module.scaling
            module.base.weight.add_(delta if module.base.weight.shape == delta.shape else delta.T)
            parent, _, own = path.rpartition(".")
            setattr(found.get_submodule(parent), own, module.base)
    shutil.copytree(tokenizer, to / "merged")
    found.save_pretrained(to / "merged")
    return to / "merged"


def _of(pattern: Mapping[str, float] | None, path: str, default: float) -> float:
    return next((value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", path)), default)
