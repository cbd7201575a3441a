"""The fastest product of 33 to 256 rows in half precision, by a measurement on the device.

`torch.mm` takes cuBLAS's first proposal. On an H200 the best proposals take 4 to 6 % less for the products of an 8B model's layer.
The first product of a shape in a range of rows times all of them. The fastest ones take turns with `torch.mm`, and one that saves
1 % is taken. A file of the cache keeps decisions, by device, driver and versions. So later processes take the same ones, and their
products have the same bits.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import os
import statistics
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...utils.files.cache_folder import default_cache_dir
from . import library

logger = logging.getLogger(__name__)

FEWEST, RANGES, MOST = 33, tuple(range(48, 257, 16)), 256
"""Least rows that are measured. Most rows of each range, which are measured, and of the last range."""
SMALLEST = 1 << 22
"""Elements of a weight below which `torch.mm` multiplies: the launch takes longest."""
WORKSPACE, COLD_BYTES = 32 << 20, 128 << 20
"""Bytes of memory that an algorithm may take. Bytes of weights after which the first one has left the L2 cache."""
SAVING, FINALISTS, TURNS = 0.01, 4, 7
"""Least saving of another algorithm, as a part of the time. Algorithms that are timed again beside `torch.mm`, and how often."""
HEAD_START, TIMED_US = 400_000, 200
"""Clock cycles for which the device waits, while the host launches the timed products. Microseconds that they take together."""
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


Product = Callable[[torch.Tensor], Any]
"""A product by a weight."""
_chosen: dict[Shape, library.Algorithm | None] = {}
_lock = threading.Lock()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` by the fastest algorithm: x [rows, k] and weight [n, k] of one dtype in half precision -> [rows, n]."""
    rows, (n, k) = len(x), weight.shape
    known = type(x) is torch.Tensor and not torch.compiler.is_compiling()  # else it may be fake
    if not (known and FEWEST <= rows <= MOST) or n * k < SMALLEST:
        return torch.mm(x, weight.t())
    shape = Shape(x.get_device(), n, k, RANGES[bisect_left(RANGES, rows)], x.dtype)
    try:
        algorithm = _chosen[shape]
    except KeyError:
        algorithm = _algorithm_for(shape, weight)
    if algorithm is None or not _fits(x, weight):
        return torch.mm(x, weight.t())
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    return out if library.run(algorithm, x, weight, out) else torch.mm(x, weight.t())


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuBLASLt's algorithms take the tensors as they lie in memory. Inside `torch.vmap` a tensor has no address."""
    try:
        return x.is_contiguous() and weight.is_contiguous() and not (x.data_ptr() | weight.data_ptr()) % 16
    except RuntimeError:
        return False


def _algorithm_for(shape: Shape, weight: torch.Tensor) -> library.Algorithm | None:
    """A first product's algorithm, by the file or by a measurement. None: `torch.mm`, for good if it is a capture's first."""
    with _lock:
        if shape not in _chosen:
            measurable = _fits(weight, weight) and not torch.cuda.is_current_stream_capturing()
            _chosen[shape] = _kept_or_measured(shape, weight) if measurable else None
        return _chosen[shape]


def _kept_or_measured(shape: Shape, weight: torch.Tensor) -> library.Algorithm | None:
    try:
        kept = _kept(shape.device)
        if shape.name not in kept:
            kept[shape.name] = write(_path(shape.device), shape.name, measured(shape, weight))
        return kept[shape.name]
    except RuntimeError as error:  # no room for copies of the weight, which the next process may have; or no folder
        logger.info("torch multiplies %s: %s", shape.name, error)
        return None


# -- the measurement --------------------------------------------------------------------------


def measured(shape: Shape, weight: torch.Tensor) -> library.Algorithm | None:
    """The algorithm to multiply a weight by, from times on its device; None: `torch.mm`.

    Raises:
        torch.OutOfMemoryError: no room for copies of the weight.
        RuntimeError: cuBLASLt proposes nothing by an error, or the weight has numbers that tell nothing.
    """
    if shape.n % 8 or shape.k % 8:
        return None
    # Without memory for partial sums, cuBLASLt proposes others, of which one is often the fastest.
    sizes = shape.device, shape.most, shape.n, shape.k, shape.dtype
    found = {bytes(one.code): one for workspace in (WORKSPACE, 0) for one in library.proposals(*sizes, workspace)}
    return _measured(shape, weight, list(found.values())) if found else None


