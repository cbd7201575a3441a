"""Sites: the named places of a model that interventions edit and captures read.

    Site.parse("resid_post.12")                            # the canonical form, kind.layer
    Site.parse("blocks.12.hook_resid_post")                # TransformerLens
    Site.parse("model.layers.12")                          # a module's output; ".input" names its input
    Site.parse("layers_output[12]")                        # nnterp
    expand("mlp_out.{0..2,-1}", 32, FAMILIES["llama"])     # mlp_out.0, mlp_out.1, mlp_out.2, mlp_out.31

The first four name the same site, `resid_post.12`. In a pattern the layer is `*`, a number, or numbers and inclusive ranges in
braces. Negative numbers count from the last layer. Patterns work in every style of name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from ..core.families import LayerPath
from ..core.limits import MAX_SITE_LENGTH
from ..core.model_spec import (
    DEEPSTACK,
    FAMILIES,
    NUMBERED_SITES,
    OF_ENCODER,
    OF_PASSES,
    OF_VISION,
    PATTERN,
    VISION_OUT,
    Family,
    ModelSpec,
)
from ..utils.arguments import shown

KINDS = (
    "embed", "resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "cross_attn_out", "resid_mid", "mlp_in", "router", "experts",
    "mlp_act", "shared_out", "mlp_out",
    "resid_post", "final_norm", "logits",
)  # fmt: skip
"""Kinds of sites, in the order of a forward pass.

`embed`: the token embeddings. `resid_pre`, `resid_mid`, `resid_post`: the residual stream before the layer, between attention
and MLP, and after the layer. `attn_in`, `mlp_in`: the normed inputs of attention and MLP. `attn_out`, `mlp_out`: their
outputs, which are added to the residual stream. `cross_attn_out`: the output of attention to an encoder's output. `q`, `k`,
`v`: the projections' outputs, before a query or key norm and before RoPE. `z`: the concatenated heads, the input of `o_proj`.
`router`: the logits over the experts that a mixture of experts chooses from. `experts`: the ids and the scores of the chosen
ones. `mlp_act`: the neurons, the input of `down_proj`. `shared_out`: what shared experts add to the chosen ones. `final_norm`:
the output of the last norm. `logits`: the output of the LM head.
"""
PART_KINDS = {
    OF_ENCODER: (
        "embed", "resid_pre", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_act", "mlp_out", "resid_post", "final_norm",
    ),
    OF_VISION: ("resid_pre", "z", "attn_out", "resid_mid", "mlp_act", "mlp_out", "resid_post", "out", "deepstack"),
}  # fmt: skip
"""Prefix of a part's sites -> kinds of sites that it may have. `VISION_OUT` has no layer; `DEEPSTACK` has the language model's."""
_PARTS = {OF_ENCODER: "an encoder", OF_VISION: "a vision tower"}
WITHOUT_LAYER = frozenset({"embed", "final_norm", "logits"})
NORMED = ("attn_in", "mlp_in")
"""Kinds of sites that no kernel stores: the norm makes their states from the stream's after the pass."""


