"""Each kernel of kernels/triton_kernels.py against torch and cuBLAS, on one GPU.

Usage: python benchmarks/gpu_kernels.py [--config llama8b llama1b] [--rows 1 32 256 8192] [--skip elementwise gemv skinny]
       [--out benchmarks/results/gpu-kernels.json]

GPU microseconds of one call, in bfloat16. Calls are captured in a CUDA graph, which is replayed between two events; the median of
several replays counts. As in a model with many layers, calls cycle through copies of the weights that together exceed the L2 cache.
Activations stay in the cache if they are small.

- elementwise: add + norm, rotation + KV write, silu * up, against the same in plain torch.
- gemv: one row, every (block_k, warps) against cuBLAS.
- skinny: 2 to 64 rows, a candidate that nothing uses: the weight is the tall operand of `tl.dot`, K is split or not.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from graph_times import microseconds
from triton.runtime.errors import OutOfResources

from pymllm_interp.bench import describe_machine
from pymllm_interp.kernels import triton_kernels
from pymllm_interp.layers import activation, norm, rope
from pymllm_interp.mem_cache import KVPool

CONFIGS = Path(__file__).parent / "configs"
DTYPE = torch.bfloat16
COLD_BYTES = 256 << 20
"""Bytes of weights that a captured graph reads before it reads the first one again."""
SWEEP = list(itertools.product((512, 1024, 2048, 4096), (1, 2, 4, 8)))
"""gemv: block_k, warps."""
SKINNY_ROWS = (2, 8, 16, 32, 64)
SKINNY = [
    (64, 128, 1, 4, 4), (64, 256, 1, 3, 4), (128, 64, 1, 6, 4), (128, 128, 1, 4, 4), (32, 256, 1, 4, 4),
    (64, 128, 2, 4, 4), (64, 256, 2, 3, 4), (128, 128, 2, 4, 4), (64, 128, 4, 4, 4), (128, 128, 4, 4, 8),
]  # fmt: skip
"""skinny: block_n, block_k, parts of K, stages, warps."""


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


def in_torch(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A public function in plain torch: with gradients enabled, it uses none of our kernels."""

    def call() -> Any:
        with torch.enable_grad():
            return function(*args)

    return call


def products(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The model's weight matrices, (out, in)."""
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "o": (hidden, heads * dim),
        "gate_up": (2 * inter, hidden),
        "down": (hidden, inter),
        "head": (config["vocab_size"], hidden),
    }


