"""Families of models: the paths of their modules, and where each kind of site can be read.

A family is one row: of `FAMILIES` if it has a native implementation, else of `TRANSFORMERS_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

INNER_SITES = ("q", "k", "v", "z", "mlp_act", "router", "experts", "shared_out", "cross_attn_out")
"""Kinds of inner sites that a layer may have."""
SPARSE_SITES = frozenset({"router", "experts", "shared_out"})
"""Kinds of sites that only layers with experts have."""
EXPERTS = "experts"
"""The chosen experts and their scores: they can be captured, and not edited."""
HEAD_SITES = ("q", "k", "v", "z")
"""Kinds of sites with a state that is split into attention heads, [heads, head_dim]."""
PATTERN = "pattern"
"""Attention patterns. They can be captured, but are not states at a point of the pass."""
STATE = "state"
"""Recurrent states, of the sequence so far: they can be captured, and patched at the prompt's end."""
KV = "kv"
"""Keys and values in the cache: they can be captured, and replaced by `PatchKV`."""
OF_PASSES = (PATTERN, STATE, KV)
"""Kinds of sites of every family that are no states at a point of the pass, and have no numbers."""
LOGITS = "logits"
STREAM_SITES = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm")
"""Kinds of sites on the residual stream."""
NUMBERED_SITES = (*STREAM_SITES, *INNER_SITES, LOGITS)
"""Kinds of sites that have numbers: declared interventions and captures act at these."""


class SiteLike(Protocol):
    """A kind of site, and its layer (None for kinds without layers)."""

    @property
    def kind(self) -> str: ...

    @property
    def layer(self) -> int | None: ...


