"""Decode steps of an 8B shape in bfloat16, FP8 and W4A16 on one GPU, at batch sizes 1, 32 and 256.

Usage: python benchmarks/quantized_gpu.py [--config benchmarks/configs/llama8b] [--only bf16,fp8] [--batches 1,32] [--out FILE]
       python benchmarks/quantized_gpu.py --only config --config benchmarks/configs/gpt-oss-20b --steered   # as the config says
       python benchmarks/quantized_gpu.py --products      # each product by itself, in microseconds
       python benchmarks/quantized_gpu.py --kv 64x8000    # K and V in bfloat16 and FP8, so many requests of so many positions

Random weights of the shape, rounded to each format; prompts of 64 tokens. Milliseconds are of a step in which all requests decode.
Each format has an engine of its own, one after the other in one process; bfloat16 comes first. Rows are printed as they come.
"steered": the ratio of steps in which each request steers one site to plain ones, in turns (`--pairs` of them).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from suites.common import against_plain, one_site, steady_ms
from transformers import AutoConfig

from pymllm_interp import LM
from pymllm_interp.bench import describe_machine
from pymllm_interp.bench.common import greedy, random_prompts
from pymllm_interp.client.handle import RequestHandle
from pymllm_interp.config import EngineTuning
from pymllm_interp.layers.gemm import Gemm
from pymllm_interp.layers.quantization.gemm import QuantizedGemm
from pymllm_interp.layers.quantization.weight import quantized

BATCHES, PROMPT_TOKENS, NEW_TOKENS, TURNS = (1, 32, 256), 64, 96, 3
AIMS = {
    "fp8": {1: 2.7, 32: 3.7, 256: 8.5},
    "fp8-w8a8": {1: 2.7, 32: 3.7, 256: 8.5},
    "w4a16": {1: 2.1, 32: 3.3, 256: 9.5},
}
"""Milliseconds on an H200."""
W4A16 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}},
    },
}  # fmt: skip
FORMATS = ("bf16", "fp8", "fp8-w8a8", "w4a16")
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""[out, in] of an 8B model's products."""


def measure(config: Path, form: str, batches: list[int], steered_pairs: int) -> list[dict[str, Any]]:
    """Steps of one format by batch size, and the ratio of steered ones where `steered_pairs` is not 0."""
    options: dict[str, Any] = {"quantize": form} if form.startswith("fp8") else {}
    if form == "w4a16":
        options["hf_config"] = AutoConfig.from_pretrained(config)
        options["hf_config"].quantization_config = W4A16
    lm = LM(
        config, load_format="dummy", dtype="bfloat16", device="cuda", max_running_requests=max(batches), max_model_len=1024,
        kv_cache_tokens=max(batches) * 512, tuning=EngineTuning(prefill_graph_tokens=0), **options,
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    with lm:
        gib = torch.cuda.memory_allocated() / 2**30
        for batch in batches:
            ms, times = step_ms(lm, batch, PROMPT_TOKENS)
            row = {
                "format": form,
                "batch": batch,
                "ms": ms,
                "turns_ms": times,
                "aim": AIMS.get(form, {}).get(batch),
                "allocated_gib": gib,
            }
            if steered_pairs:
                declared = [{"interventions": [one_site(lm)]}] * batch
                prompts = random_prompts(lm, batch, PROMPT_TOKENS)
                row["steered"] = against_plain(lm, prompts, declared, NEW_TOKENS, pairs=steered_pairs)
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def step_ms(lm: LM, batch: int, prompt_tokens: int) -> tuple[float, list[float]]:
    """Milliseconds of a step in which all requests decode: the median, and each turn's."""
    prompts = random_prompts(lm, batch, prompt_tokens)

    def submit(count: int) -> list[RequestHandle]:
        return [lm.submit(prompt, greedy(count)) for prompt in prompts]

    times = [steady_ms(lm, submit, NEW_TOKENS) for _ in range(TURNS + 1)][1:]  # the first one warms up
    return statistics.median(times), times


def measure_kv(config: Path, batch: int, positions: int) -> list[dict[str, Any]]:
    """Steps with K and V in bfloat16, and in FP8. Prompts are computed once: their pages stay in the prefix cache."""
    found: list[dict[str, Any]] = []
    for dtype in ("auto", "fp8"):
        with LM(
            config, load_format="dummy", dtype="bfloat16", device="cuda", max_running_requests=batch, kv_cache_dtype=dtype,
            max_model_len=positions + 2 * NEW_TOKENS, kv_cache_tokens=batch * (positions + 2 * NEW_TOKENS),
        ) as lm:  # fmt: skip
            ms, times = step_ms(lm, batch, positions)
        found.append({"kv": dtype, "batch": batch, "positions": positions, "ms": ms, "turns_ms": times})
        print(json.dumps(found[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    found[1]["ratio"] = found[0]["ms"] / found[1]["ms"]
    return found


def microseconds(function: Any, x: torch.Tensor) -> float:
    """Of a call inside a CUDA graph of 20 calls."""
    for _ in range(3):
        function(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            function(x)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(5):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / 100


@torch.no_grad()
def products(batches: list[int]) -> list[dict[str, Any]]:
    """Each product of the shape by itself, and its greatest difference from the dequantised one."""
    found: list[dict[str, Any]] = []
    for name, (rows, width) in SHAPES.items():
        dense = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) / width**0.5
        kinds = {"fp8": quantized(dense), "w4a16": quantized(dense, "uint4", 128)}
        for batch in batches:
            x = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
            row: dict[str, Any] = {
                "product": name,
                "rows": batch,
                "bf16_us": microseconds(Gemm([dense], dense, None), x),
            }
            for kind, weight in kinds.items():
                gemm, exact = QuantizedGemm(weight, None), x.float() @ weight.dequantize(torch.float32).T
                row[f"{kind}_us"] = microseconds(gemm, x)
                row[f"{kind}_error"] = float((gemm(x) - exact).abs().max() / exact.abs().max())
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "configs" / "llama8b")
    parser.add_argument("--only", default=",".join(FORMATS), help='of these, or "config"')
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--steered", action="store_true")
    parser.add_argument("--pairs", type=int, default=15, help="of --steered")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--kv", metavar="REQUESTSxPOSITIONS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(size) for size in args.batches.split(",")]
    rows: list[dict[str, Any]] = []
    if args.products:
        rows = products(batches)
    if args.kv:
        rows += measure_kv(args.config, *map(int, args.kv.split("x")))
    for form in [] if args.products or args.kv else args.only.split(","):
        rows += measure(args.config, form, batches, args.pairs * args.steered)
        gc.collect()
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
