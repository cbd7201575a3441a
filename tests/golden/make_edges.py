"""Writes edges.json: scores of edges and faithfulness by transformer-lens, on the models of attribution.safetensors.

Usage: python make_edges.py, where transformer-lens 4.3 is installed (4.3.0, with transformers 5.23.0 and torch 2.13.0).

transformer-lens takes gradients in its "corrupt" run and goes towards the clean one: the prompts change places for the scores.
It has an edge for each position; scores are sums over positions, and circuits have all positions of an edge.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from make_attribution import CLEAN, CORRUPTED, gap
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    attribution_patch,
    faithfulness,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
SIZES = (3, 8, 20)


def name_of(edge) -> str:
    names = {
        "embed": "input", "attn_head_out": "a{0.layer}.h{0.head}", "mlp_out": "m{0.layer}", "mlp_in": "m{0.layer}",
        "logits": "logits", **{f"{kind}_input": "a{0.layer}.h{0.head}<" + kind + ">" for kind in "qkv"},
    }  # fmt: skip
    return "->".join(names[node.kind].format(node) for node in edge)


def main() -> None:
    found = {}
    with safe_open(HERE / "attribution.safetensors", framework="pt") as file:
        configs = {name: AutoConfig.for_model(**json.loads(text)) for name, text in file.metadata().items()}
        weights = {name: file.get_tensor(name) for name in file.keys()}
    for family, config in configs.items():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        prefix = f"{family}/weights/"
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        missing, _ = model.load_state_dict(own, strict=False)
        assert set(missing) <= {"lm_head.weight"}
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0", bos_token="w0")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer)
        clean, corrupted = torch.tensor([CLEAN]), torch.tensor([CORRUPTED])
        result = attribution_patch(bridge, corrupted, clean, gap, EdgeAttributionConfig(granularity="edge"))
        scores, at = defaultdict(float), defaultdict(list)
        for edge, score in result.edge_scores.items():
            scores[name_of(edge)] += score
            at[name_of(edge)].append(edge)
        ranked = sorted(scores, key=lambda edge: -abs(scores[edge]))
        circuits = []
        for size in SIZES:
            kept = ranked[:size]
            value = faithfulness(bridge, clean, corrupted, gap, [pair for edge in kept for pair in at[edge]])
            circuits.append({"edges": kept, "recovered": value.recovered})
        found[family] = {"scores": scores, "circuits": circuits}
    (HERE / "edges.json").write_text(json.dumps(found, indent=0))


if __name__ == "__main__":
    main()
