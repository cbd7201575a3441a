"""Decode attention of one layer over paged K and V: our kernel, FlashInfer's, and vLLM's FlashAttention 3, on one GPU.

Usage: python benchmarks/decode_attention_gpu.py [--cases mix long] [--only ours fa2] [--sweep] [--fp8] [--vllm FOLDER] [--out FILE]

32 heads over 8 of size 128 in bfloat16, pages of 16 slots in random order. "mix" has 256 requests of 100 to 2,000 positions, "long"
64 of 8,000. Prints microseconds of a call inside a CUDA graph, the bandwidth of K and V that are read, and its part of 4.54 TB/s.
Each result is compared with plain torch for the first requests.

- ours: kernels/triton_decode.py. --sweep: with other blocks, stages, warps, and parts of a request.
- fa2, cuda-cores, fa3: FlashInfer's decode wrapper with and without tensor cores, and with Hopper's prefill kernel.
- xqa: FlashInfer's port of TensorRT-LLM's XQA. Its module must have been compiled.
- vllm-fa3: `_vllm_fa3_C.abi3.so` of vLLM's wheel, unpacked at FOLDER (vLLM itself is not imported).
- --fp8: K and V in FP8, for ours and xqa.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from graph_times import microseconds

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BANDWIDTH = 4.54e12
CASES: dict[str, tuple[int, tuple[int, int]]] = {
    "mix": (256, (100, 2000)), "mix-64": (64, (100, 2000)), "mix-512": (512, (100, 2000)), "long": (64, (8000, 8000)),
    "one": (1, (8000, 8000)), "tiny": (3, (5, 40)),
}  # fmt: skip
"""Name -> requests, and their positions, from and to."""
CHECKED = 6
"""Requests that are compared with plain torch."""
SWEEP = (
    (128, 2, 4), (128, 2, 8), (128, 5, 4), (64, 2, 4), (64, 5, 4), (64, 5, 8), (64, 7, 4), (32, 2, 4), (32, 5, 4), (32, 7, 4),
)  # fmt: skip
"""Tried blocks of positions, stages and warps of our kernel. Up to four stages, Triton 3.6 has one buffer."""
PARTS = ((1, 512), (2, 512), (4, 256), (4, 512), (8, 256))
"""Tried parts of a request at most, and positions of each at least."""


class Case:
    """Requests with random K and V in shuffled pages, with pages of other sizes as views."""

    def __init__(self, name: str, device: str, fp8: bool = False) -> None:
        requests, (least, most) = CASES[name]
        random = torch.Generator().manual_seed(0)
        self.name, self.device, self.scale = name, device, DIM**-0.5
        self.lens_cpu = torch.randint(least, most + 1, (requests,), generator=random, dtype=torch.int32)
        pages = (self.lens_cpu + PAGE - 1) // PAGE
        self.pages_cpu = pages
        total = int(pages.sum())
        order = torch.randperm(total, generator=random, dtype=torch.int32) + 1
        width = int(pages.max())
        self.page_table = torch.zeros(requests, width, dtype=torch.int32)
        for row, own in enumerate(order.split(pages.tolist())):
            self.page_table[row, : len(own)] = own
        self.page_table = self.page_table.to(device)
        slots = self.page_table[:, :, None] * PAGE + torch.arange(PAGE, dtype=torch.int32, device=device)
        self.slots = slots.flatten(1).contiguous()
        shape = (total + 1) * PAGE, KV_HEADS, DIM
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.k, self.v = (torch.randn(shape, dtype=self.dtype, device=device) for _ in range(2))
        if fp8:
            self.k, self.v = (tensor.to(torch.float8_e4m3fn) for tensor in (self.k, self.v))
        self.paged = self.k.view(-1, PAGE, KV_HEADS, DIM), self.v.view(-1, PAGE, KV_HEADS, DIM)
        self.q = torch.randn(requests, HEADS, DIM, dtype=self.dtype, device=device)
        self.out = torch.zeros_like(self.q)
        self.lens, self.rows = self.lens_cpu.to(device), torch.arange(requests, device=device)
        self.bytes = int(self.lens_cpu.sum()) * KV_HEADS * DIM * 2 * self.k.element_size()
        self.wanted = self.in_torch()

    def in_torch(self) -> torch.Tensor:
        """The first requests' attention in float32."""
        from pymllm_interp.attention.decode_kernel import decode_attention_torch

        first = min(CHECKED, len(self.q))
        out = torch.zeros(first, HEADS, DIM, device=self.device)
        tensors = self.q[:first].float(), self.k, self.v, self.rows[:first], self.lens[:first], self.slots, out
        decode_attention_torch(*tensors, self.scale, 0, None)
        return out

    def indptr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """FlashInfer's pages: (first page of each request, pages, slots in the last page of each)."""
        first = torch.zeros(len(self.q) + 1, dtype=torch.int32)
        first[1:] = self.pages_cpu.cumsum(0)
        rows = zip(self.page_table.cpu(), self.pages_cpu.tolist(), strict=True)
        indices = torch.cat([row[:count] for row, count in rows]).to(self.device)
        return first, indices, (self.lens_cpu - 1) % PAGE + 1


