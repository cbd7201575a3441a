"""Tiny random configs of the families that run through their classes in transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCAB = 97
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, **NO_TOKENS,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, **NO_TOKENS,
}  # fmt: skip
MHA = {"num_key_value_heads": 4}
HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 5}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **MHA, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": MHA,
    "opt": {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {**MHA, "partial_rotary_factor": 0.5},
    "phi3": WINDOW,
    "gemma": HEADS,
    "gemma2": {
        **HEADS,
        **WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {**HEADS, **MIXED, "query_pre_attn_scalar": 8},
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {**WINDOW, "num_local_experts": 4},
    "qwen2": {"use_sliding_window": True, **MIXED},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": HEADS,
    "qwen3_moe": {**HEADS, **EXPERTS},
    "olmo": {},
    "olmo2": {},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": WINDOW,
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": MIXED,
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm": HEADS,
    "glm4": HEADS,
    "gpt_oss": {**HEADS, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**HEADS, **EXPERTS, "n_routed_experts": 4, "use_qk_norm": True, "n_group": 2, "topk_group": 1},
    "exaone4": {**MIXED},
    "nemotron": {},
    "arcee": {},
    "helium": {"head_dim": 8},
    "olmo3": MIXED,
    "olmoe": EXPERTS,
    "ernie4_5": {},
    "seed_oss": {},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {
        **MHA,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
    },
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"parallel_attn": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-alibi": {"alibi": True, "multi_query": True, "new_decoder_architecture": False},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "expansion_ratio": 2},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "llama4_text": {"attention_chunk_size": 8, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.5},
}
"""Family -> settings beside `SMALL`."""


def tiny_config(family: str) -> PretrainedConfig:
    """A config of two layers and 97 tokens."""
    common = GPT2 if family in ("gpt2", "gpt_bigcode", "gptj", "codegen") else SMALL
    return AutoConfig.for_model(family.partition("-")[0], **{**common, **SETTINGS[family]})
