"""`SpillFiles`: the KV of evicted pages in files of a folder, safetensors with a checksum of each page.

A file has the pages that were evicted at a time: `kv` [pages, *KVPool.page_shape]. It is written as `.part`, and renamed. Several
processes may share a folder. The size is of all their files; the least recently used ones go first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from .memory_pool import KVPool

TENSOR = "kv"
OURS = re.compile(r"[0-9a-f]{32}\.(safetensors|part)")
"""Names of files that are counted and deleted. All other files in the folder stay."""
MOST_HEADER = 16 << 20
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}


class StoredPage(NamedTuple):
    """Place of a page."""

    file: Path
    offset: int
    crc: int


class SpillFiles:
    """Files of a folder. Methods that write are called on one thread; `get` and `read` on any.

    Args:
        folder: made if it is not there.
        pool: its pages' shape and dtype are the files'.

    Attributes:
        num_corrupt: files and pages that were refused.

    Raises:
        ValueError: others may write to the folder.
    """

    def __init__(self, folder: Path, most_bytes: int, pool: KVPool) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._shape, self._dtype, self._page_bytes = list(pool.page_shape), DTYPES[pool.dtype], pool.page_bytes
        self._places: dict[bytes, StoredPage] = {}
        self._files: dict[Path, tuple[str, list[bytes]]] = {}  # root and keys
        self.num_corrupt = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
            raise ValueError(
                f"kv_spill_folder: others may write to {folder}, and so decide what models read: chown, chmod go-w"
            )
        for _, _, file in self._entries():
            if file.suffix == ".part":
                _remove_left(file)
            else:
                self._find(file)

    def get(self, key: bytes) -> StoredPage | None:
        """Place of a page."""
        return self._places.get(key)

    def read(self, page: StoredPage, into: np.ndarray) -> bool:
        """Read a page, [page_bytes] uint8. False: it is gone, or not whole."""
        try:
            file = os.open(page.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.preadv(file, [into.data], page.offset)
                with contextlib.suppress(OSError):  # another user's, or of a read-only file system
                    os.utime(file)
            finally:
                os.close(file)
        except OSError:
            found = -1
        if found == len(into) and zlib.crc32(into.data) == page.crc:
            return True
        self.num_corrupt += 1
        return False

    def forget(self, key: bytes) -> None:
        """A page is damaged."""
        self._places.pop(key, None)

    def write(self, root: str, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> None:
        """Write pages, [page_bytes] uint8 each, to a new file. Raises OSError: the folder is full, or gone."""
        file = self._folder / f"{uuid4().hex}.safetensors"
        part, crcs = file.with_suffix(".part"), [zlib.crc32(page.data) for page in pages]
        size = len(pages) * self._page_bytes
        words = {"keys": json.dumps([key.hex() for key in keys]), "crcs": json.dumps(crcs), "root": root}
        tensor = {"dtype": self._dtype, "shape": [len(pages), *self._shape], "data_offsets": [0, size]}
        header = json.dumps({"__metadata__": words, TENSOR: tensor}).encode()
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        self._make_room(start + size)
        try:
            with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
                fcntl.flock(out, fcntl.LOCK_EX)  # until it is whole: another process removes files without a lock
                self._fill(out, header, pages)
                os.replace(part, file)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._keep(file, root, keys, start, crcs)

    @staticmethod
    def _fill(out: Any, header: bytes, pages: Sequence[np.ndarray]) -> None:
        out.write(len(header).to_bytes(8, "little") + header)
        for page in pages:
            out.write(page.data)
        out.flush()

    def clear(self, root: str) -> None:
        """Delete all files of a model, whichever process wrote them."""
        for _, _, file in self._entries():
            if file not in self._files and file.suffix != ".part":
                self._find(file)
        for file in [file for file, (own, _) in self._files.items() if own == root]:
            self._delete(file)

    def _keep(self, file: Path, root: str, keys: Sequence[bytes], start: int, crcs: Sequence[int]) -> None:
        self._files[file] = root, list(keys)
        size = self._page_bytes
        self._places |= {k: StoredPage(file, start + i * size, crcs[i]) for i, k in enumerate(keys)}

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(time, size, path) of our files, the least recently used first."""
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self._folder):
            if OURS.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another process has deleted it
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        found.append((status.st_mtime, status.st_size, Path(entry.path)))
        return sorted(found)

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files."""
        entries = self._entries()
        total = size + sum(entry[1] for entry in entries)
        for _, own, file in entries if size <= self._most_bytes else ():
            if total <= self._most_bytes:
                break
            if file.suffix != ".part":
                self._delete(file)
                total -= own
        if total > self._most_bytes:
            raise OSError(f"no room for a file of {size} bytes: the folder holds {self._most_bytes}")

    def _delete(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        for key in self._files.pop(file, ("", []))[1]:
            if (place := self._places.get(key)) is not None and place.file == file:
                del self._places[key]

    def _find(self, file: Path) -> None:
        """Take up a file of another process, if it has pages of this shape."""
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
                status = os.fstat(opened.fileno())
                size = int.from_bytes(opened.read(8), "little") if stat.S_ISREG(status.st_mode) else MOST_HEADER + 1
                if size > MOST_HEADER:
                    raise ValueError("no file of pages")
                header = json.loads(opened.read(size))
            words, tensor = header["__metadata__"], header[TENSOR]
            keys, crcs = [bytes.fromhex(key) for key in json.loads(words["keys"])], json.loads(words["crcs"])
            whole = status.st_size == 8 + size + len(keys) * self._page_bytes and len(crcs) == len(keys)
            if tensor["shape"] != [len(keys), *self._shape] or tensor["dtype"] != self._dtype:
                return  # another model's
            if not whole or not all(type(crc) is int for crc in crcs):
                raise ValueError("other pages than its header says")
            self._keep(file, str(words["root"]), keys, 8 + size, crcs)
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError):
            self.num_corrupt += 1


def _remove_left(part: Path) -> None:
    """Delete a file that its process was killed at. A file that is written is locked."""
    with contextlib.suppress(OSError), open(os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink(missing_ok=True)
