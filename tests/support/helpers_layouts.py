"""Compiles kernels for a GPU that need not be there, and prints how their threads share the rows that they take sums over.

A process of its own, since Triton's interpreter is chosen when Triton is imported: ``python helpers_layouts.py`` prints
JSON, by (size, dtype) the layouts of `add_rms_norm`'s kernel, of `rms_norm`'s, and of that with ops and captures. "atomics" are
those of the kernel with ops, captures and counted rows.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pymllm_interp.core.norm_kind import LAYER, RMS
from pymllm_interp.kernels import edit_ops as triton_edits
from pymllm_interp.kernels import triton_norm

HOPPER = GPUTarget("cuda", 90, 32)
WHOLE = {"owners": "*i64", "positions": "*i64", "records": "*i64", "ops": "*i32", "fires": "*i32", "captures": "*i32"}
WHOLE |= {"flags": "*i64", "first_fired": "*i32", "features": "*fp32", "seen": "*i32", "scores": "*fp32"}
NUMBERS = {"rows": "i32", "count": "i32", "site": "i32", "record_stride": "i32", "score_stride": "i32", "eps": "fp32"}


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The code of a kernel for aligned memory, by its kind."""
    names = [parameter.name for parameter in kernel.params]
    types = {**dict.fromkeys(names, f"*{dtype}"), **WHOLE, **NUMBERS, "vectors": "*fp32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=HOPPER, options={"enable_fp_fusion": False, "launch_pdl": True, **options}).asm


def layouts(kernel: Any, dtype: str, constants: dict[str, Any], **options: Any) -> list[str]:
    """Of the operands of sums over a row."""
    code = compiled(kernel, dtype, constants, **options)["ttgir"]
    named = dict(re.findall(r"^#(\w+) = (#ttg\.blocked<\{.*\}>)", code, re.MULTILINE))
    sums = re.findall(r'"tt\.reduce"\(%\w+\) <\{axis = 1 .*?\) : \((tensor<[^>]*>)', code, re.DOTALL)
    return sorted({named[name] for kind in sums for name in re.findall(r"#(\w+)", kind)})


def main() -> None:
    found = {}
    kinds, sizes = [(LAYER, True), (RMS, False), (RMS, False)], [(72, "fp32"), (4096, "fp32"), (4096, "bf16")]
    for (size, dtype), (kind, parallel) in zip(sizes, kinds, strict=True):
        rows, block, warps = triton_norm.norm_launch(size)
        shape = {"SIZE": size, "ROWS": rows, "BLOCK": block, "PDL": True}
        shape |= {"PARALLEL": parallel, "KIND": kind}
        norm = {"INNER": 1, "OUTER_STRIDE": size, "INNER_STRIDE": 0, "IN_PLACE": False, **shape}
        tables = {
            "SITES": 130,
            "DEPTH": 4,
            "WIDTH": size,
            "NORM": True,
            "ALIGNED": True,
            "HEAD_DIM": 0,
            "COLUMNS": 0,
            "COUNTS": False,
            **shape,
        }
        alone = [
            layouts(triton_norm._norm, dtype, {**norm, "ADD": add, "PARALLEL": parallel and add}, num_warps=warps)
            for add in (True, False)
        ]
        edits = {"num_warps": warps, "maxnreg": triton_edits.MAX_REGISTERS}
        with_tables = [
            layouts(triton_edits._edit_kernel, dtype, {"LAST": last, **tables}, **edits) for last in (True, False)
        ]
        found[f"{size} {dtype}"] = alone + with_tables
    inner = {**tables, "NORM": False, "LAST": False}  # of the last shape: with heads and without
    found["heads"] = [
        layouts(triton_edits._edit_kernel, dtype, {**inner, "HEAD_DIM": head_dim, "COLUMNS": n}, **edits)
        for head_dim, n in ((0, 0), (128, 0), (0, 4228))
    ]
    counted = compiled(triton_edits._edit_kernel, dtype, {**tables, "LAST": False, "COUNTS": True}, **edits)
    found["atomics"] = re.findall(r"atom\.\S+", counted["ptx"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
