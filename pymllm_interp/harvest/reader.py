"""Reads the folder of a harvest: captured states in safetensors shards.

    harvest = open_harvest("out")
    rows = harvest["resid_post.12"]            # all shards, memory-mapped
    rows[torch.randperm(len(rows))[:4096]]     # [4096, width]: an index, a slice, or a tensor of indexes
    harvest.document_ids()[:100]               # [100] int64; so are `positions` and `token_ids`
    for shard in harvest.shards:
        shard["resid_post.12"]                 # [rows, width]

The folder holds `manifest.json` and the shards `shard-000000.safetensors`, ... A shard has a tensor [rows, ...] for each site, and
three index tensors [rows] int64: `document_ids`, `positions` in the document, and `token_ids`. Where captures select different
positions, each site has its own index tensors, such as `positions.resid_post.12`.

Shards and manifest are written to a temporary file, synced and renamed; the manifest lists a shard after that. So a killed run
neither loses nor duplicates rows. The next run deletes files that the manifest does not list.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .folder import ShardEntry, crc32_of, index_name, read_manifest


class ShardedRows:
    """One tensor over all shards, concatenated. It has a length and is indexable, as a torch `Dataset`.

    ``rows[i]`` has shape [...]. ``rows[a:b]``, ``rows[indexes]`` (a list or a tensor [n]) and ``rows[mask]`` (a bool for each row,
    such as ``harvest.document_ids()[:] == 7``) have shape [n, ...] and are copies.
    """

    def __init__(self, name: str, shards: Sequence[Shard]) -> None:
        self._parts = [shard.tensor(name) for shard in shards]
        ends = torch.tensor([0, *map(len, self._parts)]).cumsum(0)
        self._starts, self._length = ends[:-1], int(ends[-1])

    def __len__(self) -> int:
        return self._length

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, ...], without reading rows."""
        return (self._length, *(self._parts[0].shape[1:] if self._parts else ()))

    def __repr__(self) -> str:
        return f"ShardedRows({list(self.shape)})"

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
            return wanted  # empty: the harvest has no shards
        wanted = wanted % max(self._length, 1)
        part = torch.searchsorted(self._starts, wanted, right=True) - 1
        found = self._parts[0].new_empty(len(wanted), *self._parts[0].shape[1:])
        for number in part.unique().tolist():
            of_part = part == number
            found[of_part] = self._parts[number][wanted[of_part] - self._starts[number]]
        return found


class Shard:
    """One shard: ``shard[site]`` [rows, ...], memory-mapped, and its index tensors."""

    def __init__(self, folder: Path, entry: ShardEntry, index_per_site: bool) -> None:
        self.path, self.entry, self._index_per_site = folder / entry.file, entry, index_per_site
        self._file: Any = None

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file."""
        if self._file is None:
            self._file = safe_open(self.path, framework="pt")
        return self._file.get_tensor(name)

    def __getitem__(self, site: str) -> Tensor:
        """States of a site, [rows, ...]. Raises KeyError if it was not captured."""
        if site not in self.entry.rows:
            raise KeyError(f"{site!r} was not captured; there is {', '.join(self.entry.rows)}")
        return self.tensor(site)

    def document_ids(self, site: str | None = None) -> Tensor:
        """[rows] int64: index of the document in the input. `site` is needed where each site has its own index."""
        return self.tensor(index_name("document_ids", site, self._index_per_site))

    def positions(self, site: str | None = None) -> Tensor:
        """[rows] int64: position in the document, whether or not it was split."""
        return self.tensor(index_name("positions", site, self._index_per_site))

    def token_ids(self, site: str | None = None) -> Tensor:
        """[rows] int64: token at the position."""
        return self.tensor(index_name("token_ids", site, self._index_per_site))


class Harvest:
    """The shards that the folder had when `open_harvest` was called.

    Attributes:
        manifest: fingerprints and settings of the run, and whether the harvest is complete.
        shards: in the order of the input.
        sites: captured sites.
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

    def __getitem__(self, site: str) -> ShardedRows:
        """States of a site, over all shards. Raises KeyError if it was not captured."""
        if site not in self.sites:
            raise KeyError(f"{site!r} was not captured; there is {', '.join(self.sites) or 'nothing yet'}")
        return ShardedRows(site, self.shards)

    def document_ids(self, site: str | None = None) -> ShardedRows:
        """Index of each row's document in the input. `site` is needed where each site has its own index."""
        return ShardedRows(index_name("document_ids", site, self._index_per_site), self.shards)

    def positions(self, site: str | None = None) -> ShardedRows:
        """Position of each row in its document, whether or not it was split."""
        return ShardedRows(index_name("positions", site, self._index_per_site), self.shards)

    def token_ids(self, site: str | None = None) -> ShardedRows:
        """Token of each row."""
        return ShardedRows(index_name("token_ids", site, self._index_per_site), self.shards)

    def verify(self) -> None:
        """Check the CRC-32 of each shard. Raises ValueError if one is damaged."""
        for shard in self.shards:
            with open(shard.path, "rb") as file:
                found = crc32_of(iter(lambda: file.read(1 << 24), b""))
            if f"{found:08x}" != shard.entry.crc32:
                raise ValueError(f"{shard.path} is damaged: its CRC-32 is {found:08x}, not {shard.entry.crc32}")


def open_harvest(folder: str | Path) -> Harvest:
    """Open the folder of `LM.harvest`, during the run or afterwards. Only whole shards are read.

    Raises:
        FileNotFoundError, ValueError: the folder is not a harvest's.
    """
    return Harvest(folder)
