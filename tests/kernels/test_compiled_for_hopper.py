"""Kernels compile for a GPU that is not there: Triton's interpreter takes what its compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels' tests need the package triton")
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

def compiled(kernel, pointers, constants, warps, stages):
    names = kernel.arg_names
    types = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in pointers.items() if kind[0] == "*"}
    source = ASTSource(kernel, types, values, aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    assert made.asm["cubin"] and made.metadata.shared <= 227 << 10, f"{kernel}: {made.metadata.shared} bytes of shared memory"
"""
QUANTISED_SCRIPT = """
from pymllm_interp.kernels.products import many_rows
from pymllm_interp.kernels.products import quantized as kernels
from pymllm_interp.kernels.products.quantized_blocks import block_of

HALF = "*bf16"
for kind, width, group, zeros in [("fp8", 4096, 4096, False), ("uint4", 4096, 128, True), ("fp4", 4096, 32, False)]:
    bits = 4 if kind.endswith("4") else 8
    pointers = {"x": HALF, "codes": "*u8", "scales": HALF, "zeros": "*u8", "bias": HALF, "out": HALF}
    shared = {
        "N": 4096, "K": width, "GROUP": group, "GROUPS": width // group, "KIND": kind, "PACKED": 8 // bits,
        "PAIR": 64 if bits == 4 else 1, "HAS_ZEROS": zeros,
        "MIDDLE": float(1 << (bits - 1)), "HAS_BIAS": True, "PDL": True,
    }
    one = {"ROWS": kernels.ROW_CHANNELS, "BLOCK": kernels.ROW_BLOCK}
    compiled(kernels._one_row, pointers, shared | one, kernels.ROW_WARPS, 3)
    block = block_of(bits, width, group)
    parts, part = kernels.parts_of(4096, width, block, 1)
    assert parts > 1
    pointers_out = {name: pointers[name] for name in ("codes", "scales", "zeros", "out")}
    sizes = {name: value for name, value in shared.items() if name != "HAS_BIAS"}
    compiled(kernels._dequantize, pointers_out, sizes | {"BLOCK": kernels.DEQUANTIZE_BLOCK}, 4, 3)
    for rows, channels, warps, stages in kernels.TILES[str(bits)].values():
        few = {"PART": part, "PARTS": parts, "BLOCK_M": rows, "BLOCK_N": channels, "BLOCK_K": block}
        compiled(kernels._few_rows, pointers | {"out": "*fp32"}, shared | few, warps, stages)
    if block < kernels.BLOCK_K:
        continue
    rows, channels, warps, stages = many_rows.MANY_TILES[bits]
    many = {name: value for name, value in shared.items() if name != "PAIR"}
    many |= {"BLOCK_M": rows, "BLOCK_N": channels, "STEP": many_rows.STEP}
    for scales, same in ((HALF, True), ("*fp32", True), ("*fp32", False)):
        compiled(many_rows._many_rows, pointers | {"scales": scales}, many | {"SAME": same}, warps, stages)
parts = {"N": 4096, "PARTS": 4, "HAS_BIAS": True, "BLOCK": 512, "PDL": True}
compiled(kernels._sum_parts, {"parts": "*fp32", "bias": HALF, "out": HALF}, parts, 4, 3)
print("compiled")
"""
MOE_SCRIPT = """
import torch

from pymllm_interp.kernels.products import moe as kernels

HALF = "*bf16"
sizes = {"EXPERTS": 128, "TOP_K": 8, "NORMALISE": True, "BLOCK": 128, "CHOICES": 8, "PDL": True}
for scoring, scale in (("softmax", 1.0), ("chosen", 1.0), ("sigmoid", 2.5)):
    pointers = {"logits": HALF, "correction": "*fp32", "scores": HALF, "ids": "*i64"}
    compiled(kernels._route, pointers, sizes | {"SCORING": scoring, "SCALE": scale}, 1, 3)
compiled(kernels._count, {"ids": "*i64", "counts": "*i32"}, {"BLOCK": 1024, "PDL": True}, 4, 3)
pointers = {"ids": "*i64", "counts": "*i32", "order": "*i32", "owners": "*i32"}
for tiling in kernels.TILINGS:
    sizes = {"EXPERTS": 128, "EXPERT_BLOCK": 128, "TILE": tiling.entries, "BLOCK": 1024, "PDL": True}
    compiled(kernels._place, pointers, sizes, 4, 3)
    rows = {"x": HALF, "weight": HALF, "bias": HALF, "scores": HALF, "order": "*i32", "owners": "*i32", "out": HALF}
    rows |= {"alpha": "fp32", "limit": "fp32"}
    tile = {"ENTRIES": tiling.entries, "CHANNELS": tiling.channels, "DEPTH": tiling.depth, "PDL": True}
    gate = "silu" if tiling.entries > 16 else "clamped"
    forms = [(gate, 768, 2048), ("", 2048, 768)]
    for gate, n, k in forms:
        biased = gate == "clamped"
        sizes = {"N": n, "K": k, "TOP_K": 8 if gate else 1, "GATE": gate, "BIASED": biased, "SCALED": not gate, **tile}
        compiled(kernels._product, rows, sizes, tiling.warps, tiling.stages)
wide = {name: "*fp32" if kind == HALF else kind for name, kind in rows.items()}
tile = {"ENTRIES": 64, "CHANNELS": 128, "DEPTH": 64, "PDL": True}
assert tuple(tile.values())[:3] == kernels.TILINGS[2][:3]
sizes = {"N": 768, "K": 2048, "TOP_K": 8, "GATE": "clamped", "BIASED": True, "SCALED": False, **tile}
compiled(kernels._product, wide, sizes, kernels.TILINGS[2].warps, kernels.stages_of(kernels.TILINGS[2], torch.float32))
compiled(kernels._combine, {"parts": HALF, "out": HALF}, {"SIZE": 2048, "TOP_K": 8, "BLOCK": 1024, "PDL": True}, 4, 3)
print("compiled")
"""
EXPERTS_SCRIPT = """
from pymllm_interp.kernels.products import fp4_experts, quantized_experts

HALF = "*bf16"
shared = {"x": HALF, "bias": HALF, "scores": HALF, "order": "*i32", "owners": "*i32", "out": HALF}
shared |= {"alpha": "fp32", "limit": "fp32"}
for tiling in fp4_experts.TILINGS:
    for gate in ("clamped", "")[: 2 if tiling.entries == 16 else 1]:
        sizes = {"N": 2880, "K": 2880, "GATE": gate, "TOP_K": 4 if gate else 1, "BIASED": True, "SCALED": not gate, "PTX": True}
        sizes |= {"ENTRIES": tiling.entries, "BLOCKS": tiling.channels // 64, "STAGES": tiling.stages, "PDL": True}
        pointers = shared | {"words": "*i32", "scales": "*i32", "unit": "fp32"}
        compiled(fp4_experts._fp4_product, pointers, sizes, tiling.warps, 3)
tiling = quantized_experts.TILINGS[0]
sizes = {"GATE": "silu", "N": 768, "K": 2048, "TOP_K": 4, "BIASED": False, "SCALED": False, "GROUP": 128, "DEPTH": 128}
sizes |= {"ENTRIES": tiling.entries, "CHANNELS": tiling.channels, "PDL": True}
compiled(
    quantized_experts._codes_product, shared | {"codes": "*u8", "scales": "*fp32"}, sizes, tiling.warps, tiling.stages
)
print("compiled")
"""
EDIT_SCRIPT = """
from pymllm_interp.core import norm_kind
from pymllm_interp.kernels.edit_ops import _edit_kernel
from pymllm_interp.kernels.edit_pair import _pair_kernel
from pymllm_interp.kernels.triton_norm import norm_launch

HALF = "*bf16"
rows, block, warps = norm_launch(4096)
tables = {
    "owners": "*i64", "positions": "*i64", "ops": "*i32", "fires": "*i32", "vectors": "*fp32", "captures": "*i32",
    "records": "*i64", "ring": HALF, "flags": "*i64", "first_fired": "*i32", "seen": "*i32", "scores": "*fp32",
}
shared = {
    "SIZE": 4096, "SITES": 130, "DEPTH": 4, "WIDTH": 4096, "ALIGNED": True, "ROWS": rows, "BLOCK": block, "PDL": True,
}
compiled(_pair_kernel, {"delta": HALF, "stream": HALF, **tables}, {"PAIR": True, **shared}, warps, 3)
states = {name: HALF for name in ("h", "delta", "weight", "total", "out")} | {"features": "*fp32", "eps": "fp32"}
own = {"NORM": True, "LAST": True, "PARALLEL": False, "KIND": norm_kind.RMS, "HEAD_DIM": 0, "COLUMNS": 0, "COUNTS": True}
compiled(_edit_kernel, states | tables, own | shared, warps, 3)
print("compiled")
"""
DELTA_SCRIPT = """
from pymllm_interp.core import norm_kind
from pymllm_interp.kernels import triton_delta as kernels
from pymllm_interp.kernels.triton_norm import norm_launch

HALF = "*bf16"
conv = {"X_STRIDE": 12352, "CHANNELS": 8192, "TAPS": 4, "BLOCK": kernels.CONV_BLOCK, "PDL": True}
states = {"x": HALF, "state": HALF, "weight": HALF, "slots": "*i64", "out": HALF}
compiled(kernels._conv_step, states, conv, kernels.CONV_WARPS, 3)
rows = {"x": HALF, "state": HALF, "weight": HALF, "firsts": "*i64", "sources": "*i64", "out": HALF}
compiled(kernels._conv_rows, rows, conv | {"KEYS": 2048, "ROWS": kernels.CONV_ROWS}, kernels.CONV_WARPS, 3)
kept = {"x": HALF, "state": HALF, "starts": "*i64", "slots": "*i64", "continued": "*i32"}
compiled(kernels._conv_keep, kept, conv, kernels.CONV_WARPS, 3)
step = {"qkv": HALF, "b": HALF, "a": HALF, "decay": HALF, "bias": HALF, "state": "*fp32", "slots": "*i64", "out": HALF}
sizes = {
    "QKV_STRIDE": 8192, "B_STRIDE": 12352, "A_STRIDE": 12352, "KEY_HEADS": 16, "HEADS": 32, "KEY_DIM": 128, "DIM": 128,
    "SCALE": 128**-0.5, "KEY_BLOCK": 128, "BLOCK": kernels.VALUE_BLOCK, "PDL": True,
}
compiled(kernels._delta_step, step, sizes, kernels.STEP_WARPS, 3)
compiled(kernels._delta_step, step | {"state": HALF}, sizes, kernels.STEP_WARPS, 3)
per_program, block, warps = norm_launch(128)
sizes = {"GATE_STRIDE": 12352, "HEADS": 32, "SIZE": 128, "ROWS": per_program, "BLOCK": block, "PDL": True}
compiled(kernels._gated_norm, {"x": HALF, "gate": HALF, "weight": HALF, "out": HALF, "eps": "fp32"}, sizes, warps, 3)
per_program, block, warps = norm_launch(256)
heads = {"X_STRIDE": 10240, "HEADS": 16, "KV_HEADS": 4, "SIZE": 256, "KIND": norm_kind.RMS_OFFSET}
heads |= {"ROWS": per_program, "BLOCK": block, "PDL": True}
compiled(kernels._split_gated, {"x": HALF, "q_weight": HALF, "k_weight": HALF, "out": HALF, "eps": "fp32"}, heads, warps, 3)
gate = {"GATE_STRIDE": 10240, "HEAD_STRIDE": 512, "HEADS": 16, "SIZE": 256, "BLOCK": kernels.GATE_BLOCK, "PDL": True}
compiled(kernels._open_gate, {"x": HALF, "gate": HALF, "out": HALF}, gate, kernels.GATE_WARPS, 3)
print("compiled")
"""
LONG = {"quantised", "moe", "edits", "experts"}
"""Scripts that take several seconds."""
SCRIPTS = {
    "quantised": QUANTISED_SCRIPT,
    "moe": MOE_SCRIPT,
    "experts": EXPERTS_SCRIPT,
    "edits": EDIT_SCRIPT,
    "delta": DELTA_SCRIPT,
}


@pytest.mark.parametrize(
    "script",
    [pytest.param(SCRIPTS[name], marks=pytest.mark.slow) if name in LONG else SCRIPTS[name] for name in SCRIPTS],
    ids=SCRIPTS,
)
def test_kernels_compile(script: str, tmp_path) -> None:
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED + script],
        env=own | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-3000:]
