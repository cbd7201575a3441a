"""A harvest's folder: shards, manifest, and what makes a run go on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FORMAT = "pymllm-interp harvest 1"
MANIFEST = "manifest.json"
TEMPORARY = ".tmp"
SHARD_NAME = re.compile(r"shard-\d+\.safetensors")
INDEX = ("document_ids", "positions", "token_ids")
CHUNK_BYTES = 1 << 23
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
"""The format's names of dtypes."""


@dataclass(frozen=True)
class Identity:
    """What a folder's shards have in common, and a run that goes on must have too."""

    model: str
    """Fingerprint of the model."""
    tokenizer: str
    """Fingerprint of the tokenizer; empty without one."""
    spec: str
    """Fingerprint of interventions and captures."""
    shard_bytes: int
    max_length: int
    too_long: str
    index_per_site: bool


@dataclass(frozen=True)
class ShardEntry:
    """What the manifest says of a shard."""

    file: str
    rows: dict[str, int]
    """By site."""
    tokens: int
    """That the model read for it."""
    first_document: int
    last_document: int
    """Included; documents are never cut."""
    bytes: int
    """Of the file."""
    crc32: str
    """Of the file, as 8 hexadecimal digits."""
    inputs: str
    """SHA-256 over all documents of the input up to the last one, as they were given."""
    engine: str
    """What computed it."""