class LayerPath(str):
    """A template of module paths, where layers differ in the last name.

    Args:
        prefix: path with `{}` in place of the layer's index.
        children: the last name, by layer.
    """

    def __new__(cls, prefix: str, children: tuple[str, ...]) -> LayerPath:
        path = super().__new__(cls, prefix + "|".join(dict.fromkeys(children)))
        path.prefix, path.children = prefix, children
        return path

    prefix: str
    children: tuple[str, ...]

    def format(self, layer: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The path in a layer."""
        return self.prefix.format(layer) + self.children[layer]


class SitePoint(NamedTuple):
    """One end of a module, at which a site's value can be read."""

    module: str
    """The module's path, with `{}` in place of the layer."""
    end: Literal["input", "output"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models with equal module names. The defaults are Llama's.

    Attributes:
        name: `model_type` in the config.
        embed, layers, final_norm, head: module paths; `layers` is the list of decoder layers.
        attention_norm, attention, mlp_norm, mlp: children of a decoder layer.
        q_proj, k_proj, v_proj, o_proj: children of the attention.
        qkv: child of the attention with q, k and v in one output; "": separate projections.
        by_head: whether q, k and v of each head follow each other; else all q, all k, all v.
        down_proj: the MLP's last projection.
        router: child of the MLP that scores its experts; "": it has none.
        shared: child of the MLP that all tokens go through, beside the experts; "": it has none.
        dense_layers: the first layers, without experts, in families that have a router.
        attn_out, mlp_out: children of a decoder layer with outputs that are added to the residual stream; "": attention and MLP.
        resid_mid: child of a decoder layer that reads the stream between the two; "": the MLP's norm.
        mixers: children of decoder layers that mix tokens, by layer. Their outputs are `attn_out`. A row of the table has the
            names that a layer may have. Empty: each layer has the same attention.
        cross_attention: child of a decoder layer that attends to the encoder's output; "": there is no encoder.
        missing: kinds of sites that the family does not have.
        mlp_in_tuple: whether the MLP returns a tuple, with `mlp_out` first.
        sliding_window: whether the config's `sliding_window` counts.
        hears: whether its input is audio.
    """

    name: str
    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    q_proj: str = "q_proj"
    k_proj: str = "k_proj"
    v_proj: str = "v_proj"
    o_proj: str = "o_proj"
    qkv: str = ""
    by_head: bool = False
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    down_proj: str = "down_proj"
    router: str = ""
    shared: str = ""
    dense_layers: int = 0
    attn_out: str = ""
    mlp_out: str = ""
    resid_mid: str = ""
    mixers: tuple[str, ...] = ()
    cross_attention: str = ""
    missing: frozenset[str] = frozenset()
    mlp_in_tuple: bool = False
    sliding_window: bool = True
    hears: bool = False

    @cached_property
    def points(self) -> Mapping[str, SitePoint]:
        """Kind of site -> where its value can be read, in the order of a forward pass.

        Editing there is not always editing the site. The residual stream bypasses a norm, so replacing the norm's input does not
        change `resid_mid`.
        """
        layer = self.layers + ".{}"
        attention, mlp = f"{layer}.{self.attention}", f"{layer}.{self.mlp}"
        points = {
            "embed": SitePoint(self.embed, "output"),
            "resid_pre": SitePoint(layer, "input"),
            "attn_in": SitePoint(f"{layer}.{self.attention_norm}", "output"),
            "q": SitePoint(f"{attention}.{self.qkv or self.q_proj}", "output"),
            "k": SitePoint(f"{attention}.{self.qkv or self.k_proj}", "output"),
            "v": SitePoint(f"{attention}.{self.qkv or self.v_proj}", "output"),
            "z": SitePoint(f"{attention}.{self.o_proj}", "input"),
            "attn_out": SitePoint(
                LayerPath(f"{layer}.", self.mixers) if self.mixers else f"{layer}.{self.attn_out or self.attention}",
                "output",
            ),
            **(
                {"cross_attn_out": SitePoint(f"{layer}.{self.cross_attention}", "output")}
                if self.cross_attention
                else {}
            ),
            "resid_mid": SitePoint(f"{layer}.{self.resid_mid or self.mlp_norm}", "input"),
            "mlp_in": SitePoint(f"{layer}.{self.mlp_norm}", "output"),
            **({"router": SitePoint(f"{mlp}.{self.router}", "output")} if self.router else {}),
            **({EXPERTS: SitePoint(f"{mlp}.experts", "input")} if self.router else {}),
            "mlp_act": SitePoint(f"{mlp}.{self.down_proj}", "input"),
            **({"shared_out": SitePoint(f"{mlp}.{self.shared}", "output")} if self.shared else {}),
            "mlp_out": SitePoint(f"{layer}.{self.mlp_out or self.mlp}", "output"),
            "resid_post": SitePoint(layer, "output"),
            "final_norm": SitePoint(self.final_norm, "output"),
            "logits": SitePoint(self.head, "output"),
        }
        return {kind: point for kind, point in points.items() if kind not in self.missing}

    @cached_property
    def other_points(self) -> Mapping[str, str]:
        """Further module paths with the same values -> kind of site."""
        layer = self.layers + ".{}"
        if self.mixers:
            return {f"{layer}.{self.attention_norm}.input": "resid_pre", f"{layer}.{self.mlp}.input": "mlp_in"}
        points = {
            f"{layer}.{self.attention_norm}.input": "resid_pre",
            f"{layer}.{self.attention}.input": "attn_in",
            f"{layer}.{self.mlp}.input": "mlp_in",
        }
        if not self.attn_out:
            points[f"{layer}.{self.attention}.{self.o_proj}"] = "attn_out"
        if not self.mlp_out:
            points[f"{layer}.{self.mlp}.{self.down_proj}"] = "mlp_out"
        return points

    def is_slice(self, kind: str) -> bool:
        """Whether a kind's value is a part of the value at its point."""
        return bool(self.qkv) and kind in ("q", "k", "v")

    def below(self, path: str) -> Family:
        """The same family as the language model of a larger model.

        Args:
            path: path of the language model, in place of `model`.
        """
        own = {name: path + getattr(self, name).removeprefix("model") for name in ("embed", "layers", "final_norm")}
        return replace(self, **own)

    def first_layer(self, kind: str) -> int:
        """The first layer with sites of a kind."""
        return self.dense_layers if kind in SPARSE_SITES else 0

    def check(self, kind: str) -> None:
        """Raise ValueError for a kind of site that the family does not have."""
        if kind not in self.points:
            raise ValueError(f"{self.name} models have no site {kind!r}; they have {', '.join(self.points)}")

    def point(self, site: SiteLike) -> SitePoint:
        """The module path and end of a site. Raises ValueError: the family does not have the site's kind."""
        self.check(site.kind)
        module, end = self.points[site.kind]
        return SitePoint(module.format(site.layer), end)


MROPE_SECTIONS = {"qwen2_5_vl_text": (16, 24, 24), "qwen3_vl_text": (24, 20, 20)}
"""Model types where RoPE turns by three positions -> frequencies that turn by each, unless the config has `mrope_section`."""

_PARALLEL = frozenset({"resid_mid"})
"""Attention and MLP read the same stream: no residual stream exists between them."""
_FUSED_QKV = frozenset({"q", "k", "v"})
"""One projection makes q, k and v."""
_SCALED = frozenset({"attn_out", "mlp_out"})
"""The layer scales the outputs of attention and MLP before it adds them."""
_LATENT = frozenset({"q", "k", "v", "z"})
"""Multi-head latent attention: the heads of q, k and v differ in size."""
_LATENT_FAMILIES = "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "axk2"
_STREAMS = frozenset({"embed", "attn_out", "mlp_out", "mlp_act", "final_norm"})
"""The residual stream is several streams, wider than the layers' outputs."""
_EXPERTS = frozenset({"mlp_act"})
"""Each expert has its own neurons."""

_MIXED = frozenset({"q", "k", "v", "z"})
"""Only some layers have attention."""
_ALL_MIXERS: dict[str, Any] = {
    "attention_norm": "norm",
    "attention": "mixer",
    "mixers": ("mixer",),
    "missing": _MIXED | {"resid_mid", "mlp_in", "mlp_act", "mlp_out"},
}
"""A layer is a mixer: a state-space model, an attention or an MLP."""
_LFM2: dict[str, Any] = {
    "final_norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "mixers": ("conv", "self_attn"),
    "mlp_norm": "ffn_norm",
    "mlp": "feed_forward",
    "down_proj": "w2",
    "missing": _MIXED,
}

_SANDWICH: dict[str, Any] = {
    "attn_out": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}
_POST_NORM: dict[str, Any] = {
    "attn_out": "post_attention_layernorm",
    "mlp_out": "post_feedforward_layernorm",
    "resid_mid": "mlp",
    "missing": frozenset({"attn_in", "mlp_in"}),
}
_TRANSFORMER: dict[str, Any] = {
    "embed": "transformer.wte",
    "layers": "transformer.h",
    "final_norm": "transformer.ln_f",
    "attention_norm": "ln_1",
    "attention": "attn",
    "mlp_norm": "ln_2",
}
_GPT2: dict[str, Any] = {**_TRANSFORMER, "o_proj": "c_proj", "down_proj": "c_proj"}
_GPTJ: dict[str, Any] = {**_TRANSFORMER, "o_proj": "out_proj", "down_proj": "fc_out"}
_BLOOM: dict[str, Any] = {
    "embed": "transformer.word_embeddings",
    "layers": "transformer.h",
    "final_norm": "transformer.ln_f",
    "attention": "self_attention",
    "qkv": "query_key_value",
    "by_head": True,
    "o_proj": "dense",
    "down_proj": "dense_4h_to_h",
}
_OPT: dict[str, Any] = {
    "attention_norm": "self_attn_layer_norm",
    "o_proj": "out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp": "fc2",
    "missing": frozenset({"mlp_act"}),
}

FAMILIES = {
    family.name: family
    for family in (
        Family(name="llama", sliding_window=False),
        Family(name="mistral"),
        Family(name="qwen2"),
        Family(name="qwen3"),
        *(Family(name=name) for name in MROPE_SECTIONS),
        *(Family(name=name, router="gate", missing=_EXPERTS) for name in ("mixtral", "olmoe", "qwen3_moe")),
        Family(name="glm4_moe", router="gate", shared="shared_experts", missing=_EXPERTS),
        Family(name="gpt_oss", router="router", mlp_in_tuple=True, missing=_EXPERTS),
        Family(name="gpt2", **_GPT2, qkv="c_attn", missing=frozenset({"embed"}), sliding_window=False),
        Family(
            name="gpt_neox", embed="gpt_neox.embed_in", layers="gpt_neox.layers", final_norm="gpt_neox.final_layer_norm",
            attention="attention", qkv="query_key_value", by_head=True, o_proj="dense", down_proj="dense_4h_to_h",
            missing=_PARALLEL, sliding_window=False,
        ),
        Family(name="gemma", sliding_window=False),
        Family(name="gemma2", **_SANDWICH),
        Family(name="gemma3_text", **_SANDWICH),
        Family(name="qwen3_5_text", mixers=("linear_attn", "self_attn"), missing=_MIXED),
        Family(name="qwen3_next", mixers=("linear_attn", "self_attn"), router="gate", missing=_MIXED | _EXPERTS),
    )
}  # fmt: skip
"""Families with native implementations, by the config's `model_type`. GPT-2's stream begins behind the positions' embedding."""

TRANSFORMERS_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(
            Family(name=name)
            for name in (
                "arcee", "ernie4_5", "exaone4_5", "glm", "helium", "ministral", "ministral3", "nemotron",
                "olmo", "phimoe", "qwen2_moe", "seed_oss", "smollm3", "stablelm",
            )
        ),
        *(Family(name=name, missing=_LATENT) for name in _LATENT_FAMILIES),
        Family(name="inkling_text", attn_out="attn_sconv", mlp_out="mlp_sconv", missing=_LATENT),
        Family(
            name="rwkv", embed="rwkv.embeddings", layers="rwkv.blocks", final_norm="rwkv.ln_out", head="head",
            attention_norm="ln1", attention="attention", mlp_norm="ln2", mlp="feed_forward", down_proj="value",
            mlp_in_tuple=True, missing=_LATENT,
        ),
        Family(name="hy_v4", resid_mid="ffn_hc", missing=_LATENT | _STREAMS),
        *(Family(name=name, missing=_SCALED) for name in ("granite", "granitemoe", "granitemoeshared")),
        *(Family(name=name, missing=_PARALLEL | {"mlp_in"}) for name in ("cohere", "cohere2")),
        Family(name="vaultgemma", **_SANDWICH),
        *(Family(name=name, **_POST_NORM) for name in ("olmo2", "olmo3", "exaone4")),
        Family(name="gpt_bigcode", **_GPT2, missing=_FUSED_QKV),
        Family(name="glm4", attn_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
        Family(name="phi3", qkv="qkv_proj"),
        Family(name="starcoder2", down_proj="c_proj"),
        Family(
            name="phi", final_norm="model.final_layernorm", o_proj="dense", down_proj="fc2", missing=_PARALLEL | {"mlp_in"}
        ),
        Family(
            name="opt", embed="model.decoder.embed_tokens", layers="model.decoder.layers",
            final_norm="model.decoder.final_layer_norm", **_OPT,
        ),
        Family(name="xglm", final_norm="model.layer_norm", **_OPT),
        Family(name="gptj", missing=_PARALLEL | {"mlp_in"}, **_GPTJ),
        Family(name="codegen", missing=_PARALLEL | _FUSED_QKV | {"mlp_in"}, **_GPTJ),
        Family(
            name="gpt_neo",
            **{**_TRANSFORMER, "attention": "attn.attention", "o_proj": "out_proj", "down_proj": "c_proj"},
        ),
        # Attention and MLP add the stream to their outputs.
        Family(name="bloom", attn_out="self_attention.dense", mlp_out="mlp.dense_4h_to_h", **_BLOOM),
        Family(name="falcon", missing=_PARALLEL | {"mlp_in"}, **_BLOOM),
        Family(
            name="mpt", embed="transformer.wte", layers="transformer.blocks", final_norm="transformer.norm_f",
            attention_norm="norm_1", attention="attn", o_proj="out_proj", mlp_norm="norm_2", mlp="ffn",
            mlp_out="ffn.down_proj", qkv="Wqkv",
        ),
        Family(name="qwen3_5_moe_text", mixers=("linear_attn", "self_attn"), missing=_MIXED),
        *(
            Family(
                name=name, final_norm="model.final_layernorm", mixers=("mamba", "self_attn"), mlp_norm="pre_ff_layernorm",
                mlp="feed_forward", missing=_MIXED,
            )
            for name in ("bamba", "jamba")
        ),
        Family(
            name="falcon_h1", final_norm="model.final_layernorm", mlp_norm="pre_ff_layernorm", mlp="feed_forward",
            missing=_MIXED | {"attn_out"},
        ),
        Family(name="granitemoehybrid", mlp="shared_mlp", missing=_MIXED | _SCALED | {"mlp_act"}),
        Family(name="kimi_linear", mixers=("self_attn",), missing=_MIXED),
        *(Family(name=name, **_LFM2) for name in ("lfm2", "lfm2_moe")),
        *(
            Family(
                name=name, embed="backbone.embeddings", layers="backbone.layers", final_norm="backbone.norm_f", **_ALL_MIXERS
            )
            for name in ("falcon_mamba", "mamba", "mamba2")
        ),
        Family(name="nemotron_h", embed="model.embeddings", final_norm="model.norm_f", **_ALL_MIXERS),
    )
}  # fmt: skip
"""Families that run through transformers' own classes. A kind is left out when a model is loaded that lacks its modules."""


def text_name(model_type: str) -> str:
    """Child of a vision-language model that is its language model."""
    return "text_model" if model_type in ("smolvlm", "idefics3") else "language_model"


HEADS = ("LMHeadModel", "DoubleHeadsModel", "RewardModel", "EmbeddingModel", "BertModel", "RobertaModel")
"""Ends of the names of architectures that end in "Model", and are no decoders without a head."""
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
"""Ends of the names of architectures with a classification head. Heads of the second kind have a bias."""


def num_labels_of(config: Any) -> int | None:
    """Labels of the classification head that a transformers config names; None for a language modelling head.

    A decoder without a head, such as `LlamaModel`, has one label: its logit is 0.
    """
    if lacks_head(config):
        return 1
    name = (getattr(config, "architectures", None) or [""])[0]
    return config.num_labels if name.endswith(CLASSIFIERS) else None


def lacks_head(config: Any) -> bool:
    """Whether a transformers config names a decoder or an encoder without a head that is served, as embedding models do."""
    name = (getattr(config, "architectures", None) or [""])[0]
    if is_encoder(config):
        return not name.endswith(CLASSIFIERS[0])
    return name.endswith("Model") and not name.endswith(HEADS)


ENCODERS = frozenset(
    {
        "bert", "camembert", "deberta-v2", "distilbert", "electra", "eurobert", "modernbert", "mpnet", "roberta",
        "xlm-roberta", "xlm-roberta-xl",
    }
)  # fmt: skip
"""Model types of encoders."""


def is_encoder(config: Any) -> bool:
    """Whether a transformers config names an encoder: attention goes both ways."""
    name = (getattr(config, "architectures", None) or [""])[0]
    if getattr(config, "use_bidirectional_attention", None) is True:
        return True
    ends = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIERS[0])
    is_type = getattr(config, "model_type", "") in ENCODERS and not getattr(config, "is_decoder", False)
    return is_type and name.endswith(ends) and not name.endswith("LMHeadModel")


