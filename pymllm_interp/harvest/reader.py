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

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..core.model_spec import LOGITS, ModelSpec
from ..hooks.captures.spec import Capture, Project
from ..hooks.positions import Positions, windows_of
from ..hooks.site import expand
from .folder import (
    INDEX,
    ShardEntry,
    _crc32,
    index_name,
    read_manifest,
)


def has_index_per_site(captures: Sequence[Capture]) -> bool:
    """Whether the captures' rows are not all at the same positions."""
    places = {(repr(_positions_of(spec)), spec.reduce if isinstance(spec.reduce, str) else None) for spec in captures}
    return len(places) > 1


def _positions_of(spec: Capture) -> Positions:
    """Where a harvest captures: of a pass's positions the last one alone has logits."""
    return (-1,) if spec.site == LOGITS and spec.positions == "all" else spec.positions


def expected_bytes(captures: Sequence[Capture], model: ModelSpec, tokens: int) -> int:
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