class HarvestFolder:
    """The folder as the one run that writes to it sees it, from `HarvestFolder(...)` to `close()`.

    Attributes:
        shards: that the manifest lists.
        complete: whether the input came to its end.

    Raises:
        FileExistsError: a folder that is not empty, and no harvest's.
        ValueError: a harvest of another model, with other captures or other shards, or one that is damaged.
        RuntimeError: another run is writing to it.
    """

    def __init__(self, folder: str | Path, identity: Identity) -> None:
        self.folder, self.identity = Path(folder), identity
        self.shards: list[ShardEntry] = []
        self.complete = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.folder, os.O_RDONLY)
        try:
            self._lock()
            if (self.folder / MANIFEST).exists():
                self._go_on()
            else:
                self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def num_documents(self) -> int:
        """Documents in the shards: the next one has this number."""
        return self.shards[-1].last_document + 1 if self.shards else 0

    def add(self, tensors: Mapping[str, Sequence[Tensor]], entry: dict[str, Any]) -> None:
        """Write a shard and list it.

        Args:
            tensors: name -> its rows, [n, ...] each, on the CPU, in order.
            entry: the fields of its `ShardEntry` but `file`, `bytes` and `crc32`.

        Raises:
            OSError: it could not be written; nothing of it is left then.
        """
        name = f"shard-{len(self.shards):06}.safetensors"
        size, crc32 = self._put(name, _serialised(tensors))
        made = ShardEntry(file=name, bytes=size, crc32=f"{crc32:08x}", **entry)
        self._list([*self.shards, made], complete=False)

    def finish(self) -> None:
        """Note that the input has come to its end."""
        self._list(self.shards, complete=True)

    def close(self) -> None:
        """Let other runs have the folder."""
        os.close(self._fd)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{self.folder}: another run is harvesting to this folder") from None
        except OSError:  # a file system without locks
            pass

    def _begin(self) -> None:
        others = sorted({path.name for path in self.folder.iterdir()} - {MANIFEST + TEMPORARY})
        if others:
            raise FileExistsError(
                f"{self.folder} holds {', '.join(others[:5])} and no {MANIFEST}: it is not a harvest's folder; name a new one"
            )
        self._list([], complete=False)

    def _go_on(self) -> None:
        manifest = read_manifest(self.folder)
        before = asdict(self.identity) | manifest["identity"]
        for name, now in asdict(self.identity).items():
            if before[name] != now:
                raise ValueError(
                    f"{self.folder} was harvested with another {name}, {before[name]}, and not {now}: name a new folder"
                )
        self.shards, self.complete = manifest["shards"], manifest["complete"]
        for shard in self.shards:
            path = self.folder / shard.file
            if not path.exists() or path.stat().st_size != shard.bytes:
                raise ValueError(
                    f"{path} is missing or not {shard.bytes} bytes long, as {MANIFEST} says: it is damaged"
                )
        listed = {shard.file for shard in self.shards}
        for path in self.folder.iterdir():
            left = path.name.removesuffix(TEMPORARY)
            ours = left == MANIFEST or SHARD_NAME.fullmatch(left)
            if ours and (path.name != left or left not in (listed | {MANIFEST})):
                path.unlink()

    def _list(self, shards: list[ShardEntry], complete: bool) -> None:
        manifest = {
            "format": FORMAT,
            "identity": asdict(self.identity),
            "complete": complete,
            "shards": [asdict(shard) for shard in shards],
        }
        self._put(MANIFEST, [json.dumps(manifest, indent=1).encode()])
        self.shards, self.complete = shards, complete

    def _put(self, name: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """Write a file that is there as a whole or not at all. Returns its size and its CRC-32."""
        temporary = self.folder / (name + TEMPORARY)
        size = crc32 = 0
        chunks = iter(chunks)

        def following() -> tuple[bytes | memoryview, int]:
            chunk = next(chunks, b"")
            return chunk, zlib.crc32(chunk, crc32)

        try:
            # While a chunk is written, the next one is made and summed up: none of it holds up other Python.
            with open(temporary, "wb") as file, ThreadPoolExecutor(1) as beside:
                chunk, crc32 = following()
                while chunk:
                    ahead = beside.submit(following)
                    file.write(chunk)
                    file.flush()
                    _not_needed(file, size, len(chunk))
                    size += len(chunk)
                    chunk, crc32 = ahead.result()
                os.fsync(file.fileno())
                _not_needed(file, 0, size)
            os.replace(temporary, self.folder / name)
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return size, crc32


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its shards as `ShardEntry`s.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a harvest's, or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a harvest's folder: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, and {FORMAT!r} is expected")
        manifest["shards"] = [ShardEntry(**entry) for entry in manifest["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the manifest of a harvest ({error})") from None
    return manifest


def _serialised(tensors: Mapping[str, Sequence[Tensor]]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file (https://huggingface.co/docs/safetensors), in chunks, none of them empty."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wide elements first: each tensor then starts at a multiple of its own.
    ordered = dict(sorted(tensors.items(), key=lambda entry: -entry[1][0].itemsize))
    end = 0
    for name, pieces in ordered.items():
        start, end = end, end + sum(piece.nbytes for piece in pieces)
        shape = [sum(map(len, pieces)), *pieces[0].shape[1:]]
        header[name] = {"dtype": CODES[pieces[0].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for pieces in ordered.values():
        batch: list[np.ndarray] = []
        for place, piece in enumerate(pieces):
            # NumPy, and whole numbers for all dtypes: torch would start workers of its own for this thread.
            batch.append(piece.view(BITS[piece.itemsize]).numpy())
            full = sum(part.nbytes for part in batch) >= CHUNK_BYTES or place == len(pieces) - 1
            if full and any(part.size for part in batch):
                yield np.concatenate(batch).reshape(-1).view(np.uint8).data
                batch = []


def _not_needed(file: BufferedWriter, start: int, size: int) -> None:
    """Nobody reads these bytes soon. What is not on the disk yet is sent there beside what follows; what is leaves memory."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a file system that takes no advice
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


def _crc32(chunks: Iterable[bytes | memoryview]) -> int:
    found = 0
    for chunk in chunks:
        found = zlib.crc32(chunk, found)
    return found


def index_name(name: str, site: str | None, per_site: bool) -> str:
    """What an index tensor is called.

    Raises:
        ValueError: each site has its own, and none is named.
    """
    if per_site and site is None:
        raise ValueError(f"the sites were captured at different positions: name one, {name}('resid_post.0')")
    return f"{name}.{site}" if per_site else name
