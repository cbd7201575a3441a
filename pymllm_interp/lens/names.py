"""Locations of `TransformerBridge`'s hook points in an engine.

TransformerLens' adapter for the architecture gives the names and the modules behind them. A value with a declared site is captured
in the fused pass. A trace reads any other value at its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformer_lens.hook_points import HookPoint, LensHandle

from ..core.model_spec import INNER_SITES, NUMBERED_SITES, PATTERN, ModelSpec
from ..hooks.site import Site, path_names

_NORM = "hook_in", "hook_scale", "hook_normalized", "hook_out"
_EAGER = "hook_rot_q", "hook_rot_k", "hook_attn_scores", "hook_pattern"
"""Hook points within an attention, in its order: transformers' own attention computes them, operation by operation."""
_IN_LAYER = (
    "hook_in", *(f"ln1.{end}" for end in _NORM), "attn.hook_in", "attn.q.hook_in", "attn.q.hook_out", "attn.k.hook_in",
    "attn.k.hook_out", "attn.v.hook_in", "attn.v.hook_out", *(f"attn.{name}" for name in _EAGER), "attn.o.hook_in",
    "attn.hook_result", "attn.o.hook_out",
    "attn.hook_out", *(f"ln1_post.{end}" for end in _NORM), *(f"ln2.{end}" for end in _NORM), "mlp.hook_in", "mlp.gate.hook_in",
    "mlp.gate.hook_out", "mlp.in.hook_in", "mlp.in.hook_out", "mlp.out.hook_in", "mlp.out.hook_out", "mlp.hook_out",
    *(f"ln2_post.{end}" for end in _NORM), "hook_out",
)  # fmt: skip
"""Hook points of a layer, in the order of a forward pass."""
_BEFORE = "embed.hook_in", "embed.hook_out", "pos_embed.hook_out"
_AFTER = (*(f"ln_final.{end}" for end in _NORM), "unembed.hook_in", "unembed.hook_out")
_READ_BY = {f"attn.{part}.hook_in": "attn.hook_in" for part in "qkv"} | {
    f"mlp.{part}.hook_in": "mlp.hook_in" for part in ("gate", "in")
}
"""Hook points with the value of another one."""
_HEADS = {"attn.q.hook_out": "q", "attn.k.hook_out": "k", "attn.v.hook_out": "v", "attn.o.hook_in": "z"}
"""Hook points with heads -> kind of site."""
UNSERVED = (
    "blocks.{}.hook_mlp_in",
    *(
        f"blocks.{{}}.attn.{name}"
        for name in (
            *_EAGER, "hook_result", "hook_cos", "hook_sin", "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input",
            "hook_q_normed", "hook_k_normed", "hook_hidden_states", "hook_z_gated",
        )
    ),
)  # fmt: skip
"""Hook points of `TransformerBridge` that are not served, of all models or of some."""

Part = Literal["value", "normed", "scale", "normalized", "result"]
_PARTS: dict[str, Part] = {"hook_scale": "scale", "hook_normalized": "normalized", "hook_result": "result"}


@dataclass(frozen=True)
class Place:
    """Location of a hook point's value.

    Attributes:
        name: name of the hook point.
        order: places of one model sort by it as a forward pass reaches them.
        module: path of the module; "" within an attention.
        end: end of the module that has the value, or that `part` is computed from.
        kind: kind of site with the value's heads, or "".
        part: part of a norm or head: "scale" is the norm's divisor, "normalized" its output without gain and bias.
            "result" is what each head adds to the stream: z of the head times its rows of W_O.
        site: the declared site that `captured_part` makes the value of; None: only a trace has it.
        captured_part: "normed" is the output of `norm`.
        norm: path of the norm of `part` and `captured_part`, or "".
        edit_instead: hook point to edit instead of this one, which is read-only; "" if it can be edited.
    """

    name: str
    order: tuple[int, int]
    module: str
    end: Literal["input", "output"]
    kind: str
    part: Part
    site: Site | None
    captured_part: Part
    norm: str
    edit_instead: str

    @property
    def hook(self) -> str:
        """The name's last part, such as `hook_out`."""
        return self.name.rpartition(".")[2]

    @property
    def is_eager(self) -> bool:
        """Whether the value is within an attention. A pattern is captured, or transformers' own attention computes it."""
        return self.hook in _EAGER

    @property
    def needs_eager(self) -> bool:
        """Whether only transformers' own attention has the value."""
        return self.is_eager and self.site is None

    @property
    def is_square(self) -> bool:
        """Whether the value is [batch, heads, queries, keys]: attention patterns and scores."""
        return self.hook in ("hook_pattern", "hook_attn_scores")


def places_of(components: Mapping[str, Any], spec: ModelSpec, inner_sites: frozenset[str]) -> dict[str, Place]:
    """The places of all hook points that an engine serves, by name.

    Args:
        components: `component_mapping` of TransformerLens' adapter.
        spec: spec of the engine's model.
        inner_sites: kinds of inner sites that the engine captures.
    """
    layers = components["blocks"]
    found = [place for name in _BEFORE for place in _place(name, (-1, _BEFORE.index(name)), components, "", None, spec)]
    for layer in range(spec.num_hidden_layers):
        path = f"{layers.name}.{layer}"
        for index, name in enumerate(_IN_LAYER):
            found += _place(name, (layer, index), layers.submodules, path, layer, spec)
    last = spec.num_hidden_layers
    found += [place for i, name in enumerate(_AFTER) for place in _place(name, (last, i), components, "", None, spec)]
    served = frozenset(NUMBERED_SITES) - frozenset(INNER_SITES) | inner_sites | {PATTERN}
    return {place.name: _only(place, served) for place in found}


