"""Time and peak memory of circuit-tracer's `attribute`, with random weights and transcoders of a given shape, as a JSON line.

`circuits_gpu.py --peer circuit-tracer` starts it with circuit-tracer's own Python, whose libraries are older than this package's:

    python -m venv TRACER && TRACER/bin/pip install circuit-tracer==0.5.0
    CIRCUIT_TRACER_PYTHON=TRACER/bin/python python -m benchmarks.circuits_gpu --shape gemma-2-2b --peer circuit-tracer
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from circuit_tracer.attribution.attribute import attribute
from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
from circuit_tracer.transcoder import SingleLayerTranscoder, TranscoderSet
from circuit_tracer.transcoder.activation_functions import TopK
from transformer_lens import HookedTransformerConfig


class NoTokenizer:
    """The parts of a tokenizer that `attribute` reads."""

    all_special_ids, vocab_size, padding_side = (0,), 1 << 20, "right"

    @staticmethod
    def decode(ids: Any) -> str:
        """Text of token ids."""
        return str(ids)


def model_of(given: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """circuit-tracer's model of a shape.

    Args:
        given: arguments of `circuits_gpu`, and `config`, the transformers config as a dict.
    """
    config = given["config"]
    gemma, width, head_dim = config["model_type"] == "gemma2", config["hidden_size"], config["head_dim"]
    scale = config["query_pre_attn_scalar"] if gemma else head_dim
    cfg = HookedTransformerConfig(
        n_layers=config["num_hidden_layers"], d_model=width, n_ctx=max(64, given["tokens"]), d_head=head_dim,
        n_heads=config["num_attention_heads"], n_key_value_heads=config["num_key_value_heads"],
        d_mlp=config["intermediate_size"], d_vocab=config["vocab_size"], act_fn="gelu_pytorch_tanh" if gemma else "silu",
        eps=config["rms_norm_eps"], normalization_type="RMS", final_rms=True, positional_embedding_type="rotary",
        rotary_dim=head_dim, rotary_adjacent_pairs=False, gated_mlp=True, model_name=given["shape"], device=device,
        original_architecture="Gemma2ForCausalLM" if gemma else "Qwen3ForCausalLM", tokenizer_name=None, seed=0,
        use_normalization_before_and_after=gemma, attn_scores_soft_cap=config["attn_logit_softcapping"] if gemma else -1.0,
        output_logits_soft_cap=config["final_logit_softcapping"] if gemma else -1.0, attn_scale=scale**0.5,
        use_attn_scale=True, use_qk_norm=not gemma, use_local_attn=gemma, window_size=config["sliding_window"] if gemma else None,
        attn_types=["local" if layer % 2 == 0 else "global" for layer in range(config["num_hidden_layers"])] if gemma else None,
        dtype=dtype,
    )  # fmt: skip
    coders = {}
    for layer in range(cfg.n_layers):
        coders[layer] = SingleLayerTranscoder(
            width, given["transcoder"], TopK(given["active"]), layer, device=torch.device(device), dtype=dtype
        )
        coders[layer].W_enc.data.normal_(std=width**-0.5)
        coders[layer].W_dec.data.normal_(std=0.02)
    model = TransformerLensReplacementModel(cfg)
    reads = TranscoderSet(coders, feature_input_hook="mlp.hook_in", feature_output_hook="hook_mlp_out")
    model._configure_replacement_model(reads)
    model.tokenizer = NoTokenizer()
    return model


def main(given: dict[str, Any]) -> None:
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    model = model_of(given, device, dtype)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, given["config"]["vocab_size"], (given["tokens"],), generator=generator)
    prompt[0] = 0  # else `attribute` adds a token in front
    runs = []
    for _ in range(given["repeat"]):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        graph = attribute(prompt, model, batch_size=given["batch"], max_feature_nodes=given["features"])
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        runs.append({
            "seconds": time.perf_counter() - started, "active": len(graph.active_features),
            "kept": len(graph.selected_features), "targets": len(graph.logit_targets), "peak_gib": peak,
        })  # fmt: skip
    print(json.dumps({"peer": "circuit-tracer", "runs": runs}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
