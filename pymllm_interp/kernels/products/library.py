"""Products by cuBLASLt's algorithms, each of which can be asked for. Source: cuBLAS documentation, "Using the cuBLASLt API".

`torch.mm` lets cuBLAS choose by the number of rows, and cuBLAS often divides K. Without a division of K an output has the order of
`fixed`'s sum, and so its bits. In batch-invariant mode each range of rows has one such algorithm. It is compared with `fixed`
before it is used. In the default mode, `fastest` measures all algorithms.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

RANGES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
"""Most rows of each range; the last one has all others, too."""
PROPOSALS, CHECKED = 16, 1 << 25
"""Most proposals of cuBLASLt. Elements of the random weight of a comparison."""
LAYOUTS = 4096
"""Most descriptors of matrices that are kept: prompts have many numbers of rows."""
TYPES = {torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType_t."""
COMPUTE, SCALE = 68, 0  # CUBLAS_COMPUTE_32F, CUDA_R_32F
TRANSPOSED, MAX_WORKSPACE, REDUCTIONS = 3, 1, 3
"""Attribute of a product, and two of preferences."""
SPLIT_K, SCHEME = 2, 3
"""Attributes of an algorithm."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x, weight -> ``x @ weight.T``."""
ONE, ZERO = ctypes.c_float(1), ctypes.c_float(0)
ONE_AT, ZERO_AT = ctypes.byref(ONE), ctypes.byref(ZERO)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class Algorithm(NamedTuple):
    """An algorithm of cuBLASLt for a kind of product."""

    code: Any
    """cublasLtMatmulAlgo_t: eight numbers, which mean the same for one version of cuBLASLt."""
    workspace: int
    """Bytes of memory for partial sums."""


class _Library(NamedTuple):
    """cuBLASLt, as torch has loaded it."""

    calls: ctypes.CDLL
    handle: ctypes.c_void_p
    product: ctypes.c_void_p
    """``out = weight @ x`` in cuBLAS's order of columns, the weight transposed."""


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered {status}")


@cache
def _library(device: int) -> _Library | None:
    """cuBLASLt for a device; None: this build of torch has none that can be called."""
    with torch.cuda.device(device):
        torch.mm(*[torch.ones(16, 16, device="cuda")] * 2)
        handle, product = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            with open("/proc/self/maps") as maps:
                paths = [line[line.index("/") :].rstrip("\n") for line in maps if "libcublasLt.so" in line]
            calls = ctypes.CDLL(paths[0])
            _check(calls.cublasLtCreate(ctypes.byref(handle)))
            _check(calls.cublasLtMatmulDescCreate(ctypes.byref(product), COMPUTE, SCALE))
            flag = ctypes.c_int32(1)
            _check(calls.cublasLtMatmulDescSetAttribute(product, TRANSPOSED, ctypes.byref(flag), ctypes.c_size_t(4)))
            # With types, a call converts integers by itself, in half the time.
            calls.cublasLtMatmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
        except (AttributeError, IndexError, OSError, RuntimeError):
            return None
    return _Library(calls, handle, product)


@lru_cache(LAYOUTS)
def _layout(device: int, rows: int, columns: int, dtype: torch.dtype) -> ctypes.c_void_p:
    """Descriptor of a matrix in order of columns. It is destroyed with its last reference."""
    library, made = _library(device), ctypes.c_void_p()
    assert library is not None
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _check(library.calls.cublasLtMatrixLayoutCreate(ctypes.byref(made), TYPES[dtype], *sizes))
    weakref.finalize(made, library.calls.cublasLtMatrixLayoutDestroy, ctypes.c_void_p(made.value)).atexit = False
    return made


def version(device: int) -> int | None:
    """Version of cuBLASLt; None: it cannot be called."""
    library = _library(device)
    return None if library is None else int(library.calls.cublasLtGetVersion())