def _place(
    name: str, order: tuple[int, int], components: Mapping[str, Any], path: str, layer: int | None, spec: ModelSpec
) -> Iterator[Place]:
    """The place of a hook point, if the architecture has its component."""
    *parents, hook = name.split(".")
    for part in parents:
        if part not in components:
            return
        component = components[part]
        path, components = f"{path}.{component.name}".strip("."), component.submodules or {}
        if hook.startswith("hook_rot") and not _rotates(component):
            return
    if name == "attn.hook_result":
        if "o" not in components:
            return
        path = f"{path}.{components['o'].name}"
    kind = _HEADS.get(name, "z" if name == "attn.hook_result" else "")
    if spec.family.is_slice(kind):
        path = spec.family.points[kind].module.format(layer)
    shared = (
        name in _READ_BY and spec.family.qkv != "" and name.startswith("attn")
    )  # one projection reads for q, k and v
    if shared:
        order = order[0], _IN_LAYER.index("attn.q.hook_in")
        path = spec.family.points["q"].module.format(layer)
    part = _PARTS.get(hook, "value")
    end: Literal["input", "output"] = "output" if hook == "hook_out" else "input"
    site, captured, norm = _captured(_READ_BY.get(name, name), path, end, part, layer, spec)
    whole, instead = name if layer is None else f"blocks.{layer}.{name}", ""
    if part in ("scale", "normalized"):
        norm, instead = path, f"{whole.rpartition('.')[0]}.hook_out"
    elif shared:
        instead = f"blocks.{layer}.attn.hook_in"
    yield Place(whole, order, "" if hook in _EAGER else path, end, kind, part, site, captured, norm, instead)


def _rotates(attention: Any) -> bool:
    """Whether queries and keys are rotated, and nothing comes between this and the scores."""
    return hasattr(attention, "hook_rot_q") and not getattr(attention.config, "qk_norm_after_rope", False)


def _captured(
    name: str, path: str, end: str, part: Part, layer: int | None, spec: ModelSpec
) -> tuple[Site | None, Part, str]:
    """(site, part that the value is computed by, path of the norm that computes it)."""
    family = spec.family
    if name in _HEADS:
        kind = _HEADS[name]
        return (Site(kind, layer) if kind in family.points else None), "value", ""
    if name == "attn.hook_result":
        return (Site("z", layer) if "z" in family.points else None), part, ""
    if name == "attn.hook_pattern":
        return (Site(PATTERN, layer) if spec.cuts_edges else None), "value", ""
    if name == "unembed.hook_out" or name.removeprefix("attn.") in _EAGER:
        return None, "value", ""  # the logits of a pass are behind a soft-cap
    if name == "ln_final.hook_in" or (path == family.final_norm and part != "value"):
        return Site("resid_post", spec.num_hidden_layers - 1), part, ""
    if name == "unembed.hook_in":
        return Site("final_norm"), "value", ""
    template = path if layer is None else path.replace(f"{family.layers}.{layer}", f"{family.layers}.{{}}", 1)
    if name in ("attn.hook_in", "mlp.hook_in"):
        norm, before = (
            (family.attention_norm, "resid_pre") if name == "attn.hook_in" else (family.mlp_norm, "resid_mid")
        )
        if {"attn_in" if name == "attn.hook_in" else "mlp_in", before} <= family.points.keys():
            return Site(before, layer), "normed", f"{family.layers}.{layer}.{norm}"
        return None, "value", ""
    kind = path_names(family).get(f"{template}.{end}")
    if kind in ("attn_in", "mlp_in"):
        before = "resid_pre" if kind == "attn_in" else "resid_mid"
        return (Site(before, layer), "normed", path) if before in family.points else (None, "value", "")
    return (None if kind is None else Site(kind, layer)), part, ""


def _only(place: Place, served: frozenset[str]) -> Place:
    """The place, without a site that the engine does not capture."""
    if place.site is None or place.site.kind in served:
        return place
    return Place(**{**place.__dict__, "site": None})


def norm_part(part: Part, x: torch.Tensor, norm: Any, centered: bool, eps: float) -> torch.Tensor:
    """Part of a norm of its input x [..., width].

    Args:
        part: "scale" [..., 1] and "normalized" [..., width] are float32 for half precision, as TransformerLens has them.
        norm: the module.
        centered: whether the norm subtracts the mean: a LayerNorm.
        eps: epsilon of the norm.
    """
    if part == "normed":
        return norm(x)
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if centered:
        x = x - x.mean(-1, keepdim=True)
    scale = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return scale if part == "scale" else x / scale


GRADIENTS = "gradients are those of a trace: `with lm.trace(prompt):` and `with loss.backward():`, or lm.attribute"


class BridgePoint(HookPoint):
    """A hook point. Its functions read and edit forward passes.

    Args:
        name: name of the hook point.
        served: whether the engine has the value.
    """

    def __init__(self, name: str, served: bool = True) -> None:
        super().__init__()
        self.name, self.served = name, served

    def add_hook(
        self, hook: Callable[..., Any], dir: Literal["fwd", "bwd"] = "fwd", *args: Any, **kwargs: Any
    ) -> LensHandle:
        """Add a hook function, as `HookPoint.add_hook`.
        Raises NotImplementedError: a backward hook, or a point with a value that the engine does not have."""
        if dir == "bwd":
            raise NotImplementedError(f"{self.name}: Bridge has no backward hooks; {GRADIENTS}")
        if not self.served:
            raise NotImplementedError(f"this engine has no value for {self.name}; bridge.hook_dict has the names")
        return super().add_hook(hook, dir, *args, **kwargs)
