"""Static description of a model: sizes, module paths (a row of core/families.py), and site numbers.

    spec = ModelSpec.of(hf_config, torch.bfloat16)
    spec.num_hidden_layers, spec.head_dim, spec.shape("q")
    spec.family.points["mlp_act"]        # SitePoint("model.layers.{}.mlp.down_proj", "input")

Site numbers. Residual add 0 is the embedding, residual add ``2 * i + 1`` follows layer i's attention, and ``2 * i + 2`` its MLP.
Each has two sites, the delta that is added and the sum::

    site 2 * residual_add         attn_out.i, mlp_out.i
    site 2 * residual_add + 1     embed (resid_pre.0), resid_mid.i, resid_post.i (resid_pre.i+1)
    site 4 * layers + 2           final_norm: the input of the head

Then come the inner sites (`INNER_SITES` of each layer), and last the logits. Inner sites are not part of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from .families import (
    EXPERTS,
    FAMILIES,
    HEAD_SITES,
    INNER_SITES,
    KV,
    LOGITS,
    MROPE_SECTIONS,
    NUMBERED_SITES,
    OF_PASSES,
    PATTERN,
    STATE,
    STREAM_SITES,
    Family,
    SiteLike,
    SitePoint,
    num_labels_of,
    text_name,
)

__all__ = [
    "EXPERTS", "FAMILIES", "HEAD_SITES", "INNER_SITES", "KV", "LOGITS", "NUMBERED_SITES", "OF_PASSES", "PATTERN",
    "STATE", "STREAM_SITES", "Family", "ModelSpec", "SiteLike", "SitePoint", "StatePlace",
]  # fmt: skip

OF_ENCODER, OF_VISION = "encoder.", "vision."
"""Prefixes of the names of sites in an encoder, and in a vision tower: "encoder.resid_post.3"."""
VISION_OUT = "vision.out"
"""Site of the states that the language model reads in an image's placeholders, behind the projector."""
DEEPSTACK = "vision.deepstack."
"""Prefix of the sites of states that the language model adds behind its first layers, in an image's placeholders (Qwen3-VL)."""
_LAYER: dict[str, Any] = {
    "attention_norm": "layer_norm1",
    "o_proj": "out_proj",
    "mlp_norm": "layer_norm2",
    "down_proj": "fc2",
}
_BLOCK: dict[str, Any] = {"attention_norm": "norm1", "attention": "attn", "o_proj": "proj", "mlp_norm": "norm2"}
_DEEPSTACK_BLOCK: dict[str, Any] = {**_BLOCK, "down_proj": "linear_fc2"}
_NO_TOWER = frozenset({"embed", "attn_in", "q", "k", "v", "mlp_in", "final_norm", "logits"})
VISION_TOWERS = {
    name: Family(name=name, layers=f"model.{layers}", missing=_NO_TOWER, **children)
    for name, layers, children in (
        ("qwen2_5_vl", "visual.blocks", _BLOCK),
        ("qwen3_vl", "visual.blocks", _DEEPSTACK_BLOCK),
        *((name, "vision_model.encoder.layers", _LAYER) for name in ("smolvlm", "idefics3")),
        *((name, "vision_tower.encoder.layers", _LAYER) for name in ("llava", "llava_onevision", "gemma3")),
    )
}
"""Vision towers, by the whole config's `model_type`. Sites of these are named with the prefix `vision.`."""
_PROJECTOR = Family(name="projector", missing=frozenset({*Family(name="").points} - {"embed"}))
_LEVELS = Family(name="deepstack", missing=frozenset({*Family(name="").points} - {"resid_post"}))
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""RoPE scalings with frequencies that depend on the length of the sequence."""


def has_images(config: Any) -> bool:
    """Whether a model reads images, by its config."""
    return getattr(config, "vision_config", None) is not None


def rope_scalings(text: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of a text config: one dict, or one for each type of layers."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]


def rope_growth(ropes: Sequence[dict[str, Any]]) -> float:
    """The factor by which dynamic scaling extends the context."""
    return max([rope.get("factor", 1.0) for rope in ropes if rope.get("rope_type") == "dynamic"], default=1.0)


def rope_boundary(ropes: Sequence[dict[str, Any]], context_len: int) -> int | None:
    """`ModelSpec.rope_boundary` of these RoPE parameters. Raises ValueError: types of layers with different boundaries."""
    found = {
        int(rope.get("original_max_position_embeddings") or context_len)
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    }
    if len(found) > 1:
        raise ValueError(f"original_max_position_embeddings differs between the layers' longrope scalings: {found}")
    return found.pop() if found else None


def attention_add(layer: int) -> int:
    """The residual add of a layer's attention."""
    return 2 * layer + 1