def _measured(shape: Shape, weight: torch.Tensor, found: list[library.Algorithm]) -> library.Algorithm | None:
    noise = torch.Generator(weight.device).manual_seed(0)  # blocks may have seeded torch's own
    x = torch.randn(shape.most, shape.k, dtype=shape.dtype, device=weight.device, generator=noise)
    wanted, out = torch.mm(x, weight.t()), torch.empty(shape.most, shape.n, dtype=shape.dtype, device=weight.device)
    if not wanted.isfinite().all():
        raise RuntimeError("products by its weight are not finite")

    def by_torch(one: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, one.t(), out=out)

    calls = [(algorithm, partial(_run, algorithm, x, out)) for algorithm in found]
    calls = [(algorithm, call) for algorithm, call in calls if call(weight) and same(out, wanted)]
    weights = rotating(weight)
    weights *= max(1, round(TIMED_US / microseconds(by_torch, weights * 4) / len(weights)))
    calls = sorted(calls, key=lambda pair: microseconds(pair[1], weights))[:FINALISTS]
    ways: list[Product] = [by_torch, *(call for _, call in calls)]
    best = best_of([[microseconds(way, weights) for way in ways] for _ in range(TURNS)])
    return calls[best - 1][0] if best else None


def _run(algorithm: library.Algorithm, x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> bool:
    return library.run(algorithm, x, weight, out)


def best_of(turns: list[list[float]]) -> int:
    """Index of the shortest times, if they save `SAVING` of the first ones; else 0.

    Args:
        turns: times of each turn, of `torch.mm` and of others. Medians of their ratios are compared: the clock changes.
    """
    parts = [statistics.median(turn[i] / turn[0] for turn in turns) for i in range(len(turns[0]))]
    best = min(range(len(parts)), key=parts.__getitem__)
    return best if parts[best] <= 1 - SAVING else 0


def rotating(weight: torch.Tensor) -> list[torch.Tensor]:
    """A weight and copies of it. When all have been read, the first one has left the cache."""
    copies = max(1, -(-COLD_BYTES // (weight.numel() * weight.element_size())))
    return [weight, *(weight.clone() for _ in range(copies - 1))]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether products are equal to the rounding of their sums."""
    return bool((found.float() - wanted.float()).norm() <= 1e-2 * wanted.float().norm())


def microseconds(call: Product, weights: list[torch.Tensor]) -> float:
    """Microseconds of a product on the device, of products by all weights."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    for weight in weights:
        call(weight)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / len(weights)


# -- the file ---------------------------------------------------------------------------------


@cache
def _kept(device: int) -> dict[str, library.Algorithm | None]:
    """Decisions of the file: name of a shape -> algorithm."""
    return read(_path(device))


def _path(device: int) -> Path:
    versions = (
        LAYOUT, RANGES, torch.cuda.get_device_name(device), torch.__version__, library.version(device), driver_version()
    )  # fmt: skip
    return default_cache_dir() / f"products-{hashlib.sha256(repr(versions).encode()).hexdigest()[:16]}.json"


@cache
def driver_version() -> str:
    """Version of NVIDIA's driver; "" where it is not told."""
    with suppress(OSError, AttributeError):
        calls, told = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(80)
        if calls.nvmlInit_v2() == 0:
            calls.nvmlSystemGetDriverVersion(told, len(told))
            calls.nvmlShutdown()
            return told.value.decode()
    return ""


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            entries = {name: algorithm} | read(path)
            numbers = {own: None if one is None else [*one.code, one.workspace] for own, one in entries.items()}
            made = Path(folder) / path.name
            made.write_text(json.dumps(numbers, indent=1) + "\n")
            made.replace(path)
    except OSError:  # a folder that cannot be written: later processes measure again
        return algorithm
    return entries[name]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other writers of a folder out. Of two that read a file and both write it, one would drop an entry."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
