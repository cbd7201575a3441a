"""A tiny folder of sentence-transformers, which this package and that one load (tests/golden/make_embeddings.py)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

TEXTS = ["w3 w14 w15", "w9", "W2 w6 w5 w3 w5 w8 w9 w7 w9", "w1 w2 w3 w4"]


def folder_of_modules(folder: Path) -> Path:
    """Write the model: each weight is a function of its name and shape, and of no random generator."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    model = LlamaModel(config).float().eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * (0.7 + 0.013 * number)).view_as(
                parameter
            )
            parameter.copy_(1 + wave / 10 if name.endswith("norm.weight") else wave / 3)
    model.save_pretrained(folder)
    vocab = {f"w{i}": i for i in range(30)} | {"<unk>": 30, "<pad>": 31}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(types.items())
    ]
    for name in types:
        (folder / name).mkdir(exist_ok=True)
    angles = torch.arange(8 * 32, dtype=torch.float64) * 0.31
    save_file(
        {"linear.weight": (torch.sin(angles).view(8, 32) / 3).float(), "linear.bias": torch.linspace(-1, 1, 8)},
        folder / "2_Dense" / "model.safetensors",
    )
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}
    dense = {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    contents = {
        "modules": entries, "1_Pooling/config": {**pooling, "include_prompt": False}, "2_Dense/config": dense,
        "config_sentence_transformers": {"prompts": {"query": "w7 w8 "}, "default_prompt_name": None},
        "sentence_bert_config": {"max_seq_length": 60, "do_lower_case": True},
    }  # fmt: skip
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