def mlp_add(layer: int) -> int:
    """The residual add of a layer's MLP."""
    return 2 * layer + 2


def input_add(layer: int) -> int:
    """The residual add that makes a layer's input; of the layer after the last, the final norm's input."""
    return 2 * layer


def delta_site(residual_add: int) -> int:
    """The site of the delta at a residual add."""
    return 2 * residual_add


def residual_site(residual_add: int) -> int:
    """The site of the sum at a residual add."""
    return 2 * residual_add + 1


EMBED_SITE = residual_site(input_add(0))


def final_norm_site(num_layers: int) -> int:
    """The site of the final norm's output."""
    return residual_site(input_add(num_layers)) + 1


def inner_site(num_layers: int, layer: int, kind: str) -> int:
    """The site of an inner kind in a layer, or of the logits (in any layer)."""
    first = final_norm_site(num_layers) + 1
    if kind == LOGITS:
        return first + len(INNER_SITES) * num_layers
    return first + len(INNER_SITES) * layer + INNER_SITES.index(kind)


def layers_to(site: int, num_layers: int) -> int:
    """Number of layers that a pass runs to reach a site. It is above `num_layers` for the logits."""
    inner = site - final_norm_site(num_layers) - 1
    return (site // 2 + 1) // 2 if inner < 0 else inner // len(INNER_SITES) + 1


def num_sites(num_layers: int) -> int:
    """Number of sites in a model, without the logits, which are not part of a captured pass."""
    return inner_site(num_layers, 0, LOGITS)


def site_index(site: SiteLike, num_layers: int) -> int:
    """The number of a site in a model with `num_layers` layers. Raises ValueError: a kind without a number."""
    kind, layer = site.kind, site.layer or 0
    if kind not in NUMBERED_SITES:
        raise ValueError(
            f"{site}: interventions act at {', '.join(NUMBERED_SITES)}; a trace (`with lm.generate(...)`) can edit the others"
        )
    match kind:
        case "embed" | "resid_pre":
            return residual_site(input_add(layer))
        case "attn_out":
            return delta_site(attention_add(layer))
        case "resid_mid":
            return residual_site(attention_add(layer))
        case "mlp_out":
            return delta_site(mlp_add(layer))
        case "resid_post":
            return residual_site(mlp_add(layer))
        case "final_norm":
            return final_norm_site(num_layers)
        case _:
            return inner_site(num_layers, layer, kind)


_SHAPES = {
    "q": ("num_attention_heads", "head_dim"),
    "k": ("num_key_value_heads", "head_dim"),
    "v": ("num_key_value_heads", "head_dim"),
    "z": ("num_attention_heads", "head_dim"),
    PATTERN: ("num_attention_heads",),
    "mlp_act": ("intermediate_size",),
    "router": ("num_experts",),
    EXPERTS: ("num_experts_per_tok",),
    "logits": ("vocab_size",),
}
"""Kind of site -> the config's settings that make the shape of its state; hidden_size for all others."""


class StatePlace(NamedTuple):
    """The number of a layer's recurrent state among the states of a slot, and its shape for one request."""

    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The facts of a model that the runner, the layers and the hooks need. Fields have the names of the config's settings."""

    family: Family
    num_hidden_layers: int
    hidden_size: int
    """Width of the residual stream; of all streams together with hyper-connections."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    """Positions of the longest sequence, after dynamic RoPE scaling."""
    sliding_windows: tuple[int | None, ...]
    """Window of each layer in tokens, including the query's own; None: full attention."""
    rope_depends_on_length: bool
    """Whether a position's rotation depends on the length of its sequence."""
    rope_boundary: int | None = None
    """Length above which longrope rotates all positions of a sequence by other factors; None for other scalings."""
    dtype: torch.dtype
    """dtype of weights and hidden states."""
    cuts_edges: bool = True
    """Whether edges of attention can be cut (`Knockout`)."""
    kv_by_layer: bool = True
    """Whether the cache has one K and V of a layer and position, of `num_key_value_heads` and `head_dim`."""
    has_states: bool = False
    """Whether layers have recurrent states, of the whole sequence so far, in place of K and V by position."""
    states: tuple[StatePlace | None, ...] = ()
    """Recurrent state of each layer; None: the layer has none."""
    num_experts: int = 0
    """Experts that a router chooses from; 0 without."""
    num_experts_per_tok: int = 0
    """Experts that it chooses for a token."""
    num_projected_kv_heads: int | None = None
    """Heads of the sites `k` and `v`, where attention repeats them for its queries; None: `num_key_value_heads`."""
    source: ModelSpec | None = None
    """Spec of the encoder of an encoder-decoder model, or None. Its `context_len` counts positions of the encoder's output."""
    embedding_dim: int | None = None
    """Width of the embedding's rows; None: `hidden_size`."""
    mrope_merge: int | None = None
    """Patches of an image that merge into one token along each side, in models with mrope; else None."""
    bidirectional: bool = False
    """Whether attention goes both ways: a prompt runs in one pass, without KV."""
    num_labels: int | None = None
    """Labels of a classification head in place of the language modelling head; None: the model generates."""
    image_span: int = 0
    """Placeholders of an image, where they attend to each other in both directions (Gemma 3); else 0."""
    vision: ModelSpec | None = None
    """Spec of the vision tower, or None. Its `context_len` is the rows of a tile; 0 where images have patches of any number."""
    num_deepstack: int = 0
    """Layers of a language model that states of images are added behind."""

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> ModelSpec:
        """The spec of a transformers config, or of its `text_config`.

        Raises:
            ValueError: the model type has no row in `FAMILIES`.
        """
        text = getattr(config, "text_config", None) or config
        if text.model_type not in FAMILIES:
            raise ValueError(
                f"no table of sites for {text.model_type!r} models; there is one for {', '.join(FAMILIES)}"
            )
        family, heads = FAMILIES[text.model_type], text.num_attention_heads
        if family.mixers:
            linear, attention = family.mixers
            mixers = [linear if kind == "linear_attention" else attention for kind in text.layer_types]
            family = replace(family, mixers=tuple(mixers))
        ropes, vision = rope_scalings(text), getattr(config, "vision_config", None)
        family = family if vision is None else family.below(f"model.{text_name(config.model_type)}")
        if family.router and (dense := getattr(text, "first_k_dense_replace", 0)):
            family = replace(family, dense_layers=dense)
        return cls(
            family=family,
            num_hidden_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            intermediate_size=getattr(text, "n_inner", None)
            or getattr(text, "intermediate_size", None)
            or 4 * text.hidden_size,
            vocab_size=text.vocab_size,
            context_len=int(text.max_position_embeddings * rope_growth(ropes)),
            sliding_windows=_sliding_windows(text, family),
            rope_depends_on_length=any(r.get("rope_type") in LENGTH_DEPENDENT_ROPE for r in ropes),
            rope_boundary=rope_boundary(ropes, text.max_position_embeddings),
            dtype=dtype,
            num_experts_per_tok=getattr(text, "num_experts_per_tok", None) or 0,
            cuts_edges=not family.mixers,
            has_states=bool(family.mixers),
            num_experts=getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0,
            image_span=getattr(config, "mm_tokens_per_image", 0) if vision is not None else 0,
            mrope_merge=vision.spatial_merge_size if vision is not None and text.model_type in MROPE_SECTIONS else None,
            num_labels=num_labels_of(config),
            num_deepstack=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
            vision=_tower_spec(config, vision, dtype)
            if vision is not None and config.model_type in VISION_TOWERS
            else None,
        )

    @cached_property
    def parts(self) -> dict[str, ModelSpec]:
        """Prefix of their sites' names -> spec, of the parts that run before the language model. `VISION_OUT` is an `embed`, and
        `DEEPSTACK` the `resid_post` of its layers.
        """
        found = {} if self.source is None else {OF_ENCODER: self.source}
        if self.vision is not None:
            out = replace(self.vision, family=_PROJECTOR, num_hidden_layers=0, hidden_size=self.hidden_size)
            found |= {OF_VISION: self.vision, VISION_OUT: out}
        if self.vision is not None and self.num_deepstack:
            own = replace(
                self.vision, family=_LEVELS, num_hidden_layers=self.num_deepstack, hidden_size=self.hidden_size
            )
            found[DEEPSTACK] = own
        return found

    @property
    def sliding_window_size(self) -> int | None:
        """Widest sliding window of the layers, or None where some layer sees the whole context."""
        windows = [window for window in self.sliding_windows if window]
        return max(windows) if len(windows) == self.num_hidden_layers else None

    @property
    def num_logits(self) -> int:
        """Width of the logits: labels of a classification head, or else token ids."""
        return self.vocab_size if self.num_labels is None else self.num_labels

    @property
    def embedding_size(self) -> int:
        """Width of the token embeddings."""
        return self.embedding_dim or self.hidden_size

    def kv_layer(self, layer: int) -> int:
        """The layer of the KV pool that an attention layer of a native family has."""
        mixers = self.family.mixers
        return mixers[:layer].count(self.family.attention) if mixers else layer

    def shape(self, kind: str) -> tuple[int, ...]:
        """Shape of one state: (heads, head_dim) at `q`, `k`, `v` and `z`. At `experts`: (2, chosen), ids, scores. Else (width,)."""
        if kind == EXPERTS:
            return 2, self.num_experts_per_tok
        if kind in ("k", "v") and self.num_projected_kv_heads is not None:
            return self.num_projected_kv_heads, self.head_dim
        return tuple(getattr(self, setting) for setting in self.settings(kind))

    def width(self, kind: str) -> int:
        """Number of values in one position's state: the width of a vector for this kind."""
        return prod(self.shape(kind))

    def settings(self, kind: str) -> tuple[str, ...]:
        """The config's settings that make the shape."""
        if kind == LOGITS and self.num_labels is not None:
            return ("num_labels",)
        return _SHAPES.get(kind, ("hidden_size",))


def _tower_spec(config: Any, vision: Any, dtype: torch.dtype) -> ModelSpec:
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    side = getattr(vision, "image_size", 0) // vision.patch_size
    return ModelSpec(
        family=VISION_TOWERS[config.model_type],
        num_hidden_layers=layers,
        hidden_size=vision.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=vision.hidden_size // heads,
        intermediate_size=vision.intermediate_size,
        vocab_size=1,
        context_len=side**2 + vision.model_type.startswith("clip"),
        sliding_windows=(None,) * layers,
        rope_depends_on_length=False,
        dtype=dtype,
        cuts_edges=False,
    )


def _sliding_windows(text: Any, family: Family) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None) if family.sliding_window else None
    layer_types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return tuple([window if layer_type == "sliding_attention" else None for layer_type in layer_types])