def proposals(device: int, rows: int, n: int, k: int, dtype: torch.dtype, workspace: int = 0) -> list[Algorithm]:
    """cuBLASLt's algorithms for x [rows, k] and a weight [n, k], from the one that it takes for the fastest.

    Args:
        workspace: bytes of memory that an algorithm may take. 0: algorithms that do not divide K.
    """
    library = _library(device)
    if library is None:
        return []
    calls, preference = library.calls, ctypes.c_void_p()
    _check(calls.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    found, count, most = (_Proposal * PROPOSALS)(), ctypes.c_int(), ctypes.c_uint64(workspace)
    layouts = [_layout(device, *sizes, dtype) for sizes in ((k, n), (k, rows), (n, rows), (n, rows))]
    try:
        for attribute, size in ((MAX_WORKSPACE, 8),) if workspace else ((MAX_WORKSPACE, 8), (REDUCTIONS, 4)):
            value = ctypes.byref(most), ctypes.c_size_t(size)
            _check(calls.cublasLtMatmulPreferenceSetAttribute(preference, attribute, *value))
        status = calls.cublasLtMatmulAlgoGetHeuristic(
            library.handle, library.product, *layouts, preference, PROPOSALS, found, ctypes.byref(count)
        )
    finally:
        calls.cublasLtMatmulPreferenceDestroy(preference)
    if status:  # no algorithm for such a shape
        return []
    known = [one for one in found[: count.value] if one.state == 0 and one.workspace <= workspace]
    if not workspace:
        known = [one for one in known if _number(calls, one, SPLIT_K) <= 1 and _number(calls, one, SCHEME) == 0]
    return [Algorithm(one.algorithm, one.workspace) for one in known]


def _number(calls: ctypes.CDLL, proposal: _Proposal, attribute: int) -> int:
    """A configuration attribute of an algorithm."""
    value, written = ctypes.c_uint32(), ctypes.c_size_t()
    algorithm = ctypes.byref(proposal.algorithm)
    _check(
        calls.cublasLtMatmulAlgoConfigGetAttribute(
            algorithm, attribute, ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)
        )
    )
    return value.value


def run(algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """``out = x @ weight.T``: x [rows, k], weight [n, k], out [rows, n], contiguous, of one dtype in half precision.
    Returns whether it was launched. False: cuBLASLt refuses the algorithm for these sizes."""
    device, (rows, k), n = x.get_device(), x.shape, weight.shape[0]
    library = _library(device)
    assert library is not None
    result, target = _layout(device, n, rows, x.dtype), out.data_ptr()
    memory = torch.empty(algorithm.workspace, dtype=torch.uint8, device=x.device) if algorithm.workspace else None
    status = library.calls.cublasLtMatmul(
        library.handle, library.product, ONE_AT, weight.data_ptr(), _layout(device, k, n, x.dtype),
        x.data_ptr(), _layout(device, k, rows, x.dtype), ZERO_AT, target, result, target, result, algorithm.code,
        None if memory is None else memory.data_ptr(), algorithm.workspace, torch._C._cuda_getCurrentRawStream(device),
    )  # fmt: skip
    return status == 0


_chosen: dict[tuple[int, int, int, int, torch.dtype], Algorithm | None] = {}


def algorithm_for(device: int, rows: int, n: int, k: int, dtype: torch.dtype, reference: Product) -> Algorithm | None:
    """Algorithm for x [rows, k] and a weight [n, k] with the bits of `reference`; None: no algorithm has them.

    The first call for a range compares on random numbers, and waits for the device. A capture takes a known algorithm or None.
    """
    most = next((most for most in RANGES if rows <= most), RANGES[-1])
    key = device, n, k, most, dtype
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return None
        _chosen[key] = _choose(*key, reference)
    return _chosen[key]


def _choose(device: int, n: int, k: int, most: int, dtype: torch.dtype, reference: Product) -> Algorithm | None:
    """First algorithm with the bits of `reference`. Compared are the first, the last and an odd number of rows of a range."""
    fewest = max((other for other in RANGES if other < most), default=32) + 1
    found = proposals(device, most, n, k, dtype)
    if not found:
        return None
    noise = torch.Generator(f"cuda:{device}").manual_seed(0)
    width = min(n, max(1, CHECKED // k // 128) * 128)
    weight = torch.randn(width, k, device=f"cuda:{device}", dtype=dtype, generator=noise)
    x = torch.randn(most, k, device=f"cuda:{device}", dtype=dtype, generator=noise)
    sizes = sorted({fewest, (fewest + most) // 2 | 1, most})
    wanted = {rows: reference(x[:rows], weight) for rows in sizes}
    for algorithm in found:
        if all(_equal(algorithm, x[:rows], weight, wanted[rows]) for rows in sizes):
            return algorithm
    return None


def _equal(algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> bool:
    out = torch.empty_like(wanted)
    return run(algorithm, x, weight, out) and torch.equal(out, wanted)
