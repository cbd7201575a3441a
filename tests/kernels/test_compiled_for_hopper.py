"""Kernels compile for a GPU that is not there: Triton's interpreter takes what its compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels' tests need the package triton")
SCRIPT = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pymllm_interp.kernels import triton_quantized as kernels
from pymllm_interp.kernels.quantized_blocks import block_of

def compiled(kernel, pointers, constants, warps, stages):
    names = kernel.arg_names
    types = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, types, values, aligned)
    assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages}).asm["cubin"]

HALF = "*bf16"
for kind, width, group, zeros in [("fp8", 4096, 4096, False), ("uint4", 4096, 128, True), ("fp4", 4096, 32, False)]:
    bits = 4 if kind.endswith("4") else 8
    pointers = {"x": HALF, "codes": "*u8", "scales": HALF, "zeros": "*u8", "bias": HALF, "out": HALF}
    shared = {
        "N": 4096, "K": width, "GROUP": group, "GROUPS": width // group, "KIND": kind, "PACKED": 8 // bits, "HAS_ZEROS": zeros,
        "MIDDLE": float(1 << (bits - 1)), "HAS_BIAS": True, "PDL": True,
    }
    one = {"ROWS": kernels.ROW_CHANNELS, "BLOCK": kernels.ROW_BLOCK}
    compiled(kernels._one_row, pointers, shared | one, kernels.ROW_WARPS, 3)
    block = block_of(bits, width, group)
    parts, part = kernels.parts_of(4096, width, block)
    assert parts > 1
    for rows, channels, warps, stages in kernels.TILES.values():
        few = {"PART": part, "PARTS": parts, "BLOCK_M": rows, "BLOCK_N": channels, "BLOCK_K": block}
        compiled(kernels._few_rows, pointers | {"out": "*fp32"}, shared | few, warps, stages)
parts = {"N": 4096, "PARTS": 4, "HAS_BIAS": True, "BLOCK": 512, "PDL": True}
compiled(kernels._sum_parts, {"parts": "*fp32", "bias": HALF, "out": HALF}, parts, 4, 3)
print("compiled")
"""


def test_kernels_for_quantised_weights_compile(tmp_path) -> None:
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=own | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-3000:]