# -- ways -----------------------------------------------------------------------------------------


def ours(case: Case) -> Callable[[], Any]:
    from pymllm_interp.attention.attention_backend import RadixAttention
    from pymllm_interp.attention.decode_kernel import DecodeAttention
    from pymllm_interp.kernels.triton_decode import decode_attention

    attention = DecodeAttention(case.q.device)
    layer = RadixAttention(0, HEADS, KV_HEADS, DIM, case.scale)
    memory = attention._memory_for(layer, case.q.device)
    tensors = case.q, case.k, case.v, case.rows, case.lens, case.slots, case.out, *memory
    return lambda: decode_attention(*tensors, attention._num_sms, case.scale, 0, 0.0)


@cache
def heads_first() -> ModuleType:
    """Our kernel with the KV heads of a request beside each other: they read whole pages at the same time."""
    from pymllm_interp.kernels import triton_decode

    text, old = Path(triton_decode.__file__).read_text(), "request, kv_head, part = tl.program_id(0), tl.program_id(1)"
    assert old in text, "the kernel has another order now"
    text = text.replace(old, "request, kv_head, part = tl.program_id(1), tl.program_id(0)")
    path = Path(tempfile.mkdtemp()) / "heads_first.py"
    path.write_text(text.replace("from .launch", "from pymllm_interp.kernels.launch"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def swept(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Our kernel with other constants."""
    from pymllm_interp.kernels import triton_decode

    requests = len(case.q)
    counters = torch.zeros(requests * KV_HEADS, dtype=torch.int32, device=case.device)
    parts = torch.empty(requests * HEADS * max(own for own, _ in PARTS) * (DIM + 1), device=case.device)
    tensors = case.q, case.k, case.v, case.rows, case.lens, case.slots, case.out, parts, counters, case.q
    orders = ("requests", triton_decode, (requests, KV_HEADS)), ("heads", heads_first(), (KV_HEADS, requests))
    for (block, stages, warps), (order, module, grid) in itertools.product(SWEEP, orders):
        constants = HEADS, KV_HEADS, DIM, 16, 0, False, False, block, stages, HEADS // KV_HEADS, 16
        for splits, least in PARTS:
            numbers = case.slots.shape[1], case.q.stride(0), splits, max(least, block), case.scale, 0.0, 1.0
            yield (
                f"{order} first, {block} x {stages}, {warps} warps, {splits} of {least}",
                partial(module._launch(stages), (*grid, splits), tensors, numbers, constants, warps),
            )


def by_flashinfer(case: Case, backend: str, tensor_cores: bool) -> Callable[[], Any]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]

    memory = torch.zeros(256 << 20, dtype=torch.uint8, device=case.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", use_tensor_cores=tensor_cores, backend=backend)
    dtypes = {"q_data_type": case.dtype, "kv_data_type": case.k.dtype}
    wrapper.plan(*case.indptr(), HEADS, KV_HEADS, DIM, PAGE, sm_scale=case.scale, **dtypes)
    return lambda: wrapper.run(case.q, case.paged, out=case.out)


def fa3(case: Case) -> Callable[[], Any]:
    """FlashInfer's prefill wrapper with a row for each request."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]

    memory = torch.zeros(256 << 20, dtype=torch.uint8, device=case.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(memory, "NHD", backend="fa3")
    rows = torch.arange(len(case.q) + 1, dtype=torch.int32)
    options = {"causal": True, "sm_scale": case.scale, "q_data_type": case.dtype, "kv_data_type": case.dtype}
    wrapper.plan(rows, *case.indptr(), HEADS, KV_HEADS, DIM, PAGE, **options)
    return lambda: wrapper.run(case.q, case.paged, out=case.out)


def xqa(case: Case) -> Callable[[], Any]:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache  # pyright: ignore[reportMissingImports]

    memory = torch.zeros(512 << 20, dtype=torch.uint8, device=case.device)
    lens, longest = case.lens.view(torch.uint32), case.page_table.shape[1] * PAGE
    return lambda: xqa_batch_decode_with_kv_cache(
        case.q, case.paged, memory, case.page_table, lens, longest, bmm1_scale=case.scale, bmm2_scale=1.0, out=case.out
    )


def vllm_fa3(case: Case, folder: Path) -> Callable[[], Any]:
    torch.ops.load_library(str(next(folder.rglob("_vllm_fa3_C.abi3.so"))))
    own, requests = torch.ops._vllm_fa3_C, len(case.q)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=case.device)
    longest, page_table = int(case.lens_cpu.max()), case.page_table
    plan = own.get_scheduler_metadata(
        requests, 1, longest, HEADS, KV_HEADS, DIM, DIM, case.dtype, case.lens, starts, None, None, None, None, PAGE, 0, True,
        -1, -1, False, 0, None, 0,
    )  # fmt: skip
    k, v = case.paged
    return lambda: own.fwd(
        case.q, k, v, None, None, None, case.out, starts, None, None, None, case.lens, 1, longest, page_table, None, None,
        None, None, None, None, None, None, case.scale, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip


# -- times ----------------------------------------------------------------------------------------


def row_of(case: Case, name: str, make: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Times of one way, or why there are none."""
    row: dict[str, Any] = {"case": case.name, "way": name, "kv": str(case.k.dtype).removeprefix("torch.")}
    try:
        call = make()
        case.out.zero_()
        call()
        torch.cuda.synchronize()
        row["error"] = float((case.out[: len(case.wanted)].float() - case.wanted).abs().max())
        row["us"] = microseconds([call])
        row["gb_s"] = case.bytes / row["us"] / 1e3
        row["of_limit"] = row["gb_s"] * 1e9 / BANDWIDTH
    except Exception as error:  # a library that is missing, or that refuses the shape, is a line of the table
        row["refused"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:150] if str(error) else ''}"
    return row


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"{row['case']:8}{row['kv']:14}{row['way']:48}"
    if "refused" in row:
        return f"{head}{row['refused']}"
    return f"{head}{row['us']:9.1f} us{row['gb_s']:8.0f} GB/s{row['of_limit']:7.1%}   error {row['error']:.4f}"


def ways_of(case: Case, vllm: Path | None) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Name -> a function that prepares a way."""
    ways: dict[str, Callable[[], Callable[[], Any]]] = {"ours": lambda: ours(case), "xqa": lambda: xqa(case)}
    if case.k.dtype is case.dtype:
        ways["fa2"] = lambda: by_flashinfer(case, "fa2", True)
        ways["cuda-cores"] = lambda: by_flashinfer(case, "fa2", False)
        ways["fa3"] = lambda: fa3(case)
        if vllm is not None:
            ways["vllm-fa3"] = lambda: vllm_fa3(case, vllm)
    return ways


def measure(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one case, printed as they come; of the sweep, the best ones."""
    rows: list[dict[str, Any]] = []
    for name, make in ways_of(case, args.vllm).items():
        if not args.only or name in args.only:
            rows.append(row_of(case, name, make))
            print(line(rows[-1]), flush=True)
    tried = [row_of(case, label, lambda call=call: call) for label, call in swept(case)] if args.sweep else []
    for row in sorted((row for row in tried if "us" in row), key=lambda row: row["us"])[:8]:
        print(line(row), flush=True)
    for row in [row for row in tried if "refused" in row][:3]:
        print(line(row), flush=True)
    return rows + tried


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["mix", "long"], choices=list(CASES))
    parser.add_argument("--only", nargs="+", help="of ours, fa2, cuda-cores, fa3, xqa, vllm-fa3")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's unpacked wheel")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in args.cases:
        results += measure(Case(name, "cuda", args.fp8), args)
        if args.out:  # a run may be cut off
            record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
