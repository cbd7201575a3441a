"""EAGLE-3 checkpoints of SafeAILab and of `speculators`: their config, and their weights by the names of `Eagle3Head`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from ...core.model_spec import ModelSpec
from ...core.unsupported import UnsupportedModelError
from ...models.native.eagle import EagleOptions
from ...models.weights.loading import iter_safetensors

PICKLED = "pytorch_model.bin"
LAYERS = ("llama", "qwen3")
"""Model types of the layers that are served."""
LEFT_OUT = ("t2d", "verifier_norm.", "verifier_lm_head.")
"""Tensors that only training reads, by their first letters."""


def read_config(folder: Path, target: ModelSpec) -> tuple[PretrainedConfig, EagleOptions]:
    """The layer's config, and the rest.

    Raises:
        FileNotFoundError: the folder has no config.json.
        UnsupportedModelError: not an EAGLE-3 checkpoint, or one of another form.
        ValueError: it does not fit `target`.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json: method='eagle3' takes the folder of an EAGLE-3 checkpoint"
        )
    given: dict[str, Any] = json.loads(path.read_text())
    by_speculators = given.get("speculators_model_type")
    names = f"{by_speculators or ''} {' '.join(given.get('architectures') or ())}".lower()
    layer = given.get("transformer_layer_config", given)
    if "eagle3" not in names or "draft_vocab_size" not in given:
        raise UnsupportedModelError(
            f"{folder} is not an EAGLE-3 checkpoint: its config.json names {names.strip() or 'nothing'}"
        )
    kind = layer.get("model_type", "llama")
    if kind not in LAYERS or layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(
            f"{folder}: a head of {layer.get('num_hidden_layers')} {kind} layers: expected one layer of {', '.join(LAYERS)}"
        )
    config = AutoConfig.for_model(**{**layer, "model_type": kind, "num_hidden_layers": 1, "layer_types": None})
    options = _options(given, target)
    for name, own, model in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if own != model:
            raise ValueError(f"{folder}: the head is for a model with a {name} of {own}, and this one has {model}")
    return config, options


def _options(given: dict[str, Any], target: ModelSpec) -> EagleOptions:
    count, own = target.num_hidden_layers, given.get("eagle_config") or {}
    layers = given.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    layers = sorted(layers or {2, count // 2, count - 3})
    if len(set(layers)) != len(layers) or not 0 <= layers[0] <= layers[-1] < count:
        raise UnsupportedModelError(
            f"the head reads the inputs of layers {layers}: expected different ones, from 0 to {count - 1}"
        )
    flags = {
        name: bool(given.get(name, False))
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    return EagleOptions(given["draft_vocab_size"], tuple(layers), **flags)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors by their names in `Eagle3Head`, on the CPU. Pickled ones are read without running code.
    Raises WeightsError: no weights, or unreadable ones."""
    return {name: tensor for name, tensor in map(_renamed, _tensors(folder)) if not name.startswith(LEFT_OUT)}


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if (folder / PICKLED).is_file() and not list(folder.glob("*.safetensors")):
        loaded: dict[str, torch.Tensor] = torch.load(folder / PICKLED, "cpu", weights_only=True, mmap=True)
        return iter(loaded.items())
    return iter_safetensors(folder)


def _renamed(given: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    name, tensor = given
    return name.removeprefix("model.").replace("midlayer.", "layers.0."), tensor
