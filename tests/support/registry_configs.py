"""A tiny config for every name in transformers' registry of causal language models, made by shrinking its defaults."""

from __future__ import annotations

from typing import Any

from family_configs import SETTINGS, tiny_config
from recurrent_configs import RECURRENT
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.models.registry import check_supported

NAMES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "d_model": 32, "n_embd": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48,
    "ffn_hidden_size": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "decoder_layers": 2, "encoder_layers": 1, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "kv_channels": 8, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "sliding_window": 5,
    "word_embed_proj_dim": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "num_experts_per_token": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "expert_ffn_hidden_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "dff": 48, "rotary_dim": 8, "embedding_size": 32, "num_dense_layers": 1, "embed_dim": 32,
    "max_window_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0,
    "global_head_dim": 8, "n_shared_experts": 1, "moe_layer_start_index": 1, "shared_intermediate_size": 24,
    "intermediate_size_mlp": 48, "index_topk": 8, "index_n_heads": 8, "index_head_dim": 16,
}  # fmt: skip
NO_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
ROBERTA = "camembert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"
COMPASS_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    for kind in ("full_attention", "sliding_attention")
}
SHARED = {
    "num_hidden_layers": 3, "layer_types": ["indexed_attention"] * 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "shared", "full"],
}  # fmt: skip
"""The second layer attends to the keys that the first one's indexer selects."""
EXTRA: dict[str, dict[str, Any]] = {
    **{
        name: {"is_decoder": True, "is_encoder_decoder": False}
        for name in (
            "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
            "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small",
            "marian", "mbart", "pegasus", "plbart", "whisper", "megatron-bert", "rembert", "big_bird", "trocr", "mvp", "reformer",
            "roformer",
        )
    },
    **{name: {"is_decoder": True, "pad_token_id": 1} for name in ROBERTA},
    "xmod": {"is_decoder": True, "pad_token_id": 1, "default_language": "en_XX"},
    "data2vec-text": {"is_decoder": True, "pad_token_id": 1},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": COMPASS_ROPE},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32},
    },
    "dots1": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "xlnet": {"d_head": 8, "d_inner": 48},
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attn_layers": ["local", "lsh"],
        "feed_forward_size": 48, "attention_head_size": 8,
    },
    "llama4_text": {"attention_chunk_size": 8},
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention"]},
    "inkling_text": {
        "rel_extent": 8, "d_rel": 4, "log_scaling_n_floor": 6, "swa_head_dim": 8, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"], "vocab_size": 100, "unpadded_vocab_size": 97,
    },
    **dict.fromkeys(("glm_moe_dsa", "hy_v4"), SHARED),
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **RECURRENT,
}  # fmt: skip


def registry_config(name: str) -> PretrainedConfig:
    """A tiny config of a name of the registry."""
    if name in SETTINGS:
        return tiny_config(name)
    whole = AutoConfig.for_model(name)
    default = whole.get_text_config(decoder=True)
    sizes, extra = {key: size for key, size in SIZES.items() if _has(default, key)}, EXTRA.get(name, {})
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = 4
    for key in ("layer_types", "mlp_layer_types"):
        if _has(default, key):
            types = list(dict.fromkeys(getattr(default, key)))
            sizes[key] = (types * 2)[:2]
    if _has(default, "mlp_only_layers"):
        sizes["mlp_only_layers"] = []
    tokens = [dict.fromkeys(NO_TOKENS), dict.fromkeys(NO_TOKENS, 0)]
    last: Exception = ValueError(name)
    for settings in (sizes | tokens[0], sizes | tokens[1], without_types(sizes | tokens[0])):
        try:
            config = type(default)(**{**settings, **extra})
        except Exception as error:
            last = error
        else:
            if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
                return config
    if is_refused(whole):
        return whole
    raise last


def is_refused(config: PretrainedConfig) -> bool:
    """Whether a model is refused before it is built."""
    try:
        check_supported(config)
    except UnsupportedModelError:
        return True
    return False


DERIVED = "layer_types", "head_dim", "v_head_dim", "max_position_embeddings"


def without_types(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that some classes derive from others."""
    return {key: value for key, value in settings.items() if key not in DERIVED}


def _has(config: Any, key: str) -> bool:
    try:
        return getattr(config, key, None) is not None
    except Exception:
        return False
