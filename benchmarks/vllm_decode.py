"""Decode steps of vLLM 0.26 for the shapes that `quantized_gpu.py` and `families_gpu.py speed` measure.

    python benchmarks/vllm_decode.py --config benchmarks/configs/gpt-oss-20b --out FILE [--quantization fp8|w4a16] [--batches 1 32]

Random weights, prompts of 64 tokens, no prefix cache, graphs of the batch sizes, the defaults else. Milliseconds are the difference
of a long and a short generation, over the tokens between them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS, SHORT, LONG, TURNS = 64, 8, 200, 5
W4A16 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False},
        },
    },
}  # fmt: skip
"""What `--quantization w4a16` adds to the config."""


def step_ms(engine: Any, batch: int) -> list[float]:
    """Milliseconds of a step, of each turn."""
    import vllm  # pyright: ignore[reportMissingImports]

    prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 1 for j in range(PROMPT_TOKENS)]} for i in range(batch)]

    def seconds(tokens: int) -> float:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    times = [(seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(TURNS + 1)]
    return times[1:]  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    started = time.perf_counter()
    options: dict[str, Any] = {"quantization": args.quantization} if args.quantization else {}
    if args.quantization == "w4a16":
        options = {"hf_overrides": {"quantization_config": W4A16}}
    engine = vllm.LLM(
        str(args.config), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=1024, max_num_seqs=max(args.batches), compilation_config={"cudagraph_capture_sizes": args.batches}, **options,
    )  # fmt: skip
    record: dict[str, Any] = {
        "vllm": vllm.__version__,
        "gpu": torch.cuda.get_device_name(),
        "config": args.config.name,
        "quantization": args.quantization,
        "load_s": time.perf_counter() - started,
        "rows": [],
    }
    for batch in args.batches:
        turns = step_ms(engine, batch)
        record["rows"].append({"batch": batch, "ms": statistics.median(turns), "turns_ms": turns})
        print(args.config.name, args.quantization, record["rows"][-1], flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    os._exit(0)  # its processes take a minute to end


if __name__ == "__main__":
    main()
