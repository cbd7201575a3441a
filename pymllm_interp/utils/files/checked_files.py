"""Checks of files from strangers, before a library reads them.

Counts and sizes in a header are compared with the file's bytes first. No loop or allocation is sized by them before.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 1 << 20
"""Most bytes of a configuration beside weights."""
MAX_VALUES = 1 << 16
"""Most fields, array items and tensors of a file with vectors."""
MAX_HEADER_BYTES = 16 << 20
"""Most bytes of the header of a safetensors file."""
MAX_INFLATION, MAX_ENTRIES = 200, 8192
"""Largest ratio of the bytes that a zip archive announces to its own size, and most entries of one."""
MAX_DIMS, MAX_DEPTH = 8, 4
"""Most dimensions of a GGUF tensor, and most arrays inside of each other."""
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of GGUF's scalars by the number of their type (ggml's docs/gguf.md)."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object of a file.

    Args:
        most: most bytes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, no object, nested too deeply, a whole number beyond float64, or more than `most` bytes.
    """
    if not path.is_file():  # a named pipe is opened for ever
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"{path} has more than {most} bytes, the most for such a file")
    try:
        found = json.loads(text, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}: expected an object")
    return found


def _whole_number(digits: str) -> int:
    if not math.isfinite(float(digits)):  # of digits, float gives inf
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def check_safetensors(path: Path) -> None:
    """Refuse a file with a header larger than the file, or than `MAX_HEADER_BYTES`. Raises ValueError: such a header."""
    with path.open("rb") as file:
        start = file.read(8)
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > path.stat().st_size - 8:
        raise ValueError(f"{path} is not a safetensors file, or it is truncated")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: the header has {size} bytes; at most {MAX_HEADER_BYTES}")


def check_zip(path: Path, inflation: float = MAX_INFLATION) -> None:
    """Refuse a zip archive (.npz, .pt) of too many entries, or that would grow beyond its size. Other files pass.

    Args:
        inflation: largest ratio of unpacked to packed bytes.

    Raises:
        ValueError: such an archive, or a damaged one.
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{path} is a damaged archive ({error})") from error
    if len(entries) > MAX_ENTRIES:  # numpy looks each one up in a list of all
        raise ValueError(f"{path} has {len(entries)} entries; at most {MAX_ENTRIES}")
    if (unpacked := sum(entry.file_size for entry in entries)) > inflation * path.stat().st_size:
        raise ValueError(f"{path} announces {unpacked} bytes, more than {inflation:g} times its own size")


def check_gguf(path: Path, max_values: int | None = None) -> None:
    """Walk the header of a GGUF file. Counts, lengths and offsets that the file has no bytes for are refused.

    The reader of the package gguf trusts them. An array that announces 2^63 items keeps it busy for ever.

    Args:
        max_values: most fields, array items and tensors; None: as many as the file has bytes for.

    Raises:
        ValueError: another file than GGUF of version 2 or 3 in little-endian order, a truncated one, or too many values.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _GGUFHeader(data, max_values).walk()
            except ValueError as error:
                raise ValueError(f"{path} is not a GGUF file, or it is truncated or corrupt ({error})") from error


class _GGUFHeader:
    """Reader of a GGUF file's header. Checks counts against the bytes that exist."""

    def __init__(self, data: mmap.mmap, max_values: int | None) -> None:
        self._data, self._at, self._alignment = data, 0, 32
        self._left = len(data) if max_values is None else max_values

    def walk(self) -> None:
        """Raise ValueError at the first thing that is wrong."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version} in little-endian order is not supported; 2 and 3 are")
        tensors, fields = self._count(24), self._count(13)
        for _ in range(fields):
            name = self._string()
            kind = self._number("I")
            if name == _ALIGNMENT.encode() and kind == 4:
                self._alignment = struct.unpack_from("<I", self._peek(4))[0]
                if not self._alignment or self._alignment & (self._alignment - 1):
                    raise ValueError(f"the alignment {self._alignment} is not a power of two")
            self._value(kind, 0)
        spans = sorted(self._tensor(GGML_QUANT_SIZES, GGMLQuantizationType) for _ in range(tensors))
        start = -(-self._at // self._alignment) * self._alignment
        if any(start + end > len(self._data) for _, end in spans):
            raise ValueError("a tensor ends behind the file")
        if any(end > following for (_, end), (following, _) in pairwise(spans)):
            raise ValueError("tensors share bytes")  # loaded separately, they would multiply the file's size

    def _tensor(self, sizes: Any, types: Any) -> tuple[int, int]:
        """The start and the end of a tensor's data, from the start of all data."""
        self._string()
        dims = self._number("I")
        if dims > MAX_DIMS:
            raise ValueError(f"a tensor has {dims} dimensions; at most {MAX_DIMS}")
        shape = struct.unpack(f"<{dims}Q", self._take(8 * dims))
        block, size = sizes[types(self._number("I"))]
        start = self._number("Q")
        return start, start + -(-math.prod(shape) // block) * size

    def _value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind in _SCALARS:
            self._take(_SCALARS[kind])
        elif kind == _ARRAY and depth < MAX_DEPTH:
            item = self._number("I")
            count = self._count(_SCALARS.get(item, 8))
            if item in _SCALARS:
                self._take(count * _SCALARS[item])
            else:
                for _ in range(count):
                    self._value(item, depth + 1)
        else:
            raise ValueError(f"a field of type {kind}, {depth} arrays deep")

    def _count(self, least: int) -> int:
        """A count of things of at least `least` bytes each."""
        count = self._number("Q")
        if count * least > len(self._data) - self._at or count > self._left:
            raise ValueError(f"{count} items are announced, for which the file is too small or too long")
        self._left -= count
        return count

    def _string(self) -> bytes:
        return self._take(self._number("Q"))

    def _number(self, form: str) -> int:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0]

    def _take(self, size: int) -> bytes:
        found = self._peek(size)
        self._at += size
        return found

    def _peek(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes are announced at {self._at}, and the file has {len(self._data)}")
        return self._data[self._at : self._at + size]
