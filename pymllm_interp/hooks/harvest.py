"""The folder of a harvest: captured states in safetensors shards, written so that a killed run loses and doubles no row.

    harvest = open_harvest("out")
    rows = harvest["resid_post.12"]            # of all shards, memory-mapped
    rows[torch.randperm(len(rows))[:4096]]     # [4096, width]: an index, a slice, or a tensor of indexes
    harvest.document_ids()[:100]               # whose they are; `positions` and `token_ids` likewise
    for shard in harvest.shards:
        shard["resid_post.12"]                 # [rows, width]

In the folder are `manifest.json` and `shard-000000.safetensors`, ...: a tensor for each site [rows, ...], and for each row the
document that it is of, its position there, and its token, in `document_ids`, `positions` and `token_ids` [rows] int64. Where
captures select different positions, each site has index tensors of its own, `positions.resid_post.12`.

A shard is written under another name, synced and renamed before the manifest lists it, and the manifest is replaced in the same
way. What it does not list was left by a run that was killed, and is deleted by the next one.
"""

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
from safetensors import safe_open
from torch import Tensor

from ..layers.edits import LOGITS
from .intervention import Capture, Positions, Project, windows_of
from .site import ModelInfo, expand

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


def has_index_per_site(captures: Sequence[Capture]) -> bool:
    """Whether the captures' rows are not all at the same positions."""
    places = {(repr(_positions_of(spec)), spec.reduce if isinstance(spec.reduce, str) else None) for spec in captures}
    return len(places) > 1


def _positions_of(spec: Capture) -> Positions:
    """Where a harvest captures: of a pass's positions the last one alone has logits."""
    return (-1,) if spec.site == LOGITS and spec.positions == "all" else spec.positions


def expected_bytes(captures: Sequence[Capture], model: ModelInfo, tokens: int) -> int:
    """What the rows of a document of so many tokens take in a shard.

    Raises:
        ValueError: positions beyond the document.
    """
    total, index = 0, 8 * len(INDEX)
    for number, spec in enumerate(captures):
        sites = expand(spec.site, model.num_hidden_layers, model.family)
        rows = sum(window.size or tokens for window in windows_of(_positions_of(spec), tokens))
        values, dtype, places = model.width(sites[0].kind), model.dtype, 0
        if isinstance(spec.reduce, Project):
            dtype, places = torch.float32, 8 * (spec.reduce.top_k or 0)
            values = spec.reduce.top_k or len(spec.reduce.directions)
        elif spec.reduce is not None:
            rows = 1
        if isinstance(spec.dtype, torch.dtype):
            dtype = spec.dtype
        indexes = len(sites) if has_index_per_site(captures) else int(number == 0)
        total += rows * (len(sites) * (values * dtype.itemsize + places) + indexes * index)
    return total


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


# -- reading -----------------------------------------------------------------------------------------


