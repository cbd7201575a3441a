"""Norms of a vLLM model, at which hooks read and change the residual stream, and modules with its inner sites.

Most decoder layers of vLLM hand each of their norms a pair: the last block's output, and the stream. `structure_of` finds the
norms of each layer that take such a pair, and the norm after the last layer. Other layers (`PLAIN`) add the outputs of attention
and MLP to the stream themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..core.model_spec import (
    INNER_SITES,
    LOGITS,
    attention_add,
    delta_site,
    final_norm_site,
    inner_site,
    input_add,
    mlp_add,
    residual_site,
)
from ..models.registry import architecture_of, is_native

INPUT_NORM = "input_layernorm"
MIXERS = (
    "Mamba2DecoderLayer", "MambaDecoderLayer", "NemotronHAttentionDecoderLayer", "NemotronHMLPDecoderLayer",
    "NemotronHMambaDecoderLayer", "NemotronHMoEDecoderLayer",
)  # fmt: skip
"""Decoder layers that are one norm and one module, `mixer`: its output is `attn_out`."""
LAYERS = {
    "LlamaDecoderLayer": "post_attention_layernorm",
    "Llama4DecoderLayer": "post_attention_layernorm",
    "MistralDecoderLayer": "post_attention_layernorm",
    "MixtralDecoderLayer": "post_attention_layernorm",
    "Qwen2DecoderLayer": "post_attention_layernorm",
    "Qwen2MoeDecoderLayer": "post_attention_layernorm",
    "Qwen3DecoderLayer": "post_attention_layernorm",
    "Qwen3MoeDecoderLayer": "post_attention_layernorm",
    "Qwen3VLDecoderLayer": "post_attention_layernorm",
    "GemmaDecoderLayer": "post_attention_layernorm",
    "Glm4DecoderLayer": "post_attention_layernorm",
    "Glm4MoeDecoderLayer": "post_attention_layernorm",
    "DeepseekV2DecoderLayer": "post_attention_layernorm",
    "OlmoeDecoderLayer": "post_attention_layernorm",
    "TransformerBlock": "post_attention_layernorm",
    "Ernie4_5_MoeDecoderLayer": "post_attention_layernorm",
    "ExaoneMoeDecoderLayer": "post_attention_layernorm",
    "MiniMaxM2DecoderLayer": "post_attention_layernorm",
    "BailingMoeBlock": "post_attention_layernorm",
    "NemotronDecoderLayer": "post_attention_layernorm",
    "Gemma2DecoderLayer": "pre_feedforward_layernorm",
    "Gemma3DecoderLayer": "pre_feedforward_layernorm",
    "Rnj1DecoderLayer": "pre_feedforward_layernorm",
    "Qwen3NextDecoderLayer": "post_attention_layernorm",
    "Qwen3_5DecoderLayer": "post_attention_layernorm",
    "JambaAttentionDecoderLayer": "pre_ff_layernorm",
    "JambaMambaDecoderLayer": "pre_ff_layernorm",
    "Lfm2AttentionDecoderLayer": "ffn_norm",
    "Lfm2ShortConvDecoderLayer": "ffn_norm",
    "Lfm2MoeAttentionDecoderLayer": "ffn_norm",
    "Lfm2MoeShortConvDecoderLayer": "ffn_norm",
    **dict.fromkeys(MIXERS),
}
"""Decoder layers with pairs -> the norm in front of the MLP; None: one of `MIXERS`."""
FIRST = {name: "operator_norm" for name in LAYERS if name.startswith("Lfm2")} | dict.fromkeys(MIXERS, "norm")
"""Decoder layers with another norm in front of attention than `INPUT_NORM` -> that norm."""
WITH_BLOCKS = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "olmoe", "gpt_oss"}
)
"""Model types with modules for blocks: this package has them, and knows their parts in vLLM."""
IMAGES: dict[str, str | None] = {
    "Idefics3ForConditionalGeneration": None,
    "InternVLForConditionalGeneration": None,
    "LlavaForConditionalGeneration": None,
    "LlavaOnevisionForConditionalGeneration": None,
    "Mistral3ForConditionalGeneration": None,
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "SmolVLMForConditionalGeneration": None,
}
"""Architectures that read images -> architecture of their language model; None: that of its config."""
PLAIN = {
    "GPT2Block": ("ln_1", "attn", "ln_2", "mlp"),
    "OPTDecoderLayer": ("self_attn_layer_norm", "self_attn", "final_layer_norm", "fc2"),
    "GPTJBlock": ("ln_1", "attn", "", "mlp"),
    "StablelmDecoderLayer": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    "FalconDecoderLayer": ("ln_attn", "self_attention", "", "mlp"),
    "FalconH1ParallelHybrid": ("input_layernorm", "", "pre_ff_layernorm", "feed_forward"),
    "GraniteMoeHybridAttentionDecoderLayer": ("input_layernorm", "", "post_attention_layernorm", ""),
    "GraniteMoeHybridMambaDecoderLayer": ("input_layernorm", "", "post_attention_layernorm", ""),
}
"""Decoder layers of vLLM that add to the stream themselves -> attention's norm, attention, the MLP's norm, MLP.