TRANSFORMER_LENS = {
    "hook_embed": "embed",
    **{f"blocks.{{}}.hook_{kind}": kind for kind in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")},
    **{f"blocks.{{}}.attn.hook_{kind}": kind for kind in "qkvz"},
    "blocks.{}.mlp.hook_post": "mlp_act",
}
"""Names with the values of `HookedTransformer.from_pretrained_no_processing`. Folded value biases change `v` and `z`."""
_NNTERP = {
    "token_embeddings": "embed",
    "layers_input.{}": "resid_pre",
    "attentions_input.{}": "attn_in",
    "attentions_output.{}": "attn_out",
    "mlps_input.{}": "mlp_in",
    "mlps_output.{}": "mlp_out",
    "layers_output.{}": "resid_post",
}


_ALIKE = [family for family in FAMILIES.values() if not family.mixers]
"""Families with layers of one kind."""


def _names() -> dict[str, str]:
    """name -> kind, of all names; `{}` stands for the layer."""
    names = {kind if kind in WITHOUT_LAYER else kind + ".{}": kind for kind in KINDS}
    names |= {f"{kind}.{{}}": kind for kind in OF_PASSES} | {"blocks.{}.attn.hook_pattern": PATTERN}
    names |= TRANSFORMER_LENS | _NNTERP
    for family in _ALIKE:
        names = path_names(family) | names  # the first family's meaning of a name
    return names


def path_names(family: Family) -> dict[str, str]:
    """Module path -> kind, of a family's modules."""
    names = dict(family.other_points)
    for kind, (module, end) in family.points.items():
        if family.is_slice(kind) or isinstance(module, LayerPath):
            continue
        names[f"{module}.{end}"] = kind
        if end == "output":
            names[module] = kind
    return names


NAMES = _names()


def _by_family() -> frozenset[str]:
    """Module paths that are sites of some families, and another state in others with layers at the same path."""
    found: set[str] = set()
    for layers in {family.layers for family in _ALIKE}:
        alike = [path_names(family) for family in _ALIKE if family.layers == layers]
        for name in set().union(*alike):
            if len({names.get(name) for names in alike}) > 1:
                found.add(name)
    return frozenset(found)


BY_FAMILY = _by_family()
_NORMALIZED = (
    "TransformerLens reads it before the norm's weight multiplies; {} is after it, as in transformers. Divide that by the weight, "
    "{}.weight"
)
_IN_A_TRACE = "no declared site; in a trace (`with lm.trace(...)`) read {}"
_NO_PATTERN = "Capture('pattern.3') reads attention patterns; " + (
    EDITED_PATTERNS := "to edit them, see 'Inside attention' in docs/use/trace.md; Knockout cuts edges"
)
REFUSED = {
    **{f"{name}.{{}}": _NO_PATTERN for name in ("attn_pattern", "attn_probs", "attn_scores", "attn_weights")},
    "blocks.{}.attn.hook_attn_scores": _NO_PATTERN,
    "ln_final.hook_normalized": _NORMALIZED.format("final_norm", "lm.model.norm"),
    "blocks.{}.ln1.hook_normalized": _NORMALIZED.format("attn_in", "input_layernorm"),
    "blocks.{}.ln2.hook_normalized": _NORMALIZED.format("mlp_in", "post_attention_layernorm"),
    **{
        f"{norm}.hook_scale": "the norm's divisor: the root mean square of what the norm reads (resid_pre, resid_mid, or the "
        "last resid_post), with its epsilon"
        for norm in ("ln_final", "blocks.{}.ln1", "blocks.{}.ln2")
    },
    **{
        f"blocks.{{}}.attn.hook_rot_{kind}": f"that is {kind} after RoPE; the site {kind} is before it, as hook_{kind} is"
        for kind in "qk"
    },
    "blocks.{}.attn.hook_result": "what each head adds to the stream: z of a head times its columns of o_proj's weight",
    "blocks.{}.mlp.hook_pre": _IN_A_TRACE.format("mlp.gate_proj.output"),
    "blocks.{}.mlp.hook_pre_linear": _IN_A_TRACE.format("mlp.up_proj.output"),
    **{
        f"blocks.{{}}.hook_{kind}_input": "that is the stream before the norm (resid_pre), a copy for each head"
        for kind in "qkv"
    },
    "attention_probabilities.{}": _NO_PATTERN,
    "blocks.{}.hook_attn_in": "that is the stream before the norm (resid_pre); what attention reads is attn_in",
    "blocks.{}.hook_mlp_in": "that is the stream before the norm (resid_mid); what the MLP reads is mlp_in",
}
"""Known names without a site -> the reason."""

_SELECTOR = r"\*|-?\d+|\{[^{}]*\}"
_ITEM = re.compile(r"\s*(-?\d+)\s*(?:\.\.\s*(-?\d+)\s*)?")


@dataclass(frozen=True)
class Site:
    """A named place in the model: ``str(Site("resid_post", 12)) == "resid_post.12"``. Equal sites print alike.

    Args:
        kind: one of `KINDS`.
        layer: None for `embed`, `final_norm` and `logits`. Negative layers count from the end, until `expand` resolves them.

    Raises:
        ValueError: an unknown kind, a missing layer, or a layer of a kind without layers.
    """

    kind: str
    layer: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layer, bool) or not isinstance(self.layer, int | None):
            raise ValueError(f"Site({self.kind!r}, {self.layer!r}): a layer is a whole number")
        if _look_up(str(self))[0] != self.kind:
            raise ValueError(f"Site({self.kind!r}, {self.layer}): a kind is wanted; Site.parse reads other names")

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"{self.kind}.{self.layer}"

    @classmethod
    def parse(cls, name: str) -> Site:
        """The site with this name, in any of the styles above.

        Raises:
            ValueError: an unknown name (the message lists similar ones), a name without a site, or a pattern of several sites.
        """
        if not isinstance(name, str):
            raise ValueError(f"Site.parse({name!r}): a name is expected, such as 'resid_post.12'")
        kind, layers = _look_up(name)
        if layers is not None and not re.fullmatch(r"-?\d+", layers):
            raise ValueError(f"{name!r} may name several sites, and one is wanted: {kind}.0")
        return cls(kind, None if layers is None else int(layers))


class Pattern(str):
    """A canonical pattern that was written as a path of `BY_FAMILY`.

    Attributes:
        written: the path.
    """

    written: str