class Rows:
    """One tensor of all shards, by row: indexable, and with a length, as a torch `Dataset` is.

    ``rows[i]`` is [...], ``rows[a:b]`` and ``rows[indexes]`` (a list, or a tensor [n]) are [n, ...], fresh memory; so is
    ``rows[mask]`` with a bool for each row, as ``harvest.document_ids()[:] == 7`` makes them.
    """

    def __init__(self, name: str, shards: Sequence[Shard]) -> None:
        self._parts = [shard.tensor(name) for shard in shards]
        ends = torch.tensor([0, *map(len, self._parts)]).cumsum(0)
        self._starts, self._length = ends[:-1], int(ends[-1])

    def __len__(self) -> int:
        return self._length

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, ...], without reading any."""
        return (self._length, *(self._parts[0].shape[1:] if self._parts else ()))

    def __repr__(self) -> str:
        return f"Rows({list(self.shape)})"

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Tensor:
        if isinstance(index, slice):
            return self[torch.arange(*index.indices(self._length))]
        wanted = torch.as_tensor(index)
        if wanted.dtype is torch.bool and wanted.shape == (self._length,):
            wanted = wanted.nonzero()[:, 0]
        elif wanted.numel() and (wanted.dtype is torch.bool or wanted.is_floating_point() or wanted.ndim > 1):
            raise IndexError(
                f"rows are named by whole numbers [n], or by a mask of {self._length} bools, not by {wanted.dtype} of shape "
                f"{list(wanted.shape)}"
            )
        wanted = wanted.long()
        if wanted.ndim == 0:
            return self[wanted[None]][0]
        if ((wanted < -self._length) | (wanted >= self._length)).any():
            raise IndexError(f"row {int(wanted.abs().max())} of {self._length}")
        if not self._parts:
            return wanted  # nothing, of a harvest without shards
        wanted = wanted % max(self._length, 1)
        part = torch.searchsorted(self._starts, wanted, right=True) - 1
        found = self._parts[0].new_empty(len(wanted), *self._parts[0].shape[1:])
        for number in part.unique().tolist():
            of_part = part == number
            found[of_part] = self._parts[number][wanted[of_part] - self._starts[number]]
        return found


class Shard:
    """A shard: ``shard[site]`` [rows, ...], memory-mapped, and the index of its rows."""

    def __init__(self, folder: Path, entry: ShardEntry, index_per_site: bool) -> None:
        self.path, self.entry, self._index_per_site = folder / entry.file, entry, index_per_site
        self._file: Any = None

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file."""
        if self._file is None:
            self._file = safe_open(self.path, framework="pt")
        return self._file.get_tensor(name)

    def __getitem__(self, site: str) -> Tensor:
        """The site's states. Raises KeyError on one that was not captured."""
        if site not in self.entry.rows:
            raise KeyError(f"{site!r} was not captured; there is {', '.join(self.entry.rows)}")
        return self.tensor(site)

    def document_ids(self, site: str | None = None) -> Tensor:
        """[rows] int64: ordinals of the documents in the input. A site is named where each has its own positions."""
        return self.tensor(index_name("document_ids", site, self._index_per_site))

    def positions(self, site: str | None = None) -> Tensor:
        """[rows] int64, from the document's start, also where it was split."""
        return self.tensor(index_name("positions", site, self._index_per_site))

    def token_ids(self, site: str | None = None) -> Tensor:
        """[rows] int64: the tokens at these positions."""
        return self.tensor(index_name("token_ids", site, self._index_per_site))


class Harvest:
    """What `open_harvest` gives: the whole shards that were there then.

    Attributes:
        manifest: the fingerprints and settings of its run, and whether it is complete.
        shards: one after the other, in the order of the input.
        sites: that were captured.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._index_per_site: bool = self.manifest["identity"]["index_per_site"]
        entries: list[ShardEntry] = self.manifest["shards"]
        self.shards = [Shard(self.folder, entry, self._index_per_site) for entry in entries]
        self.sites = list(entries[0].rows) if entries else []

    def __repr__(self) -> str:
        return f"Harvest({str(self.folder)!r}, {len(self.shards)} shards of {', '.join(self.sites) or 'nothing yet'})"

    def __getitem__(self, site: str) -> Rows:
        """The site's states of all shards. Raises KeyError on one that was not captured."""
        if site not in self.sites:
            raise KeyError(f"{site!r} was not captured; there is {', '.join(self.sites) or 'nothing yet'}")
        return Rows(site, self.shards)

    def document_ids(self, site: str | None = None) -> Rows:
        """Of all rows: ordinals of the documents in the input. A site is named where each has its own positions."""
        return Rows(index_name("document_ids", site, self._index_per_site), self.shards)

    def positions(self, site: str | None = None) -> Rows:
        """Of all rows: positions from the document's start, also where it was split."""
        return Rows(index_name("positions", site, self._index_per_site), self.shards)

    def token_ids(self, site: str | None = None) -> Rows:
        """Of all rows: the tokens at these positions."""
        return Rows(index_name("token_ids", site, self._index_per_site), self.shards)

    def verify(self) -> None:
        """Read every shard. Raises ValueError where one is not what was written."""
        for shard in self.shards:
            with open(shard.path, "rb") as file:
                found = _crc32(iter(lambda: file.read(1 << 24), b""))
            if f"{found:08x}" != shard.entry.crc32:
                raise ValueError(f"{shard.path} is damaged: its CRC-32 is {found:08x}, not {shard.entry.crc32}")


def open_harvest(folder: str | Path) -> Harvest:
    """Open what `LM.harvest` wrote, while it writes or afterwards; only whole shards are seen.

    Raises:
        FileNotFoundError, ValueError: not a harvest's folder.
    """
    return Harvest(folder)


def index_name(name: str, site: str | None, per_site: bool) -> str:
    """What an index tensor is called.

    Raises:
        ValueError: each site has its own, and none is named.
    """
    if per_site and site is None:
        raise ValueError(f"the sites were captured at different positions: name one, {name}('resid_post.0')")
    return f"{name}.{site}" if per_site else name
