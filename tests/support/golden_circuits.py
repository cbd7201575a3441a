"""circuit-tracer's graphs of tiny models with random transcoders, as a safetensors file; one of Llama's as its own JSON, too.

Runs where circuit-tracer is installed, which needs an older transformers than this package:

    python tests/support/golden_circuits.py MODEL_FOLDER llama|gemma2 OUT.safetensors
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportAttributeAccessIssue=false
# Its libraries are of another environment.

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PROMPT = [1, 17, 5, 33, 5, 60, 2]
FEATURES, MOST = 10, 14
"""Features of a transcoder; those that the smaller graphs keep."""
KINDS = ("mlp", "unscaled", "skip", "cross")
"""Transcoders at `mlp_in`; at its states without a gain; with skip connections, at `resid_mid`; cross-layer ones there."""


def random_tensors(kind: str, layers: int, width: int) -> list[dict[str, torch.Tensor]]:
    """W_enc [width, features], b_enc, threshold, W_dec [features, written layers, width], b_dec and W_skip of each layer."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    return [
        {
            "W_enc": normal(width, FEATURES, scale=width**-0.5), "b_enc": normal(FEATURES, scale=0.3) - 0.5,
            "threshold": normal(FEATURES).abs() * 0.2,
            "W_dec": normal(FEATURES, layers - layer if kind == "cross" else 1, width, scale=0.3),
            "b_dec": normal(width, scale=0.1), "W_skip": normal(width, width, scale=0.1 * width**-0.5),
        }
        for layer in range(layers)
    ]  # fmt: skip