def weights(n: int, k: int) -> list[torch.Tensor]:
    """Copies that together exceed the L2 cache."""
    return [0.02 * randn(n, k) for _ in range(max(1, -(-COLD_BYTES // (2 * n * k))))]


# -- between the products ------------------------------------------------------------------------


def elementwise(config: dict[str, Any], rows: int) -> Iterator[dict[str, Any]]:
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    h, delta, weight = randn(1, rows, hidden), randn(1, rows, hidden), randn(hidden)
    gate_up, qkv = randn(1, rows, 2 * inter), randn(rows, heads + 2 * kv_heads, dim)
    angles = torch.rand(1, rows, dim, device="cuda")
    turned = rope.rotation(angles.cos().to(DTYPE), angles.sin().to(DTYPE))
    pool = KVPool(1, rows + 16, kv_heads, dim, DTYPE, "cuda", 16)
    slots = torch.randperm(rows, device="cuda") + 16
    head_weight = randn(dim)
    cases: dict[str, tuple[Callable[..., Any], tuple, int]] = {  # ..., bytes that must move
        "rms_norm": (norm.rms_norm, (h, weight, 1e-5), 2 * h.nbytes),
        "add_rms_norm": (norm.add_rms_norm, (h, delta, weight, 1e-5), 4 * h.nbytes),
        "norm_heads": (norm.norm_heads, (qkv, head_weight, head_weight, kv_heads, 1e-5), 2 * qkv.nbytes),
        "rope": (rope.apply_rope, (qkv[:, :heads], *turned), 2 * heads * rows * dim * 2),
        "rope_and_write": (rope.rope_and_write, (qkv, *turned, pool, 0, slots), 2 * qkv.nbytes),
        "silu_mul": (activation.gated, (gate_up, activation.silu), 3 * gate_up.nbytes // 2),
    }
    for name, (function, args, moved) in cases.items():
        ours = microseconds([lambda function=function, args=args: function(*args)])
        theirs = microseconds([in_torch(function, *args)])
        yield {"kernel": name, "rows": rows, "us": ours, "torch_us": theirs, "gb_s": moved / ours / 1e3}


# -- one row ---------------------------------------------------------------------------------------


def gemv(name: str, n: int, k: int) -> dict[str, Any]:
    x, copies = randn(1, 1, k), weights(n, k)
    sweep = []
    for block_k, warps in SWEEP:
        calls = [lambda w=w, o=(block_k, warps): triton_kernels.gemv(x, w, None, *o) for w in copies]
        sweep.append({"block_k": block_k, "warps": warps, "us": microseconds(calls)})
    cublas = microseconds([lambda w=w: F.linear(x, w) for w in copies])
    default = microseconds([lambda w=w: triton_kernels.gemv(x, w, None) for w in copies])
    sweep.sort(key=lambda row: row["us"])
    return {"product": name, "n": n, "k": k, "us": default, "cublas_us": cublas, "best": sweep[0], "sweep": sweep}


# -- a few rows ------------------------------------------------------------------------------------


@triton.jit
def _skinny(
    x, weight, out, m, n, K: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [PARTS, m, n]: partial products over each part of K. `n` is a multiple of BLOCK_N, K of PARTS * BLOCK_K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    inner = part * (K // PARTS) + tl.arange(0, BLOCK_K)
    tall = weight + column.to(tl.int64)[:, None] * K + inner[None, :]
    wide = x + row[None, :] * K + inner[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for _ in range(K // PARTS // BLOCK_K):
        total = tl.dot(tl.load(tall), tl.load(wide, mask=row[None, :] < m, other=0.0), total)
        tall += BLOCK_K
        wide += BLOCK_K
    target = out + (part * m + row)[None, :].to(tl.int64) * n + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=row[None, :] < m)


@triton.jit
def _sum_parts(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor, block_n: int, block_k: int, parts: int, stages: int, warps: int
) -> torch.Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]."""
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    partial = out if parts == 1 else torch.empty(parts, m, n, dtype=torch.float32, device=x.device)
    block_m = max(16, 1 << (m - 1).bit_length())
    _skinny[(n // block_n, parts)](
        x, weight, partial, m, n, k, parts, block_m, block_n, block_k, num_warps=warps, num_stages=stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    if parts > 1:
        _sum_parts[(-(-m * n // 1024),)](partial, out, m * n, parts, 1024, enable_fp_fusion=True)
    return out


def skinny(name: str, n: int, k: int, rows: int) -> dict[str, Any]:
    x, copies = randn(rows, k), weights(n, k)
    expected, tried = F.linear(x, copies[0]), []
    for options in SKINNY:
        block_n, block_k, parts, _, _ = options
        if n % block_n or k % (parts * block_k):
            continue
        try:
            torch.testing.assert_close(skinny_gemm(x, copies[0], *options), expected, rtol=0.02, atol=0.02)
        except OutOfResources:
            continue
        calls = [lambda w=w, o=options: skinny_gemm(x, w, *o) for w in copies]
        tried.append({"options": options, "us": microseconds(calls)})
    cublas = microseconds([lambda w=w: F.linear(x, w) for w in copies])
    tried.sort(key=lambda row: row["us"])
    return {"product": name, "n": n, "k": k, "rows": rows, "cublas_us": cublas, "best": tried[0], "tried": tried}


# -- all of it -------------------------------------------------------------------------------------


def measure(config: str, rows: list[int], skip: list[str]) -> Iterator[dict[str, Any]]:
    """Lines of the table, as they are measured."""
    model = json.loads((CONFIGS / config / "config.json").read_text())
    if "elementwise" not in skip:
        for n in rows:
            yield from ({"config": config, **row} for row in elementwise(model, n))
    for name, (n, k) in products(model).items():
        if "gemv" not in skip:
            yield {"config": config, "kernel": "gemv", "rows": 1, **gemv(name, n, k)}
        if "skinny" not in skip and name != "head":
            for m in SKINNY_ROWS:
                yield {"config": config, "kernel": "skinny", **skinny(name, n, k, m)}
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"{row['config']:<9}{row['kernel']:<15}{row.get('product', ''):<8}{row['rows']:>6}"
    if "torch_us" in row:
        return f"{head}{row['us']:>9.1f} us{row['torch_us']:>9.1f} torch{row['gb_s']:>7.0f} GB/s"
    best = row["best"]
    options = best.get("options") or (best["block_k"], best["warps"])
    ours = f"{row['us']:>9.1f} us" if "us" in row else " " * 12
    return f"{head}{ours}{row['cublas_us']:>9.1f} cublas{best['us']:>8.1f} best {options}"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", default=["llama8b", "llama1b"], help="folders in benchmarks/configs")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 256, 8192])
    parser.add_argument("--skip", nargs="+", default=[], choices=["elementwise", "gemv", "skinny"])
    parser.add_argument("--out", type=Path, default=None, help="a JSON file to write")
    args = parser.parse_args()
    machine, results = describe_machine(), []
    for row in itertools.chain.from_iterable(measure(config, args.rows, args.skip) for config in args.config):
        results.append(row)
        print(line(row), flush=True)
        if args.out is not None:  # after each line: what comes later may fail
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
