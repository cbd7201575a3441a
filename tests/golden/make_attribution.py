"""Writes attribution.safetensors: node scores of transformer-lens' `attribution_patch` on two small random models.

Usage: python make_attribution.py, where transformer-lens 4.3 is installed (4.3.0, with transformers 5.18.0 and torch 2.13.0).

The file has each model's weights ("gpt2/weights/..."), its config as metadata, and the scores of its nodes: "gpt2/embed"
[positions], "gpt2/z" [layers, positions, heads], "gpt2/mlp_out" [layers, positions].
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.attribution_patching import attribution_patch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32, n_inner=24, **NONE),
    "llama": LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=32, **NONE,
    ),
}  # fmt: skip
CLEAN, CORRUPTED = [3, 7, 1, 14, 5, 9], [3, 8, 1, 14, 2, 9]
METRIC = (4, 11)


def gap(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, METRIC[0]] - logits[0, -1, METRIC[1]]


def main() -> None:
    tensors, configs = {}, {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and path.endswith("weight")
                parameter.normal_(1 if is_norm else 0, 0.1 if parameter.dim() == 1 else 0.4)
        for path, parameter in model.named_parameters():
            tensors[f"{name}/weights/{path}"] = parameter.detach().clone()
        configs[name] = config.to_json_string()
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0", bos_token="w0")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # which knows its folder
            bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer)
            result = attribution_patch(bridge, torch.tensor([CLEAN]), torch.tensor([CORRUPTED]), gap)
        scores = {
            "embed": torch.zeros(len(CLEAN)),
            "z": torch.zeros(2, len(CLEAN), 2),
            "mlp_out": torch.zeros(2, len(CLEAN)),
        }
        for node, score in result.node_scores.items():
            kind = {"embed": "embed", "attn_head_out": "z", "mlp_out": "mlp_out"}[node.kind]
            place = tuple(i for i in (node.layer, node.position, node.head) if i is not None)
            scores[kind][place] = score
        tensors |= {f"{name}/{kind}": values for kind, values in scores.items()}
    save_file(tensors, Path(__file__).parent / "attribution.safetensors", metadata=configs)


if __name__ == "__main__":
    main()
