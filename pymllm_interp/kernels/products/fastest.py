"""The fastest product of 33 to 256 rows in half precision, by a measurement on the device.

`torch.mm` takes cuBLAS's first proposal. For few tiles of a deep weight another one is up to 15 % faster, such as one that divides
K. The first product of a shape times cuBLASLt's proposals beside `torch.mm`, at both ends of a range of rows. Another algorithm is
taken if it is not slower at either end and saves 2 % on average. A file of the cache keeps decisions, by device and versions. So
later processes take the same ones, and their products have the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import statistics
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...utils.files.cache_folder import default_cache_dir
from . import library

FEWEST, RANGES, MOST = 33, (64, 96, 128, 192, 256), 256
"""Least rows that are measured. Most rows of each range, and of the last one."""
SMALLEST = 1 << 22
"""Elements of a weight below which `torch.mm` multiplies: the launch takes longest."""
WORKSPACE, COLD_BYTES = 32 << 20, 128 << 20
"""Bytes of memory that an algorithm may take. Bytes of weights after which the first one has left the L2 cache."""
SAVING, FINALISTS, ROUNDS = 0.02, 3, 7
"""Least saving of another algorithm, as a part of the time. Algorithms that are timed again beside `torch.mm`, and how often."""
HEAD_START = 400_000
"""Clock cycles for which the device waits, while the host launches the timed products."""
LAYOUT = 1
"""Version of the file."""


class Shape(NamedTuple):
    """A product of at most `most` rows and a weight [n, k]."""

    device: int
    n: int
    k: int
    most: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Name in the file."""
        return f"{self.n}x{self.k}, {self.most} rows, {str(self.dtype).removeprefix('torch.')}"

    @property
    def fewest(self) -> int:
        """Least rows of the range."""
        return max((other + 1 for other in RANGES if other < self.most), default=FEWEST)


