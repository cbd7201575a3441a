"""The parts of a transformers model, by a row of core/families.py or by structure, and its `ModelSpec`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ...core.families import ENCODER_DECODERS, FAMILIES, TRANSFORMERS_FAMILIES, Family, is_encoder, num_labels_of
from ...core.model_spec import (
    LENGTH_DEPENDENT_ROPE,
    ModelSpec,
    rope_boundary,
    rope_growth,
    rope_scalings,
)
from ...core.unsupported import UnsupportedModelError
from .probed import ProbedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BY_STRUCTURE = frozenset({"embed", "resid_pre", "resid_post", "final_norm", "logits"})
"""Kinds of sites that are found in a family without a row."""
UNBOUNDED_CONTEXT = 32768
"""Positions of the longest sequence if the config states none (ALiBi)."""
NEURONS = ("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size")
"""Settings with the number of an MLP's neurons, by family."""


def config_spec(config: PretrainedConfig, dtype: torch.dtype) -> ModelSpec:
    """Spec of a model before it is built, from its config. `model_spec` replaces it."""
    text: Any = config.get_text_config()
    if getattr(text, "num_hidden_layers", None) is None:
        raise UnsupportedModelError(
            f"{text.model_type!r} models cannot be served: their config has no num_hidden_layers"
        )
    heads = _setting(text, "num_attention_heads") or 1
    ropes = rope_scalings(text)
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len", "seq_length"))
    context_len = next((limit for limit in limits if limit), UNBOUNDED_CONTEXT)
    return ModelSpec(
        family=_row(text) or Family(name=text.model_type),
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=_setting(text, "num_key_value_heads") or heads,
        head_dim=_setting(text, "head_dim") or text.hidden_size // heads,
        intermediate_size=next(filter(None, (_setting(text, name) for name in NEURONS)), 4 * text.hidden_size),
        vocab_size=text.vocab_size,
        context_len=int(context_len * rope_growth(ropes)),
        sliding_windows=(None,) * text.num_hidden_layers,
        rope_depends_on_length=any(rope.get("rope_type") in LENGTH_DEPENDENT_ROPE for rope in ropes),
        rope_boundary=rope_boundary(ropes, context_len),
        dtype=dtype,
        num_labels=num_labels_of(config),
        bidirectional=is_encoder(config),
    )


