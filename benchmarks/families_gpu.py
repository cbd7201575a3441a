"""Families on one GPU: impl="transformers" beside native, and families at real shapes, with CUDA graphs and without.

    python benchmarks/families_gpu.py speed --out benchmarks/results/gpu-transformers-llama8b.json
    python benchmarks/families_gpu.py shapes --out benchmarks/results/gpu-families.json

"speed": milliseconds of a decode step, `bench`'s. "shapes": random weights in bfloat16, saved by transformers and loaded by each
engine. Prompts of 1 to 300 tokens run together, and generate 16 tokens each. The states after each layer of all positions, decoded
ones included, are compared with transformers' states for the same tokens. Printed are the lowest cosine, and the share of new
tokens that are transformers' most likely ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from pymllm_interp import LM
from pymllm_interp.bench import describe_machine
from pymllm_interp.bench.common import greedy
from pymllm_interp.bench.suites import BenchSettings, measure_decode
from pymllm_interp.models.registry import NATIVE, architecture_of

COMMON: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT-2 XL": dict(model_type="gpt2", n_embd=1600, n_layer=48, n_head=25),
    "Pythia 1.4B": dict(
        model_type="gpt_neox", hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, intermediate_size=8192,
        vocab_size=50304, rope_parameters={"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
    ),
    "Gemma 2 2B": dict(model_type="gemma2"),
    "OLMo 2 1B": dict(
        model_type="olmo2", hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, intermediate_size=8192,
        vocab_size=100352,
    ),
    "StarCoder2 3B": dict(
        model_type="starcoder2", hidden_size=3072, num_hidden_layers=30, num_attention_heads=24, num_key_value_heads=2,
        intermediate_size=12288, vocab_size=49152,
    ),
    "Granite 3 2B": dict(
        model_type="granite", hidden_size=2048, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=49155, embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.015625, logits_scaling=8.0,
    ),
    "Qwen 2.5 0.5B": dict(
        model_type="qwen2", hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True,
    ),
    "OLMoE 1B-7B": dict(
        model_type="olmoe", hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=1024, num_experts=64, num_experts_per_tok=8, vocab_size=50304,
    ),
}  # fmt: skip
"""Differences from the defaults of transformers' configs."""
NEW_TOKENS = 16
PROMPT_LENGTHS = (1, 16, 17, 33, 64, 150, 299, 300)


def release() -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    torch.cuda.empty_cache()


def speed(model: str, batches: list[int], ways: Sequence[bool], impls: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Decode steps of implementations, with graphs or without."""
    settings = BenchSettings(batches=tuple(batches), new_tokens=64)
    native: dict[tuple[bool, int], float] = {}
    for impl in impls:
        for graph in ways:
            lm = LM(
                model, dtype="bfloat16", load_format="dummy", impl=impl, disable_cuda_graph=not graph, max_model_len=512,
                enable_prefix_caching=False, max_running_requests=max(batches), kv_cache_tokens=settings.kv_tokens,
            )  # fmt: skip
            with lm:
                for batch in batches:
                    row = measure_decode(lm, batch, settings)
                    native.setdefault((graph, batch), row["decode_ms"])
                    yield {"impl": impl, "graph": graph, **row, "over_native": row["decode_ms"] / native[graph, batch]}
            del lm
            release()


def compared(lm: LM, theirs: Any) -> dict[str, float]:
    """How far states and tokens are from transformers'."""
    rng = random.Random(0)
    prompts = [[rng.randrange(lm.limits.vocab_size) for _ in range(size)] for size in PROMPT_LENGTHS]
    outputs = lm.generate(prompts, greedy(NEW_TOKENS), capture=["resid_post.*"])
    cosine, largest, agreed = 1.0, 0.0, 0
    layers = lm.runner.num_hidden_layers
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids[:-1]], device=lm.runner.device)
        with torch.no_grad():
            found = theirs(ids, output_hidden_states=True)
        for layer in range(layers - 1):  # the last of hidden_states is normed
            own = output.activations[f"resid_post.{layer}"].float()
            other = found.hidden_states[layer + 1][0].float().cpu()
            cosine = min(cosine, torch.cosine_similarity(own, other, dim=-1).min().item())
            largest = max(largest, ((own - other).norm(dim=-1) / other.norm(dim=-1)).max().item())
        best = found.logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        agreed += sum(a == b for a, b in zip(best, output.token_ids, strict=True))
    return {
        "lowest_cosine": cosine,
        "largest_relative_error": largest,
        "same_tokens": agreed / (len(prompts) * NEW_TOKENS),
    }


def random_model(config: PretrainedConfig) -> Any:
    """Random weights in bfloat16, on the GPU where there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def shapes(names: list[str], batches: list[int]) -> Iterator[dict[str, Any]]:
    """Families at real shapes: correctness, and decode steps with graphs and without."""
    settings = BenchSettings(batches=tuple(batches), new_tokens=32, repeats=1)
    for name in names:
        values = dict(SHAPES[name])
        config = AutoConfig.for_model(values.pop("model_type"), **values, **COMMON)
        theirs = random_model(config)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            config.architectures = [type(theirs).__name__]
            impls = ["native", "transformers"] if architecture_of(config) in NATIVE else ["transformers"]
            for impl in impls:
                for graph in (True, False):
                    started = time.perf_counter()
                    row: dict[str, Any] = {"family": config.model_type, "shape": name, "impl": impl, "graph": graph}
                    lm = LM(
                        folder, dtype="bfloat16", impl=impl, disable_cuda_graph=not graph, max_model_len=512,
                        enable_prefix_caching=False, max_running_requests=max(*batches, 8), kv_cache_tokens=settings.kv_tokens,
                        seed=0,
                    )  # fmt: skip
                    with lm:
                        row["start_s"] = time.perf_counter() - started
                        row["attention"] = type(lm.runner.attn_backend).__name__
                        row |= compared(lm, theirs)
                        row["execution"] = lm.engine.stats()["execution"]
                        for batch in batches:
                            row[f"decode_ms_bs{batch}"] = measure_decode(lm, batch, settings)["decode_ms"]
                    yield row
                    del lm
                    release()
        del theirs
        release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "shapes"])
    parser.add_argument("--model", default="benchmarks/configs/llama8b", help="of speed")
    parser.add_argument("--names", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="of shapes")
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--graphs", action="store_true", help="speed with graphs alone")
    parser.add_argument("--impls", nargs="+", default=["native", "transformers"], help="of speed")
    parser.add_argument("--commit", help="to note, where these files are a copy")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    record: dict[str, Any] = {
        "what": f"families_gpu.py {given.part}",
        "machine": describe_machine(given.commit),
        "rows": [],
    }
    if given.part == "speed":
        record["model"] = Path(given.model).name
        ways = [True] if given.graphs else [True, False]
        growing = speed(given.model, given.batches or [1, 32, 256], ways, given.impls)
    else:
        growing = shapes(given.names, given.batches or [1, 32])
    for row in growing:
        record["rows"].append(row)
        print({name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