The second norm is "" where attention and MLP read the same stream. A module is "" where the layer scales its output."""
ELSEWHERE = "PPMissingLayer"
"""Class of vLLM's placeholders for modules of another pipeline rank."""
ENDS = (
    ("layers", "norm"),
    *(("layers", name) for name in ("final_layer_norm", "final_layernorm", "embedding_norm", "norm_f")),
    ("h", "ln_f"),
)
"""Names of the list of decoder layers, and of the norm behind it."""
SITES = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm", "logits")
"""Kinds of sites that such a model serves."""
INNER_MODULES = {
    "qkv": ("q", "k", "v"), "o_proj": ("z",), "down_proj": ("mlp_act",), "router": ("router",), "experts": ("experts",),
    "shared_experts": ("shared_out",),
}  # fmt: skip
"""Module of a layer (`inner_modules`) -> the kinds of inner sites that are its columns, in their order."""
TAPPED = tuple(kind for kinds in INNER_MODULES.values() for kind in kinds)
"""Kinds of inner sites that an engine may have taps at."""


@dataclass(frozen=True)
class Structure:
    """The norms of a model, by layer.

    All are by the number of their layer. A pipeline rank has the layers of its stage.

    Attributes:
        count: layers of the whole model.
        layers: (norm in front of attention, norm in front of the MLP or None) of each layer.
        last: the norm behind the last layer; None on another pipeline rank.
        blocks: the decoder layers.
        summands: number of a site -> the module with this output, where no norm gets it in a pair.
        is_plain: whether norms get the stream only, from layers of `PLAIN`.
        enlarged: number of first layers that vLLM adds states of images behind. The stream's sites show it without.
    """

    count: int
    layers: dict[int, tuple[nn.Module, nn.Module | None]]
    last: nn.Module | None
    blocks: dict[int, nn.Module]
    summands: dict[int, nn.Module]
    is_plain: bool
    enlarged: int = 0

    @property
    def taps(self) -> int:
        """Calls of the op in one pass: one for each norm and summand, and another one at the last norm."""
        norms = [norm for pair in self.layers.values() for norm in pair if norm is not None]
        return len(norms) + len(self.summands) + 2 * (self.last is not None)

    @property
    def sites(self) -> frozenset[int]:
        """Numbers of the sites that this rank's modules compute. At a stage's border, the next stage adds the last MLP's output."""
        found = set(self.summands)
        for layer in self.layers:
            found |= {residual_site(input_add(layer)), residual_site(attention_add(layer))}
            if not self.is_plain:
                found |= {delta_site(input_add(layer)), delta_site(attention_add(layer))}
            found |= {inner_site(self.count, layer, kind) for kind in INNER_SITES}
        if self.last is not None:
            found |= {
                residual_site(input_add(self.count)),
                final_norm_site(self.count),
                inner_site(self.count, 0, LOGITS),
            }
            if not self.is_plain:
                found.add(delta_site(input_add(self.count)))
        return frozenset(found)


def structure_of(model: Any) -> Structure:
    """The norms of a model of vLLM. Raises NotImplementedError: layers of a class that is not in `LAYERS`. The message names it."""
    inner = _with_layers(model)
    if inner is None:
        raise NotImplementedError(
            f"vLLM's {type(model).__name__} has no list of decoder layers with a norm behind it, so its stream has no sites "
            "here: use LM(model), whose engine is our own"
        )
    blocks, last = inner
    found: dict[int, tuple[nn.Module, nn.Module | None]] = {}
    summands: dict[int, nn.Module] = {}
    own = {i: layer for i, layer in enumerate(blocks) if type(layer).__name__ != ELSEWHERE}
    for i, layer in own.items():
        first, attention, middle, mlp = _parts_of(layer)
        found[i] = getattr(layer, first), getattr(layer, middle) if middle else None
        outputs = {delta_site(attention_add(i)): attention, delta_site(mlp_add(i)): mlp}
        summands |= {site: getattr(layer, name) for site, name in outputs.items() if name}
    plain = any(type(layer).__name__ in PLAIN for layer in own.values())
    # Some models have the norm on all pipeline ranks, and call it on the last.
    ends_here = len(blocks) - 1 in own and type(last).__name__ != ELSEWHERE
    enlarged = getattr(model, "deepstack_num_level", 0)
    assert enlarged < len(blocks), "sites behind the last layer are those of the norm that follows"
    return Structure(len(blocks), found, last if ends_here else None, own, summands, plain, enlarged)