def has_head_bias(config: Any) -> bool:
    """Whether the head has a bias: transformers' classification heads of tokens."""
    return num_labels_of(config) is not None and config.architectures[0].endswith(CLASSIFIERS[1])


_BART: dict[str, Any] = {
    "attention_norm": "self_attn_layer_norm",
    "o_proj": "out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp": "fc2",
}
_T5: dict[str, Any] = {
    "attention_norm": "layer.0.layer_norm",
    "attention": "layer.0.SelfAttention",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "down_proj": "wo",
}
_POST = frozenset({"attn_in", "resid_mid", "mlp_in", "mlp_act", "final_norm"})
"""Norms after the sums: no module reads the stream between attention and MLP, and none comes after the last layer."""

ENCODER_DECODERS = {
    family.name: family
    for family in (
        Family(
            name="bart", embed="model.decoder.embed_tokens", layers="model.decoder.layers", cross_attention="encoder_attn",
            missing=_POST, **_BART,
        ),
        Family(
            name="t5", embed="decoder.embed_tokens", layers="decoder.block", final_norm="decoder.final_layer_norm",
            cross_attention="layer.1.EncDecAttention", mlp_norm="layer.2.layer_norm", mlp="layer.2.DenseReluDense", **_T5,
        ),
        Family(
            name="whisper", embed="model.decoder.embed_tokens", layers="model.decoder.layers",
            final_norm="model.decoder.layer_norm", head="proj_out", cross_attention="encoder_attn",
            missing=frozenset({"mlp_act"}), **_BART,
        ),
    )
}  # fmt: skip
"""Decoders of encoder-decoder models, by the config's `model_type`."""
SOURCE_ENCODERS = {
    family.name: family
    for family in (
        Family(name="bart", layers="model.encoder.layers", missing=_POST | {"embed"}, **_BART),
        Family(
            name="t5", embed="encoder.embed_tokens", layers="encoder.block", final_norm="encoder.final_layer_norm",
            mlp_norm="layer.1.layer_norm", mlp="layer.1.DenseReluDense", **_T5,
        ),
        Family(
            name="whisper", layers="model.encoder.layers", final_norm="model.encoder.layer_norm",
            missing=frozenset({"mlp_act", "embed"}), hears=True, **_BART,
        ),
    )
}  # fmt: skip
"""Their encoders. Sites of these are named with the prefix `encoder.`."""