def canonical(pattern: str | Site) -> str:
    """The pattern as `kind`, `kind.layer`, `kind.*` or `kind.{...}`.

    Raises:
        ValueError: as `Site.parse`, or malformed braces.
    """
    if len(str(pattern)) > MAX_SITE_LENGTH:
        raise ValueError(
            f"the site {shown(str(pattern))} has {len(str(pattern))} characters; at most {MAX_SITE_LENGTH}"
        )
    kind, layers = _look_up(str(pattern))
    if layers is None:
        return kind
    _ranges(layers, str(pattern))
    layers = re.sub(r"\d+", lambda number: str(int(number[0])), layers.replace(" ", ""))  # 01 is 1
    found, written = Pattern(f"{kind}.{layers}"), _written(pattern)
    if _path(written) not in BY_FAMILY:
        return str(found)
    found.written = written
    return found


def kind_of(name: str) -> str:
    """The kind in a canonical name or pattern, without a part's prefix."""
    return bare(name).partition(".")[0]


def part_of(name: str) -> str:
    """Key in `ModelSpec.parts` of the part that has a site, by its canonical name; "" for the language model."""
    if name == VISION_OUT:
        return name
    return next((prefix for prefix in (DEEPSTACK, OF_VISION, OF_ENCODER) if name.startswith(prefix)), "")


def bare(name: str) -> str:
    """A canonical name without a part's prefix, as the part's own spec has it."""
    if name.startswith(DEEPSTACK):
        return f"resid_post.{name.removeprefix(DEEPSTACK)}"
    return "embed" if name == VISION_OUT else name.removeprefix(part_of(name))


def in_part(name: str, part: str) -> str:
    """The reverse of `bare`."""
    if part == DEEPSTACK:
        return DEEPSTACK[:-1] + name.removeprefix("resid_post")
    return VISION_OUT if part == VISION_OUT else part + name


def expand_in(pattern: str | Site, model: ModelSpec) -> list[Site]:
    """`expand` for a model, or for the part of it that has the sites."""
    part = part_of(str(pattern))
    if part not in model.parts:
        return expand(pattern, model.num_hidden_layers, model.family)
    own = model.parts[part]
    found = expand(bare(str(pattern)), own.num_hidden_layers, own.family)
    return [Site(in_part(site.kind, part), site.layer) for site in found]


def is_several(pattern: str) -> bool:
    """Whether a canonical pattern may name several sites: its layers are ``*``, or in braces."""
    return any(character in pattern for character in "*{")


def expand(pattern: str | Site, num_layers: int, family: Family) -> list[Site]:
    """The sites that `pattern` selects in a model, in the order of the layers.

    Args:
        pattern: site pattern in any of the styles above.

    Raises:
        ValueError: as `canonical`, a layer beyond the model's, or a kind that the family does not have.
    """
    kind, selector = _look_up(str(pattern))
    if (part := part_of(kind)) == OF_ENCODER:
        raise ValueError(
            f"{str(pattern)!r} is a site of an encoder: captures and ops of encoder-decoder models name it"
        )
    if part:
        raise ValueError(
            f"{str(pattern)!r} is a site of a vision tower: captures and ops of models with images name it"
        )
    if kind not in OF_PASSES:  # of every family
        family.check(kind)
    written = _written(pattern)
    if (path := _path(written)) in BY_FAMILY and path_names(family).get(path) != kind:
        raise ValueError(
            f"{written!r} is another state in {family.name} models than elsewhere: name the site, {kind}, which is at "
            f"{family.points[kind].module}, or the one that is meant"
        )
    if selector is None:
        return [Site(kind)]
    found = [
        site
        for site in _at_layers(kind, selector, str(pattern), num_layers)
        if (site.layer or 0) >= family.first_layer(kind)
    ]
    if not found:
        raise ValueError(
            f"{str(pattern)!r}: the first {family.dense_layers} layers have no experts, and no site {kind!r}"
        )
    return found


@lru_cache(maxsize=1 << 14)  # each layer's name is looked up for every request
def _at_layers(kind: str, selector: str, pattern: str, num_layers: int) -> tuple[Site, ...]:
    layers: set[int] = set()
    for ends in _ranges(selector, pattern):
        first, last = (end + num_layers if end < 0 else end for end in ends)
        for end, resolved in zip(ends, (first, last), strict=True):
            if not 0 <= resolved < num_layers:
                raise ValueError(
                    f"{pattern!r}: there is no layer {end}; the model has {num_layers} (num_hidden_layers), "
                    f"0 to {num_layers - 1}, or -{num_layers} to -1 from the end"
                )
        if first > last:
            raise ValueError(f"{pattern!r}: the range {ends[0]}..{ends[1]} runs backwards, from {first} to {last}")
        layers.update(range(first, last + 1))
    return tuple(Site(kind, layer) for layer in sorted(layers))