def _parts_of(layer: Any) -> tuple[str, str, str, str]:
    """Names of attention's norm, attention, the MLP's norm and MLP, as in `PLAIN`; modules with a norm's pair are ""."""
    name = type(layer).__name__
    if name in PLAIN:
        _check_plain(layer)
        first, attention, middle, mlp = PLAIN[name]
        return first if hasattr(layer, first) else INPUT_NORM, attention, middle, mlp
    if name not in LAYERS:
        raise NotImplementedError(
            f"vLLM's {name} is not known to hand its norms a pair of delta and stream; layers that are: "
            f"{', '.join((*LAYERS, *PLAIN))}. Use LM(model), whose engine is our own"
        )
    return FIRST.get(name, INPUT_NORM), "mixer" if name in MIXERS else "", LAYERS[name] or "", ""


def _check_plain(layer: Any) -> None:
    """Raise NotImplementedError for a variant of a layer of `PLAIN` that adds in another order."""
    config: Any = getattr(layer, "config", None)
    if not getattr(layer, "do_layer_norm_before", True):
        raise NotImplementedError("OPT with norms behind its sums (do_layer_norm_before=False) has no sites here")
    if type(layer).__name__ == "FalconDecoderLayer" and (config.bias or not config.parallel_attn):
        raise NotImplementedError("Falcon with biases, or with attention in front of its MLP, has no sites here")


def inner_modules(block: nn.Module) -> dict[str, Any]:
    """The modules of a decoder layer that have its inner sites, as far as they are there.

    The keys are `qkv`, `o_proj`, `down_proj`, `router`, `experts` and `shared_experts`. A module with LoRA around it counts as the
    module, so that the site has the adapter's part.
    """
    found: dict[str, Any] = {}
    recurrent = {id(part) for module in block.modules() if hasattr(module, "mamba_type") for part in module.modules()}
    for module in block.modules():
        if id(module) in recurrent:  # its projections are no attention's and no MLP's
            continue
        children = {} if hasattr(module, "base_layer") else dict(module.named_children())
        kinds = {_class_of(child): child for child in children.values()}
        if "QKVParallelLinear" in kinds and "qkv" not in found:
            found["qkv"], found["o_proj"] = kinds["QKVParallelLinear"], kinds.get("RowParallelLinear")
        elif "experts" in children and "experts" not in found:
            found["experts"], found["shared_experts"] = children["experts"], children.get("shared_experts")
            found["router"] = children.get("router", children.get("gate"))
        elif "RowParallelLinear" in kinds and not {"experts", "down_proj"} & found.keys():
            found["down_proj"] = kinds["RowParallelLinear"]
    return {name: module for name, module in found.items() if module is not None}


def _class_of(module: Any) -> str:
    return type(getattr(module, "base_layer", module)).__name__


def _with_layers(model: Any) -> tuple[nn.ModuleList, nn.Module] | None:
    """The decoder's layers, and the norm behind them."""
    for _ in range(4):
        for layers, norm in ENDS:
            found = getattr(model, layers, None), getattr(model, norm, None)
            if isinstance(found[0], nn.ModuleList) and isinstance(found[1], nn.Module):
                return found[0], found[1]
        inner = (
            getattr(model, name, None)
            for name in ("model", "language_model", "text_model", "transformer", "decoder", "backbone")
        )
        model = next((one for one in inner if one is not None), None)
    return None


def why_without_blocks(config: PretrainedConfig) -> str | None:
    """Reason that no block runs in the passes of a model, or None."""
    if config.model_type in WITH_BLOCKS and is_native(config, "auto"):
        return None
    return (
        f"with engine='vllm' no block runs in the passes of {architecture_of(config)}: those of {', '.join(sorted(WITH_BLOCKS))} "
        "have them. Declare it (interventions=, capture=), or use LM(model), whose engine is our own"
    )
