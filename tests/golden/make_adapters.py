"""Golden files of LoRA: small models, adapters that PEFT saved, and what PEFT computes with them.

    python -m venv env && env/bin/pip install "peft>=0.21,<0.22" "transformers>=5.17,<5.19" torch
    env/bin/python tests/golden/make_adapters.py

Writes tests/golden/adapters: a folder for each model and each case, and `cases.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

OUT = Path(__file__).parent / "adapters"
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS = {
    "llama": LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **NO_TOKENS,
    ),
    "gpt2": GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=64, **NO_TOKENS),
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all-linear": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "patterns": (
        "llama",
        {
            "r": 3, "lora_alpha": 5, "target_modules": r".*(q_proj|v_proj|down_proj)", "rank_pattern": {"q_proj": 7, "v_proj": 1},
            "alpha_pattern": {r"layers\.1\..*down_proj": 11},
        },
    ),
    "rslora": (
        "llama",
        {"r": 9, "lora_alpha": 4, "target_modules": ["o_proj", "up_proj"], "use_rslora": True, "layers_to_transform": [1]},
    ),
    "conv1d": ("gpt2", {"r": 5, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}  # fmt: skip


def made() -> Iterator[dict[str, Any]]:
    """Write the models and the cases. Yields what the tests must know of each case."""
    for name, config in MODELS.items():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(OUT / name)
    for name, (model, settings) in CASES.items():
        torch.manual_seed(len(name))
        base = AutoModelForCausalLM.from_pretrained(OUT / model, dtype=torch.float32)
        adapted = peft.get_peft_model(base, peft.LoraConfig(**settings)).eval()
        for path, parameter in adapted.named_parameters():
            if "lora_B" in path:  # zeros
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.peft_config["default"].base_model_name_or_path = model
        adapted.save_pretrained(OUT / name)
        for path in (OUT / name).glob("README.md"):
            path.unlink()
        expected = {"ids": torch.randint(0, 61, (11,))}
        modules = [path for path, module in base.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
        for path in modules:

            def keep(module: Any, args: Any, out: torch.Tensor, path: str = path, into: dict = expected) -> None:
                into[path] = out[0].detach().clone()

            base.get_submodule(path).register_forward_hook(keep)
        with torch.no_grad():
            expected["logits"] = adapted(expected["ids"][None]).logits[0]
        save_file(expected, OUT / name / "expected.safetensors")
        yield {"name": name, "model": model, "modules": modules}


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    (OUT / "cases.json").write_text(json.dumps(list(made()), indent=1) + "\n")