def _setting(text: Any, name: str) -> Any:
    """A setting; None if the layers do not share one."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # the layers differ in it
        return None


def _row(text: Any) -> Family | None:
    return FAMILIES.get(text.model_type) or TRANSFORMERS_FAMILIES.get(text.model_type)


def family_of(model: PreTrainedModel, spec: ModelSpec) -> Family:
    """The model's row, or the row found from its structure.
    Raises UnsupportedModelError: it has no list of decoder layers, no embedding or no head."""
    row = _row(model.config.get_text_config()) if spec.source is None else ENCODER_DECODERS[spec.family.name]
    paths = {module: path for path, module in model.named_modules()}
    if row is not None and row.layers not in paths.values():
        row = row.below("model.language_model")  # of a model with images
    if row is not None and all(path in paths.values() for path in (row.layers, row.head)):
        return replace(row, mixers=_mixers_of(model, row)) if row.mixers else row
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    lists = [
        (path.count("."), path, module)
        for module, path in paths.items()
        if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in path.split("."))
    ]
    # A config may count a decoder layer of two attentions twice.
    lengths = {len(module) for _, _, module in lists}
    length = spec.num_hidden_layers if spec.num_hidden_layers in lengths else max(lengths, default=0)
    layers = [found for found in lists if len(found[2]) == length]
    if embed not in paths or head not in paths or not layers:
        parts = {"an embedding": embed in paths, "a head": head in paths, "a list of decoder layers": bool(layers)}
        lacking = ", ".join(part for part, found in parts.items() if not found)
        raise UnsupportedModelError(f"{type(model).__name__} cannot be served: it has no {lacking.partition(' ')[2]}")
    _, path, found = min(layers, key=lambda entry: entry[0])
    parent = model.get_submodule(path.rpartition(".")[0])
    norms = [name for name, child in parent.named_children() if "norm" in type(child).__name__.lower()]
    attention = next((name for name, _ in found[0].named_children() if "att" in name.lower()), "self_attn")
    known = Family(name=model.config.model_type)
    return Family(
        name=model.config.model_type,
        embed=paths[embed],
        layers=path,
        final_norm=".".join([*path.split(".")[:-1], norms[-1] if norms else "norm"]),
        head=paths[head],
        attention=attention,
        missing=frozenset(known.points) - BY_STRUCTURE,
    )


def _mixers_of(model: PreTrainedModel, row: Family) -> tuple[str, ...]:
    """The child that mixes tokens, of each layer."""
    layers = model.get_submodule(row.layers).children()
    return tuple(next(name for name in row.mixers if getattr(layer, name, None) is not None) for layer in layers)


def model_spec(
    model: PreTrainedModel, family: Family, declared: ModelSpec, found: ProbedModel, has_states: bool = False
) -> ModelSpec:
    """Spec of a model, from its first pass. Kinds of sites are omitted if their values are not where the family has them.

    Args:
        declared: spec according to the config.
        has_states: whether it has modules with recurrent states.

    Raises:
        UnsupportedModelError: the pool cannot hold the heads of all its layers, or they run more than once.
    """
    num_kv_heads = max((call.num_kv_heads for call in found.calls), default=declared.num_key_value_heads)
    if any(num_kv_heads % call.num_kv_heads or call.num_heads % num_kv_heads for call in found.calls):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: the heads of its attention layers are no multiples of each other"
        )
    num_layers = len(model.get_submodule(family.layers))  # pyright: ignore[reportArgumentType]
    resid = found.states.get((family.layers + ".0", "output"))
    if resid is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: its decoder layers run more than once a pass"
        )
    windows = [call.window for call in found.calls]
    one_each = len(found.calls) == num_layers
    spec = replace(
        declared,
        num_hidden_layers=num_layers,
        hidden_size=resid.shape[2:].numel(),  # of several streams (hyper-connections), all
        num_attention_heads=max((call.num_heads for call in found.calls), default=declared.num_attention_heads),
        num_key_value_heads=num_kv_heads,
        head_dim=max((max(call.head_dims) for call in found.calls), default=declared.head_dim),
        vocab_size=found.logits.shape[-1] if declared.num_labels is None else declared.vocab_size,
        sliding_windows=tuple(windows) if one_each else (None,) * num_layers,
        cuts_edges=one_each and not found.cached and not has_states and not declared.bidirectional,
        has_states=has_states,
    )
    shape = spec.num_key_value_heads, {spec.head_dim}
    alike = all((call.num_kv_heads, set(call.head_dims)) == shape for call in found.calls)
    spec = replace(spec, kv_by_layer=one_each and alike)
    points = {point: found.states.get((point.module.format(0), point.end)) for point in family.points.values()}
    neurons = points.get(family.points["mlp_act"]) if "mlp_act" in family.points else None
    if neurons is not None:
        spec = replace(spec, intermediate_size=neurons.shape[-1])
    if family.qkv and (fused := points.get(family.points["q"])) is not None:
        projected = (fused.shape[-1] // spec.head_dim - spec.num_attention_heads) // 2
        if projected and num_kv_heads % projected == 0:
            spec = replace(spec, num_projected_kv_heads=projected)
    missing = {kind for kind, point in family.points.items() if not _is_there(kind, point, points[point], spec, model)}
    if missing & {"resid_pre", "resid_post"}:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: its decoder layers do not carry hidden states [1, tokens, hidden]"
        )
    if "embed" in family.points and "embed" not in missing:
        embedded, stream = points[family.points["embed"]], points[family.points["resid_pre"]]
        assert embedded is not None and stream is not None
        if not torch.equal(embedded, stream):
            missing.add("embed")
    return replace(spec, family=replace(family, missing=family.missing | (missing - {"logits"})))


def _is_there(kind: str, point: Any, state: torch.Tensor | None, spec: ModelSpec, model: nn.Module) -> bool:
    """Whether a kind's value is at its point in each layer, with one row for each token."""
    width = sum(map(spec.width, "qkv")) if spec.family.is_slice(kind) else spec.width(kind)
    if state is not None and kind.startswith("resid_") and state.ndim == 4:  # streams
        state = state.flatten(2)
    if state is None or state.ndim != 3 or state.shape[0] != 1 or state.shape[-1] != width:
        return False
    modules = dict(model.named_modules())
    layers = range(spec.num_hidden_layers) if "{}" in point.module else [0]
    return all(point.module.format(i) in modules for i in layers)
