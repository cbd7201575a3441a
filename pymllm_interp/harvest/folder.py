"""The folder of a harvest: its shards, its manifest, and how a run resumes."""

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
from dataclasses import asdict, dataclass, field
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
"""dtype -> its name in safetensors."""


@dataclass(frozen=True)
class Identity:
    """Properties shared by all shards of a folder. A resuming run must match them."""

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
    """A shard in the manifest."""

    file: str
    rows: dict[str, int]
    """Number of rows by site."""
    tokens: int
    """Tokens of its documents."""
    first_document: int
    last_document: int
    """Inclusive; a document is never split over shards."""
    bytes: int
    """Size of the file."""
    crc32: str
    """CRC-32 of the file, as 8 hexadecimal digits."""
    inputs: str
    """SHA-256 over all documents of the input up to the last one."""
    engine: str
    """`ModelFacts.engine_name` of the run that wrote it."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Skipped documents from `first_document` to `last_document`: number -> the error."""


class HarvestFolder:
    """A folder that one run writes to, locked from `HarvestFolder(...)` to `close()`.

    Args:
        description: the harvest in words, for the manifest.

    Attributes:
        shards: shards in the manifest.
        complete: whether the end of the input was reached.

    Raises:
        FileExistsError: the folder is not empty, and is not a harvest's.
        ValueError: the folder is of another harvest (see `Identity`), or damaged.
        RuntimeError: another run writes to it.
    """

    def __init__(self, folder: str | Path, identity: Identity, description: Mapping[str, Any]) -> None:
        self.folder, self.identity, self.description = Path(folder), identity, description
        self.shards: list[ShardEntry] = []
        self.complete = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.folder, os.O_RDONLY)
        try:
            self._lock()
            if (self.folder / "plan.json").exists():
                raise ValueError(f"{self.folder} is harvested in units: call with cluster=, or name a new folder")
            if (self.folder / MANIFEST).exists():
                self._resume()
            else:
                self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def num_documents(self) -> int:
        """Documents in the shards; the number of the next document."""
        return self.shards[-1].last_document + 1 if self.shards else 0

    @property
    def skipped(self) -> dict[int, str]:
        """Skipped documents among these: number -> the error."""
        return {int(number): error for shard in self.shards for number, error in shard.skipped.items()}

    def add(self, tensors: Mapping[str, Sequence[Tensor]], entry: dict[str, Any]) -> None:
        """Write a shard and list it in the manifest.

        Args:
            tensors: name -> its rows in order, [n, ...] each, on the CPU.
            entry: fields of its `ShardEntry`, without `file`, `bytes` and `crc32`.

        Raises:
            OSError: it could not be written; no part of it is left.
        """
        made = self._put_shard(f"shard-{len(self.shards):06}.safetensors", tensors, entry)
        self._list([*self.shards, made], complete=False)

    def _put_shard(self, name: str, tensors: Mapping[str, Sequence[Tensor]], entry: dict[str, Any]) -> ShardEntry:
        return self._put_file(name, _serialised(tensors), entry)

    def _put_file(self, name: str, chunks: Iterable[bytes | memoryview], entry: dict[str, Any]) -> ShardEntry:
        size, crc32 = self._put(name, chunks)
        return ShardEntry(file=name, bytes=size, crc32=f"{crc32:08x}", **entry)

    def finish(self) -> None:
        """Mark the harvest as complete."""
        self._list(self.shards, complete=True)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)

    def _lock(self) -> None:
        # The folder itself is locked: a lock file would stay in folders that are refused, and in finished harvests.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{self.folder}: another run is harvesting to this folder") from None
        except OSError:  # the file system has no locks
            pass

    def _begin(self) -> None:
        others = sorted({path.name for path in self.folder.iterdir()} - {MANIFEST + TEMPORARY})
        if others:
            raise FileExistsError(
                f"{self.folder} holds {', '.join(others[:5])} and no {MANIFEST}: it is not a harvest's folder; name a new one"
            )
        self._list([], complete=False)

    def _resume(self) -> None:
        manifest = read_manifest(self.folder)
        before = asdict(self.identity) | manifest["identity"]
        changed = [name for name, now in asdict(self.identity).items() if before[name] != now]
        if changed:
            raise ValueError(
                f"{self.folder} was harvested with other settings; name a new folder\n"
                + "\n".join(self._difference(name, before[name], manifest.get("description", {})) for name in changed)
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

    def _difference(self, name: str, then: Any, described: Mapping[str, Any]) -> str:
        """A field of `Identity` then and now, as text if it has one."""
        now = asdict(self.identity)[name]
        words = {"spec": ("capture", "interventions"), "model": ("model",), "tokenizer": ("tokenizer",)}.get(name, ())
        known = [(word, described[word], self.description[word]) for word in words if word in described]
        lines = [f"  {word}: {before}, and now {after}" for word, before, after in known if before != after]
        return "\n".join(lines) or f"  {name}: {then}, and now {now}"

    def _list(self, shards: list[ShardEntry], complete: bool) -> None:
        manifest = {
            "format": FORMAT,
            "description": self.description,
            "identity": asdict(self.identity),
            "complete": complete,
            "shards": [asdict(shard) for shard in shards],
        }
        self._put(MANIFEST, [json.dumps(manifest, indent=1).encode()])
        self.shards, self.complete = shards, complete

    def _put(self, name: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """Write a file atomically. Returns (its size, its CRC-32)."""
        temporary = self.folder / (name + TEMPORARY)
        size = crc32 = 0
        chunks = iter(chunks)

        def following() -> tuple[bytes | memoryview, int]:
            chunk = next(chunks, b"")
            return chunk, zlib.crc32(chunk, crc32)

        try:
            # While a chunk is written, the next one is serialised and checksummed. Both release the GIL.
            with open(temporary, "wb") as file, ThreadPoolExecutor(1) as beside:
                chunk, crc32 = following()
                while chunk:
                    submitted = beside.submit(following)
                    file.write(chunk)
                    file.flush()
                    _drop_from_cache(file, size, len(chunk))
                    size += len(chunk)
                    chunk, crc32 = submitted.result()
                os.fsync(file.fileno())
                _drop_from_cache(file, 0, size)
            os.replace(temporary, self.folder / name)
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return size, crc32


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, with its shards as `ShardEntry`.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: it is not a harvest's manifest, or has another version.
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
    """The bytes of a safetensors file (https://huggingface.co/docs/safetensors), in chunks that are not empty."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wide elements first: each tensor then starts at a multiple of its itemsize.
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
            # NumPy on integer views: torch would start intra-op threads for this thread.
            batch.append(piece.view(BITS[piece.itemsize]).numpy())
            full = sum(part.nbytes for part in batch) >= CHUNK_BYTES or place == len(pieces) - 1
            if full and any(part.size for part in batch):
                yield np.concatenate(batch).reshape(-1).view(np.uint8).data
                batch = []


def _drop_from_cache(file: BufferedWriter, start: int, size: int) -> None:
    """Drop these bytes from the page cache: dirty pages are written out, clean pages are released."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the file system takes no advice
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


def crc32_of(chunks: Iterable[bytes | memoryview]) -> int:
    """CRC-32 of concatenated chunks."""
    found = 0
    for chunk in chunks:
        found = zlib.crc32(chunk, found)
    return found


def index_name(name: str, site: str | None, per_site: bool) -> str:
    """Name of an index tensor. Raises ValueError: each site has its own index, and `site` is None."""
    if per_site and site is None:
        raise ValueError(f"the sites were captured at different positions: name one, {name}('resid_post.0')")
    return f"{name}.{site}" if per_site else name