def tracer_model(folder: Path, family: str, kind: str) -> Any:
    """circuit-tracer's replacement model."""
    from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
    from circuit_tracer.transcoder import SingleLayerTranscoder, TranscoderSet
    from circuit_tracer.transcoder.activation_functions import JumpReLU
    from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
    from transformer_lens import HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gemma_weights, convert_llama_weights
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    config = hf.config
    gemma = family == "gemma2"
    cfg = HookedTransformerConfig(
        n_layers=config.num_hidden_layers, d_model=config.hidden_size, n_ctx=64, d_head=config.head_dim,
        n_heads=config.num_attention_heads, n_key_value_heads=config.num_key_value_heads, d_mlp=config.intermediate_size,
        d_vocab=config.vocab_size, act_fn="gelu_pytorch_tanh" if gemma else "silu", eps=config.rms_norm_eps,
        normalization_type="RMS", final_rms=True, positional_embedding_type="rotary", rotary_dim=config.head_dim,
        rotary_base=config.rope_theta, rotary_adjacent_pairs=False, gated_mlp=True, model_name=family, device="cpu",
        original_architecture="Gemma2ForCausalLM" if gemma else "LlamaForCausalLM", init_weights=False, tokenizer_name=None,
        use_normalization_before_and_after=gemma, attn_scores_soft_cap=config.attn_logit_softcapping if gemma else -1.0,
        output_logits_soft_cap=config.final_logit_softcapping if gemma else -1.0,
        attn_scale=config.query_pre_attn_scalar**0.5 if gemma else config.head_dim**0.5, use_attn_scale=True,
        use_local_attn=gemma, window_size=config.sliding_window if gemma else None,
        attn_types=["local" if each == "sliding_attention" else "global" for each in config.layer_types] if gemma else None,
        dtype=torch.float32,
    )  # fmt: skip
    tensors = random_tensors(kind, cfg.n_layers, cfg.d_model)
    reads = {"mlp": "mlp.hook_in", "unscaled": "ln2.hook_normalized"}.get(kind, "hook_resid_mid")
    if kind == "cross":
        made = CrossLayerTranscoder(
            cfg.n_layers,
            FEATURES,
            cfg.d_model,
            "jump_relu",
            lazy_decoder=False,
            feature_input_hook=reads,
            dtype=torch.float32,
        )
        for layer, own in enumerate(tensors):
            made.W_enc.data[layer], made.b_enc.data[layer], made.b_dec.data[layer] = (
                own["W_enc"].T,
                own["b_enc"],
                own["b_dec"],
            )
            made.W_dec[layer].data[:] = own["W_dec"]
            made.activation_function.threshold.data[layer, 0] = own["threshold"]
    else:
        layers = {}
        for layer, own in enumerate(tensors):
            one = SingleLayerTranscoder(
                cfg.d_model, FEATURES, JumpReLU(own["threshold"], 0.1), layer, kind == "skip", dtype=torch.float32
            )
            one.W_enc.data[:], one.b_enc.data[:], one.b_dec.data[:] = own["W_enc"].T, own["b_enc"], own["b_dec"]
            one.W_dec.data[:] = own["W_dec"][:, 0]
            if kind == "skip":
                one.W_skip.data[:] = own["W_skip"].T
            layers[layer] = one
        made = TranscoderSet(layers, feature_input_hook=reads, feature_output_hook="hook_mlp_out")
    model = TransformerLensReplacementModel(cfg)
    convert = convert_gemma_weights if gemma else convert_llama_weights
    if not gemma:
        hf.lm_head.weight = torch.nn.Parameter(hf.model.embed_tokens.weight.detach().clone())
    model.load_and_process_state_dict(
        convert(hf, cfg), fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    model._configure_replacement_model(made)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        error = (model(ids)[0] - hf(ids).logits[0]).abs().max().item()
    assert error < 1e-3, f"the models differ by {error}"
    return model


class Tokenizer:
    """What circuit-tracer asks of a tokenizer."""

    all_special_ids = (PROMPT[0],)
    vocab_size, padding_side = 1 << 20, "right"

    @staticmethod
    def decode(ids: Any) -> str:
        return str(ids)


def graphs_of(folder: Path, family: str, kind: str) -> dict[str, torch.Tensor]:
    """Tensors of the whole graph, and of one with fewer features; pruned, both."""
    from circuit_tracer.attribution.attribute import attribute
    from circuit_tracer.graph import compute_graph_scores, prune_graph

    model = tracer_model(folder, family, kind)
    model.tokenizer = Tokenizer()
    found = {}
    for size, most in (("whole", None), ("part", MOST)):
        graph = attribute(torch.tensor(PROMPT), model, max_feature_nodes=most, batch_size=4)
        pruned = prune_graph(graph)
        found |= {
            f"{kind}.{size}.features": graph.active_features[graph.selected_features].contiguous(),
            f"{kind}.{size}.activations": graph.activation_values[graph.selected_features].contiguous(),
            f"{kind}.{size}.adjacency": graph.adjacency_matrix, f"{kind}.{size}.nodes": pruned.node_mask,
            f"{kind}.{size}.edges": pruned.edge_mask, f"{kind}.{size}.cumulative": pruned.cumulative_scores,
            f"{kind}.{size}.scores": torch.tensor(compute_graph_scores(graph)),
            f"{kind}.{size}.targets": torch.tensor([each.vocab_idx for each in graph.logit_targets]),
            f"{kind}.{size}.probabilities": graph.logit_probabilities,
        }  # fmt: skip
    return found


def file_of(folder: Path, family: str) -> str:
    """The JSON file that circuit-tracer writes for its viewer and Neuronpedia's.

    An error's name there is that of a feature of layer 0 with the error's layer as number. Such features are not active here.
    """
    from circuit_tracer.attribution.attribute import attribute

    files = importlib.import_module("circuit_tracer.utils.create_graph_files")
    model = tracer_model(folder, family, "mlp")
    model.tokenizer = Tokenizer()
    model.transcoders[0].b_enc.data[: model.cfg.n_layers] = -1e4
    files.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: Tokenizer())
    graph = attribute(torch.tensor(PROMPT), model, max_feature_nodes=None, batch_size=4)
    with tempfile.TemporaryDirectory() as made:
        files.create_graph_files(graph, "tiny", made, scan="tiny-set", node_threshold=0.99, edge_threshold=0.999)
        return json.dumps(json.loads(Path(made, "tiny.json").read_text()))


def main(folder: Path, family: str, out: Path) -> None:
    from safetensors.torch import save_file

    if family == "llama":
        out.with_suffix(".json").write_text(file_of(folder, family))
    found = {name: value for kind in KINDS for name, value in graphs_of(folder, family, kind).items()}
    found = {name: value.detach().contiguous() for name, value in found.items()}
    save_file(found, out, metadata={"made_by": "circuit-tracer 0.5.0", "kinds": json.dumps(KINDS)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