def _written(pattern: str | Site) -> str:
    """The pattern as it was given first."""
    return pattern.written if isinstance(pattern, Pattern) else str(pattern)


@lru_cache(maxsize=1 << 14)
def _path(text: str) -> str:
    """The text without layers, and without the variable `model` in front."""
    name = _split(text)[0]
    return name if name in NAMES else name.removeprefix("model.")


@lru_cache(maxsize=1 << 14)
def _look_up(text: str) -> tuple[str, str | None]:
    """(kind, layer selector or None)."""
    if text == VISION_OUT:
        return text, None
    if text.startswith(DEEPSTACK):
        return DEEPSTACK[:-1], _look_up(bare(text))[1]
    for prefix, kinds in PART_KINDS.items():
        if (
            text.startswith(prefix)
            and (rest := text.removeprefix(prefix)).partition(".")[0] in kinds
            and rest not in ("out", "deepstack")
        ):
            kind, layers = _look_up(rest)
            return prefix + kind, layers
    name, layers = _split(text)
    # Users of nnsight and nnterp may write the path with the variable `model` in front.
    candidates = [name, name.removeprefix("model.")]
    for candidate in candidates:
        if candidate in REFUSED:
            raise ValueError(f"{text!r} is not a site: {REFUSED[candidate]}")
        if candidate in NAMES:
            return NAMES[candidate], layers
    if name + ".{}" in NAMES:
        raise ValueError(f"{text!r} needs a layer: {name}.0, {name}.-1 (the last), {name}.* (every one)")
    if name.removesuffix(".{}") in NAMES:
        raise ValueError(f"{text!r}: {name.removesuffix('.{}')} has no layer")
    if (part := part_of(text)) in _PARTS:
        known = ", ".join(part + kind for kind in PART_KINDS[part])
        raise ValueError(f"unknown site {text!r}; the sites of {_PARTS[part]} are {known}, with a layer")
    # `resid_post_5` and `resid_post5` name the layer, too; suggestions are sites that ops and captures take.
    number = re.fullmatch(r"(\D*?)[_. ]?(\d+)", text)
    written, layers = (f"{number[1]}.{number[2]}", number[2]) if number and layers is None else (text, layers)
    known = [known.replace("{}", layers or "0") for known, kind in NAMES.items() if kind in NUMBERED_SITES]
    near = get_close_matches(written[:80], known, n=3, cutoff=0.5)
    if text.isdecimal():  # a layer: which of its sites?
        near = [f"{kind}.{text}" for kind in ("resid_post", "attn_out", "mlp_out")]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown site {text!r}; {hint}Kinds are {', '.join(k for k in KINDS if k in NUMBERED_SITES)}")


def _split(text: str) -> tuple[str, str | None]:
    """(name with `{}` for the layer, layer selector): "mlp_out.3" -> ("mlp_out.{}", "3")."""
    text = re.sub(r"\.output\[0\]$", ".output", text.strip())  # of a module that returns a tuple
    text = re.sub(rf"\[({_SELECTOR})\]", r".\1", text)
    found = re.search(rf"(?<=\.)(?:{_SELECTOR})(?=\.|$)", text)
    if found is None:
        return text, None
    return f"{text[: found.start()]}{{}}{text[found.end() :]}", found[0]


def _ranges(selector: str, pattern: str) -> list[tuple[int, int]]:
    """Inclusive (first, last) pairs; negative numbers are kept."""
    if selector == "*":
        return [(0, -1)]
    found = [(item, _ITEM.fullmatch(item)) for item in selector.strip("{}").split(",")]
    wrong = [item for item, match in found if match is None]
    if wrong:
        raise ValueError(
            f"{pattern!r}: {wrong[0]!r} is neither a layer nor a range of them; write {{0,4,8}} or {{0..8}} (8 included)"
        )
    return [(int(match[1]), int(match[2] or match[1])) for _, match in found if match is not None]


def stream_of(site: Site, model: ModelSpec) -> Site:
    """The site that a norm reads; the norm's output is `attn_in` or `mlp_in`.

    Raises:
        ValueError: the input of the module has no site.
    """
    if site.kind == "attn_in":
        return Site("resid_pre", site.layer)
    if "resid_mid" not in model.family.points:
        raise ValueError(
            f"{site}: {model.family.name} models have no site resid_mid, which the norm before the MLP reads; a trace reads "
            f"{model.family.points['mlp_in'].module.format(site.layer)}.output"
        )
    return Site("resid_mid", site.layer)
