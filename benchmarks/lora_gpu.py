"""LoRA adapters in decode steps on one GPU: one adapter at batch size 1, four at 32 and 256, in turns with plain requests.

Usage: python benchmarks/lora_gpu.py [--config benchmarks/configs/llama8b] [--rank 64] [--out FILE]
       python benchmarks/lora_gpu.py --vllm        # the same of vLLM 0.26, in a process of its own
       python benchmarks/lora_gpu.py --products    # a layer's products by themselves, by kernel and with other tilings

Random weights of the shape, all linear layers adapted, prompts of 64 tokens. Milliseconds are of a step in which all requests
decode. The aims are ratios to plain steps: 1.15 at batch sizes 1 and 32, 1.10 at 256. "steered too": the ratio of steps that
also steer one site to those with adapters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_times import microseconds
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from suites.common import against_plain, one_site

from pymllm_interp import LM
from pymllm_interp.bench import describe_machine
from pymllm_interp.bench.common import random_prompts
from pymllm_interp.client.local_backend import InstallAdapter
from pymllm_interp.config import EngineTuning
from pymllm_interp.core.pass_parts import AdapterRows, AdapterSpan, RowTiles, tiles_of
from pymllm_interp.layers.gemm import Gemm
from pymllm_interp.layers.lora import LoRASlots
from pymllm_interp.models.adapters.adapter import Adapter
from pymllm_interp.models.adapters.targets import targets_of

ADAPTERS, AIMS = 4, {1: 1.15, 32: 1.15, 256: 1.10}
PROMPT_TOKENS, NEW_TOKENS = 64, 96
FACTORS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "down",
}


def adapter_of(lm: LM, rank: int) -> Adapter:
    """Random weights for all linear layers."""
    weights = {
        path: (
            torch.randn(rank, target.in_features, dtype=lm.dtype) * 0.01,
            torch.randn(target.out_features, rank, dtype=lm.dtype) * 0.01,
        )
        for path, target in targets_of(lm.runner.get_model()).items()
    }
    return Adapter("0", "random", weights, "0")


def names_for(batch: int) -> list[str]:
    """The adapter of each request."""
    return [str(i % (1 if batch == 1 else ADAPTERS)) for i in range(batch)]


def measure(config: Path, rank: int, batches: list[int]) -> list[dict[str, Any]]:
    """Steps with adapters beside plain ones, by batch size."""
    lm = LM(
        config, load_format="dummy", dtype="bfloat16", device="cuda", max_running_requests=max(AIMS), max_model_len=1024,
        kv_cache_tokens=max(AIMS) * 512, tuning=EngineTuning(prefill_graph_tokens=0), max_loras=ADAPTERS, max_lora_rank=rank,
    )  # fmt: skip
    with lm:
        first, free = adapter_of(lm, rank), torch.cuda.mem_get_info()[0]
        seconds: list[float] = []
        for name in range(ADAPTERS):
            own, started = dataclasses.replace(first, name=str(name), digest=str(name)), time.perf_counter()
            lm.backend.run(InstallAdapter(own))
            seconds.append(time.perf_counter() - started)
        taken = (free - torch.cuda.mem_get_info()[0]) / 2**30
        print(
            f"the first adapter took {seconds[0]:.1f} s to load, the others {seconds[-1]:.2f} s; all took {taken:.2f} GiB"
        )
        found: list[dict[str, Any]] = []
        for batch in batches:
            prompts, names = random_prompts(lm, batch, PROMPT_TOKENS), names_for(batch)
            before = dict(lm.engine.stats()["execution"])
            adapted = [{"lora": name} for name in names]
            row = against_plain(lm, prompts, adapted, NEW_TOKENS)
            after = lm.engine.stats()["execution"]
            replayed = sum(n - before.get(key, 0) for key, n in after.items() if str(key).startswith("replay"))
            steps = sum(n - before.get(key, 0) for key, n in after.items())
            steered = [each | {"interventions": [one_site(lm)]} for each in adapted]
            row["steered"] = against_plain(lm, prompts, steered, NEW_TOKENS, plain=adapted)
            found.append(
                {"batch": batch, "adapters": len(set(names)), "aim": AIMS[batch], **row, "replayed": replayed / steps}
            )
            print(json.dumps(found[-1]), flush=True)  # a run may be cut off
        return found


def write_folder(config: Path, rank: int, folder: Path) -> None:
    """The adapter in PEFT's format, for vLLM."""
    shape = json.loads((config / "config.json").read_text())
    hidden, heads, inner = shape["hidden_size"], shape["num_attention_heads"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * shape.get("head_dim", hidden // heads)
    width = heads * shape.get("head_dim", hidden // heads)
    sizes = {"q": (hidden, width), "k": (hidden, kv), "v": (hidden, kv), "o": (width, hidden), "mlp": (hidden, inner)}
    sizes["down"] = inner, hidden
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, kind in FACTORS.items():
            part = "mlp" if kind in ("mlp", "down") else "self_attn"
            path, (n_in, n_out) = f"base_model.model.model.layers.{layer}.{part}.{name}", sizes[kind]
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, n_in, dtype=torch.bfloat16) * 0.01
            tensors[f"{path}.lora_B.weight"] = torch.randn(n_out, rank, dtype=torch.bfloat16) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(FACTORS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(given))


def measure_vllm(config: Path, rank: int, batches: list[int]) -> list[dict[str, Any]]:
    """The same of vLLM: the difference of two lengths of generations, with and without adapters, in turns."""
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as name:
        write_folder(config, rank, Path(name))
        engine = vllm.LLM(
            str(config), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
            max_model_len=1024, max_num_seqs=max(AIMS), enable_lora=True, max_loras=ADAPTERS, max_lora_rank=rank,
            compilation_config={"cudagraph_capture_sizes": list(AIMS)},
        )  # fmt: skip

        def seconds(batch: int, tokens: int, adapted: bool) -> float:
            params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            prompts = [
                {"prompt_token_ids": [(7 * i + j) % 1000 + 1 for j in range(PROMPT_TOKENS)]} for i in range(batch)
            ]
            lora = [LoRARequest(own, int(own) + 1, name) for own in names_for(batch)] if adapted else None
            started = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False, lora_request=lora)
            return time.perf_counter() - started

        found: list[dict[str, Any]] = []
        for batch in batches:
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(4):
                for adapted, own in times.items():
                    step = (seconds(batch, NEW_TOKENS, adapted) - seconds(batch, 1, adapted)) / (NEW_TOKENS - 1) * 1e3
                    if turn:  # the first one warms up
                        own.append(step)
            plain, ms = (sorted(own)[len(own) // 2] for own in times.values())
            found.append({"batch": batch, "aim": AIMS[batch], "plain_ms": plain, "ms": ms, "ratio": ms / plain})
            print(json.dumps(found[-1]), flush=True)
        return found


# -- products -------------------------------------------------------------------------------------

SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
"""Products of an 8B model: inputs, and outputs of each projection."""
TILINGS: tuple[dict[str, int], ...] = (
    {}, {"EXPAND_COLUMNS": 128}, {"EXPAND_COLUMNS": 128, "EXPAND_WARPS": 8}, {"EXPAND_COLUMNS": 32}, {"MAX_STEPS": 1},
    {"MAX_STEPS": 2}, {"MAX_STEPS": 8}, {"FULL_GRID": 264}, {"FULL_GRID": 1056}, {"EXPAND_WARPS": 2}, {"EXPAND_WARPS": 8},
    {"SHRINK_RANKS": 64}, {"SHRINK_RANKS": 16}, {"SHRINK_COLUMNS": 64}, {"SHRINK_COLUMNS": 256}, {"MAX_PARTS": 4},
    {"MAX_PARTS": 2}, {"MAX_PARTS": 16}, {"PART_WIDTH": 256, "MAX_PARTS": 16}, {"SHRINK_WARPS": 8}, {"SHRINK_WARPS": 2},
    {"SHRINK_RANKS": 64, "MAX_PARTS": 4}, {"SHRINK_RANKS": 64, "SHRINK_WARPS": 8},
)  # fmt: skip
"""Constants of kernels/products/lora.py in place of its own."""


class AdaptedProduct:
    """A product with adapters, in `copies` that together exceed the L2 cache."""

    def __init__(self, name: str, rank: int, rows: int, copies: int = 6, device: str = "cuda") -> None:
        inputs, self.sizes = SHAPES[name]
        dtype = torch.bfloat16
        self.x = torch.randn(rows, inputs, dtype=dtype, device=device)
        weights = [
            torch.randn(sum(self.sizes), inputs, dtype=dtype, device=device) / inputs**0.5 for _ in range(copies)
        ]
        self.gemms = [Gemm([weight], weight, None) for weight in weights]
        self.slots = [LoRASlots(inputs, self.sizes, ADAPTERS, rank, weight) for weight in weights]
        for slots in self.slots:
            slots._a.normal_(std=0.01)
            slots._b.normal_(std=0.01)
        spans = [AdapterSpan(i % ADAPTERS, i, i + 1) for i in range(rows)]
        order, tiles = (torch.from_numpy(part).to(device) for part in tiles_of(spans))
        self.rows = AdapterRows(tiles=RowTiles(order, tiles))

    def times(self) -> dict[str, float]:
        """Microseconds of the product without adapters and with them, and of each kernel by itself."""
        from pymllm_interp.kernels.products import lora

        tiles, copies = self.rows.tiles, len(self.gemms)
        assert tiles is not None
        out = self.gemms[0](self.x)
        memory = lora.shrunk_memory(self.x, self.slots[0]._a)
        h = lora.shrink(self.x, self.slots[0]._a, tiles, memory)
        calls: dict[str, Callable[[int], Any]] = {
            "plain": lambda i: self.gemms[i](self.x),
            "adapted": lambda i: self.slots[i].product(self.gemms[i], self.x, self.rows),
            "shrink": lambda i: lora.shrink(self.x, self.slots[i]._a, tiles, memory),
            "expand": lambda i: lora.expand(out, h, self.slots[i]._b, self.sizes, tiles, True),
        }
        return {name: microseconds([partial(call, i) for i in range(copies)]) for name, call in calls.items()}


@torch.inference_mode()
def measure_products(rank: int, batches: list[int]) -> list[dict[str, Any]]:
    """Times of each product with the tilings of today, and sums of a layer with others."""
    from pymllm_interp.kernels.products import lora

    found: list[dict[str, Any]] = []
    for batch in batches:
        products = {name: AdaptedProduct(name, rank, batch) for name in SHAPES}
        for tiling in TILINGS:
            before = {name: getattr(lora, name) for name in tiling}
            lora.__dict__.update(tiling)
            try:
                times = {name: product.times() for name, product in products.items()}
            except Exception as error:  # a tiling that the device refuses
                print(f"{batch:4} {tiling}: {type(error).__name__} {str(error)[:80]}", flush=True)
                continue
            finally:
                lora.__dict__.update(before)
            layer = {key: sum(own[key] for own in times.values()) for key in ("plain", "adapted", "shrink", "expand")}
            found.append({"batch": batch, "tiling": tiling, "layer": layer, "products": times})
            text = "  ".join(f"{key} {us:6.1f}" for key, us in layer.items())
            print(
                f"{batch:4} {text}  adds {layer['adapted'] - layer['plain']:5.1f}  {tiling or 'as it is'}", flush=True
            )
            for name, own in times.items() if not tiling else ():
                print(f"       {name:8}" + "  ".join(f"{key} {us:6.1f}" for key, us in own.items()), flush=True)
        del products
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "configs" / "llama8b")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(AIMS), help="of 1,32,256"
    )
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.products:
        record = {"device": torch.cuda.get_device_name(), "rows": measure_products(args.rank, args.batches)}
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        return
    rows = (measure_vllm if args.vllm else measure)(args.config, args.rank, args.batches)
    columns = "batch", "plain ms", "adapters ms", "ratio", "aim", "steered too"
    table = Table(*columns, title="vLLM" if args.vllm else "pymllm-interp")
    for row in rows:
        values = row["plain_ms"], row["ms"], row["ratio"], row["aim"], row.get("steered", {}).get("ratio", float("nan"))
        table.add_row(str(row["batch"]), *(f"{value:.3f}" for value in values))
    Console().print(table)
    if args.out:
        args.out.write_text(
            json.dumps({"machine": describe_machine(), "rank": args.rank, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
