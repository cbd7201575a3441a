"""The files of sentence-transformers beside a model, as a `Pooler`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from ...core.model_spec import ModelSpec
from .pooler import ACTIVATIONS, MODES, NAMES, Dense, Pooler


def last_site(spec: ModelSpec) -> str:
    """Site of transformers' `last_hidden_state`."""
    return "final_norm" if "final_norm" in spec.family.points else f"resid_post.{spec.num_hidden_layers - 1}"


def pooler_of(folder: Path | None, encoder: bool) -> Pooler:
    """The defaults of the model in a folder.

    Args:
        encoder: whether attention is bidirectional: the first token stands for a text there, without `modules.json`.
    """
    plain = Pooler(modes=("cls" if encoder else "last",))
    if folder is None or not (folder / "modules.json").is_file():
        return plain
    try:
        return _of_modules(folder, plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        return replace(plain, why_not=f"{folder.name}/modules.json: {type(error).__name__}: {error}")


def _of_modules(folder: Path, plain: Pooler) -> Pooler:
    pooling, dense, normalize, where = None, list[Dense](), False, None
    for module in _json(folder / "modules.json"):
        kind, path = module["type"].rpartition(".")[2], folder / module.get("path", "")
        if normalize and kind != "Normalize":
            raise ValueError(f"{kind} after Normalize is not supported")
        if kind == "Transformer":
            where = path
        elif kind == "Pooling":
            pooling = _json(path / "config.json")
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind == "Normalize":
            normalize = True
        else:
            raise ValueError(f"modules of type {kind} are not supported")
    if where is None:
        raise ValueError("there is no Transformer among its modules")
    own = _optional(where / "sentence_bert_config.json")
    if (task := own.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise ValueError(f"transformer_task {task} is not supported")
    general = _optional(folder / "config_sentence_transformers.json")
    length = own.get("max_seq_length")
    return replace(
        plain,
        modes=plain.modes if pooling is None else _modes(pooling),
        normalize=normalize,
        dense=tuple(dense),
        prompts={name: text for name, text in (general.get("prompts") or {}).items() if text is not None},
        default_prompt=general.get("default_prompt_name"),
        include_prompt=pooling is None or pooling.get("include_prompt", True),
        max_tokens=length if isinstance(length, int) and length > 0 else None,
        lower_case=bool(own.get("do_lower_case", False)),
    )


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Poolings of a module's config: `pooling_mode`, or a field for each."""
    given = config.get("pooling_mode")
    if given is not None:
        found = [NAMES.get(name, name) for name in ([given] if isinstance(given, str) else given)]
    else:
        order = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "last")  # sentence-transformers'
        found = [name for name in order if config.get(MODES[name])] or ["mean"]
    if not set(found) <= MODES.keys():
        raise ValueError(f"pooling {found} is not supported")
    return tuple(found)


def _dense(folder: Path) -> Dense:
    config = _json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ValueError(f"dense layers with {activation} are not supported")
    where = {config.get(name) or "sentence_embedding" for name in ("module_input_name", "module_output_name")}
    if config.get("use_residual") or where != {"sentence_embedding"}:
        raise ValueError("dense layers with a residual, or of other inputs than the pooled row, are not supported")
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder.name} has no model.safetensors; pickles are not read")
    found = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("linear."): value.float().numpy() for name, value in found.items()}
    return Dense(tensors["weight"], tensors.get("bias"), activation)


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _optional(file: Path) -> dict[str, Any]:
    return _json(file) if file.is_file() else {}
