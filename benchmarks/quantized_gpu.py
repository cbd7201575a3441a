"""Decode steps of an 8B shape in bfloat16, FP8 and W4A16 on one GPU, at batch sizes 1, 32 and 256.

Usage: python benchmarks/quantized_gpu.py [--config benchmarks/configs/llama8b] [--only bf16,fp8] [--batches 1,32] [--out FILE]
       python benchmarks/quantized_gpu.py --only config --config benchmarks/configs/gpt-oss-20b --steered   # as the config says
       python benchmarks/quantized_gpu.py --products      # each product by itself, in microseconds
       python benchmarks/quantized_gpu.py --products --vllm FOLDER   # beside Marlin, out of vLLM's wheel that is unpacked there
       python benchmarks/quantized_gpu.py --products --humming   # beside humming-kernels, if it is installed
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
from pymllm_interp.layers.quantization.gemm import QuantizedGemm, laid_out
from pymllm_interp.layers.quantization.weight import QuantizedWeight, quantized

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
FLOPS, BANDWIDTH = 790e12, 4.54e12
UINT4B8 = 0x4000000100400
"""vLLM's number of the type of codes: unsigned, of 4 bits, less 8 (vllm/scalar_type.py)."""


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


def microseconds(functions: list[Any], x: torch.Tensor) -> float:
    """Of a call inside a CUDA graph of 20 calls or more, which take turns."""
    functions = functions * -(-20 // len(functions))
    for function in functions[:3]:
        function(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function(x)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(5):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / (5 * len(functions))


class Marlin:
    """A W4A16 weight multiplied by vLLM's Marlin kernel (Frantar et al., 2024), as vLLM lays it out and calls it.

    Args:
        weight: codes of 4 bits with symmetric scales of 128 inputs each, as `quantized` makes them.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        (self.n, half), device = weight.codes.shape, weight.codes.device
        self.k, self.empty = 2 * half, torch.empty(0, dtype=torch.int32, device=device)
        by_input = weight.codes.view(torch.int32).t().contiguous()  # [in / 8, out]: eight inputs in a number
        self.codes = torch.ops._C.gptq_marlin_repack(by_input, self.empty, self.k, self.n, 4, False)
        order = [i + 8 * j for i in range(8) for j in range(8)]
        scales = weight.scales.t().to(torch.bfloat16).reshape(-1, 64)[:, order]
        self.scales = scales.reshape(-1, self.n).contiguous()
        self.memory = torch.zeros(
            4 * torch.cuda.get_device_properties(device).multi_processor_count, dtype=torch.int32, device=device
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.codes, None, self.scales, None, None, self.empty, self.empty, self.empty, self.memory
        return torch.ops._C.marlin_gemm(
            x, None, *parts, UINT4B8, x.shape[0], self.n, self.k, True, False, True, False
        )  # fmt: skip


def humming(dense: list[torch.Tensor]) -> tuple[list[Any], torch.Tensor]:
    """W4A16 layers of humming-kernels, and the first one's weight [in, out] in float32 before it was rounded."""
    from humming.layer import HummingLayer

    layers = []
    for one in dense:
        layer = HummingLayer(
            *one.shape, weight_config={"dtype": "uint4", "group_size": 128}, torch_dtype=one.dtype
        ).cuda()
        layer.load_from_unquantized(one)
        layer.transform()
        layers.append(layer)
    return layers, dense[0].float().T


@torch.no_grad()
def products(batches: list[int], vllm: Path | None, beside_humming: bool) -> list[dict[str, Any]]:
    """Each product of the shape by itself, and its greatest difference from the dequantised one. Weights exceed the L2 cache."""
    found: list[dict[str, Any]] = []
    if vllm is not None:
        torch.ops.load_library(str(next(vllm.rglob("_C_stable_libtorch.abi3.so"))))
    for name, (rows, width) in SHAPES.items():
        copies = max(2, (1 << 28) // (rows * width))
        dense = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) / width**0.5 for _ in range(copies)]
        plain = [Gemm([one], one, None) for one in dense]
        kinds: dict[str, list[Any]] = {}
        exact: dict[str, torch.Tensor] = {}
        for kind, made in (("fp8", ("fp8", None)), ("w4a16", ("uint4", 128))):
            weights = [quantized(one, *made) for one in dense]
            exact[kind] = weights[0].dequantize(torch.float32).T
            if kind == "w4a16" and vllm is not None:  # before the kernels of ours lay the codes out anew
                kinds["marlin"], exact["marlin"] = [Marlin(one) for one in weights], exact[kind]
            kinds[kind] = [QuantizedGemm(laid_out(one), None) for one in weights]
        if beside_humming:
            kinds["humming"], exact["humming"] = humming(dense)
        for batch in batches:
            x = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
            row: dict[str, Any] = {"product": name, "rows": batch, "bf16_us": microseconds(plain, x)}
            for kind, gemms in kinds.items():
                wanted = x.float() @ exact[kind]
                row[f"{kind}_us"] = microseconds(gemms, x)
                row[f"{kind}_error"] = float((gemms[0](x) - wanted).abs().max() / wanted.abs().max())
            row["w4a16_limit_us"] = max(rows * width / 2 / BANDWIDTH, 2 * batch * rows * width / FLOPS) * 1e6
            print(json.dumps(row), flush=True)
            found.append(row)
        del dense, plain, kinds, exact
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "configs" / "llama8b")
    parser.add_argument("--only", default=",".join(FORMATS), help='of these, or "config"')
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--steered", action="store_true")
    parser.add_argument("--pairs", type=int, default=15, help="of --steered")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's unpacked wheel, for --products")
    parser.add_argument("--humming", action="store_true", help="humming-kernels too, for --products")
    parser.add_argument("--kv", metavar="REQUESTSxPOSITIONS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(size) for size in args.batches.split(",")]
    rows: list[dict[str, Any]] = []
    if args.products:
        rows = products(batches, args.vllm, args.humming)
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