Times = dict[int, float]
"""Rows -> microseconds of a product."""
_chosen: dict[Shape, library.Algorithm | None] = {}
_lock = threading.Lock()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` by the fastest algorithm: x [rows, k] and weight [n, k] of one dtype in half precision -> [rows, n]."""
    rows, (n, k) = len(x), weight.shape
    if not FEWEST <= rows <= MOST or n * k < SMALLEST or torch.compiler.is_compiling():
        return torch.mm(x, weight.t())
    shape = Shape(x.get_device(), n, k, RANGES[bisect_left(RANGES, rows)], x.dtype)
    try:
        algorithm = _chosen[shape]
    except KeyError:
        algorithm = _algorithm_for(shape, x, weight)
    if algorithm is None or not _fits(x, weight):
        return torch.mm(x, weight.t())
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    return out if library.run(algorithm, x, weight, out) else torch.mm(x, weight.t())


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuBLASLt's algorithms take the tensors as they lie in memory."""
    return x.is_contiguous() and weight.is_contiguous() and not (x.data_ptr() | weight.data_ptr()) % 16


def _algorithm_for(shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> library.Algorithm | None:
    """A first product's algorithm, by the file or by a measurement. None: `torch.mm`, for good if it is a capture's first."""
    with _lock:
        if shape not in _chosen:
            kept, found = _kept(shape.device), None
            if shape.name in kept:
                found = kept[shape.name]
            elif _fits(x, weight) and not torch.cuda.is_current_stream_capturing():
                found = write(_path(shape.device), shape.name, measured(shape, weight))
            _chosen[shape] = found
        return _chosen[shape]


# -- the measurement --------------------------------------------------------------------------


def measured(shape: Shape, weight: torch.Tensor) -> library.Algorithm | None:
    """The algorithm to multiply a weight by, from times on its device; None: `torch.mm`."""
    if shape.n % 8 or shape.k % 8:
        return None
    found = library.proposals(shape.device, shape.most, shape.n, shape.k, shape.dtype, WORKSPACE)
    try:
        return _measured(shape, weight, found) if found else None
    except torch.OutOfMemoryError:  # no room for copies
        return None


def _measured(shape: Shape, weight: torch.Tensor, found: list[library.Algorithm]) -> library.Algorithm | None:
    weights = rotating(weight)
    x = torch.randn(shape.most, shape.k, dtype=shape.dtype, device=weight.device)
    ends = [x[: shape.fewest], x]
    outs = {len(own): torch.empty(len(own), shape.n, dtype=x.dtype, device=x.device) for own in ends}
    wanted = [torch.mm(own, weight.t()) for own in ends]

    def by(algorithm: library.Algorithm | None) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        if algorithm is None:
            return lambda own, one: torch.mm(own, one.t(), out=outs[len(own)])
        return lambda own, one: library.run(algorithm, own, one, outs[len(own)])

    right = [
        one
        for one in found
        if all(by(one)(own, weight) and same(outs[len(own)], right) for own, right in zip(ends, wanted, strict=True))
    ]
    first = sorted(right, key=lambda one: microseconds(by(one), x, weights, 2))[:FINALISTS]
    turns: list[list[list[float]]] = [[[] for _ in ends] for _ in (None, *first)]
    for _ in range(ROUNDS):  # by turns: the clock changes
        for own, times in zip((None, *first), turns, strict=True):
            for rows, kept in zip(ends, times, strict=True):
                kept.append(microseconds(by(own), rows, weights, 1))
    plain, *others = [{len(x): statistics.median(own) for x, own in zip(ends, times, strict=True)} for times in turns]
    number = best_of(plain, others)
    return None if number is None else first[number]


def best_of(plain: Times, others: list[Times]) -> int | None:
    """Index of the times with the largest mean saving. None: no others save `SAVING` without a longer time."""
    parts = [[own[rows] / plain[rows] for rows in plain] for own in others]
    saving = [(statistics.mean(part), i) for i, part in enumerate(parts) if max(part) <= 1]
    part, i = min(saving, default=(1.0, -1))
    return i if part <= 1 - SAVING else None


def rotating(weight: torch.Tensor) -> list[torch.Tensor]:
    """A weight and copies of it. When all have been read, the first one has left the cache."""
    copies = max(1, -(-COLD_BYTES // (weight.numel() * weight.element_size())))
    return [weight, *(weight.clone() for _ in range(copies - 1))]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether products are equal to the rounding of their sums."""
    return bool((found.float() - wanted.float()).norm() <= 1e-2 * wanted.float().norm())


def microseconds(
    call: Callable[[torch.Tensor, torch.Tensor], Any], x: torch.Tensor, weights: list[torch.Tensor], rounds: int
) -> float:
    """Median microseconds of a product on the device."""
    weights, times = weights * max(1, -(-4 // len(weights))), []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        start.record()
        for weight in weights:
            call(x, weight)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(weights))
    return statistics.median(times)


# -- the file ---------------------------------------------------------------------------------


@cache
def _kept(device: int) -> dict[str, library.Algorithm | None]:
    """Decisions of the file: name of a shape -> algorithm."""
    return read(_path(device))


def _path(device: int) -> Path:
    versions = LAYOUT, RANGES, torch.cuda.get_device_name(device), torch.__version__, library.version(device)
    return default_cache_dir() / f"products-{hashlib.sha256(repr(versions).encode()).hexdigest()[:16]}.json"


def read(path: Path) -> dict[str, library.Algorithm | None]:
    """Decisions of a file, without damaged entries."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    found: dict[str, library.Algorithm | None] = {}
    for name, numbers in entries.items() if isinstance(entries, dict) else ():
        if numbers is None:
            found[name] = None
        elif (
            isinstance(numbers, list)
            and len(numbers) == 9
            and all(type(one) is int and 0 <= one < 1 << 64 for one in numbers)
        ):
            found[name] = library.Algorithm((ctypes.c_uint64 * 8)(*numbers[:8]), min(numbers[8], WORKSPACE))
    return found


def write(path: Path, name: str, algorithm: library.Algorithm | None) -> library.Algorithm | None:
    """Add a decision to a file, at once: other processes write it, too. Returns the decision that holds, which is the first."""
    entries = {name: algorithm} | read(path)
    numbers = {own: None if one is None else [*one.code, one.workspace] for own, one in entries.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_text(json.dumps(numbers, indent=1) + "\n")
            made.replace(path)
    except OSError:  # a folder that cannot be written: later processes measure again
        return algorithm
    return entries[name]
