"""Settings of tiny models with recurrent states, by model type. Each has attention, if the family has any."""

from __future__ import annotations

from typing import Any

BOTH = ["linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": BOTH, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SSM: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {**SSM, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**SSM, "mamba_d_ssm": 64, "num_hidden_layers": 2},
    "falcon_mamba": {"state_size": 8, "num_hidden_layers": 2},
    "granitemoehybrid": {**SSM, "num_hidden_layers": 3, "layer_types": BOTH, "shared_intermediate_size": 24},
    "jamba": {
        "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        "num_hidden_layers": 3, "layer_types": BOTH, "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_head_dim": 8,
        "linear_num_heads": 4, "n_group": 1, "num_key_value_heads": 4,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "num_hidden_layers": 2},
    "minimax": {"num_hidden_layers": 3, "layer_types": BOTH, "block_size": 8},
    "nemotron_h": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "moe_shared_expert_intermediate_size": 24,
        "n_group": 1,
    },
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), DELTA),
    "recurrent_gemma": {
        "num_hidden_layers": 3, "block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 16,
    },
    "rwkv": {"num_hidden_layers": 2},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "attention_head_dim": 16, "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 8, "attention_head_dim": 16,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1, "num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 5},
}  # fmt: skip
"""Model type -> settings."""
