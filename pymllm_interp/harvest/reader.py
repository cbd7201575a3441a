"""Reads the folder of a harvest: captured states in safetensors shards.

    harvest = open_harvest("out")
    rows = harvest["resid_post.12"]            # all shards, memory-mapped
    rows[torch.randperm(len(rows))[:4096]]     # [4096, width]: an index, a slice, or a tensor of indexes
    harvest["blocks.12.hook_resid_post"]       # any name of a site
    harvest["scores.sea"]                      # [rows] float32, of a monitor
    harvest.document_ids()                     # [rows] int64; so are `positions` and `token_ids`
    harvest.indexes("resid_post.12")           # [rows, top_k] int64, of a capture with Project(top_k=...) or Features
    for shard in harvest.shards:
        shard["resid_post.12"]                 # [rows, width]

The folder holds `manifest.json` and the shards `shard-000000.safetensors`, ... A shard has a tensor [rows, ...] for each site. It
has three index tensors [rows] int64: `document_ids`, `positions` in the document, and `token_ids`. Where captures select different
positions, each site has its own index tensors, such as `positions.resid_post.12`.

Shards and manifest are written to a temporary file, synced and renamed; the manifest lists a shard after that. So a killed run
neither loses nor duplicates rows. The next run deletes files that the manifest does not list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..hooks.site import Site
from .folder import INDEX, ShardEntry, crc32_of, index_name, read_manifest
from .sources import pyarrow


class ShardedRows:
    """One tensor over all shards, concatenated. It has a length and is indexable, as a torch `Dataset`.

    ``rows[i]`` has shape [...]. Indexes are ``rows[a:b]``, ``rows[indexes]`` (a list or a tensor [n]) and ``rows[mask]``. A mask
    has a bool for each row, such as ``harvest.document_ids()[:] == 7``. The results are copies of shape [n, ...].
    """

    def __init__(self, name: str, shards: Sequence[Shard]) -> None:
        self._parts = [shard.tensor(name) for shard in shards]
        ends = torch.tensor([0, *map(len, self._parts)]).cumsum(0)
        self._starts, self._length = ends[:-1], int(ends[-1])

    def __len__(self) -> int:
        return self._length

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [rows, ...]. No row is read."""
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


class SiteNames:
    """The sites of a harvest, found by any of their names.

    Args:
        sites: canonical names.
        num_layers: number of layers of the model, to resolve negative layers; None if unknown.
    """

    def __init__(self, sites: Sequence[str], num_layers: int | None) -> None:
        self._sites, self._num_layers = sites, num_layers

    def find(self, site: str | Site) -> str:
        """The canonical name. Raises KeyError for a site that was not captured."""
        name = str(site)
        if name not in self._sites:
            with contextlib.suppress(ValueError):
                found = Site.parse(name)
                if found.layer is not None and found.layer < 0 and self._num_layers is not None:
                    found = Site(found.kind, found.layer + self._num_layers)
                name = str(found)
        if name not in self._sites:
            raise KeyError(f"{str(site)!r} was not captured; there is {', '.join(self._sites) or 'nothing yet'}")
        return name

    def __contains__(self, site: object) -> bool:
        try:
            return isinstance(site, str | Site) and bool(self.find(site))
        except KeyError:
            return False


def other_name(other: str, site: str, names: set[str]) -> str:
    """The name of a further tensor of a site. Raises KeyError if none of the names is in the harvest."""
    name = f"{other}.{site}"
    if name not in names:
        raise KeyError(f"{site} has no {other}: it was captured without a reduction that makes them")
    return name


class Shard:
    """One shard: ``shard[site]`` [rows, ...], memory-mapped, and its index tensors."""

    def __init__(self, folder: Path, entry: ShardEntry, index_per_site: bool, names: SiteNames) -> None:
        self.path, self.entry, self._index_per_site, self._names = folder / entry.file, entry, index_per_site, names
        self._file: Any = None

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file."""
        self._open()
        return self._file.get_tensor(name)

    def _open(self) -> None:
        if self._file is None:
            self._file = safe_open(self.path, framework="pt")

    def __getitem__(self, site: str | Site) -> Tensor:
        """States of a site, [rows, ...], by any of its names. Raises KeyError if it was not captured."""
        return self.tensor(self._names.find(site))

    def __contains__(self, site: object) -> bool:
        return site in self._names

    def indexes(self, site: str | Site) -> Tensor:
        """[rows, top_k] int64: directions, features or tokens that a reduction kept. Raises KeyError without them."""
        return self.other("indexes", site)

    def other(self, name: str, site: str | Site) -> Tensor:
        """[rows, ...]: additional results of a reduction, by their attribute of `Activations` ("counts"). Raises KeyError
        without it."""
        return self.tensor(other_name(name, self._names.find(site), self._file_names()))

    def _file_names(self) -> set[str]:
        self._open()
        return set(self._file.keys())

    def document_ids(self, site: str | Site | None = None) -> Tensor:
        """[rows] int64: index of the document in the input. `site` is needed where each site has its own index."""
        return self._index("document_ids", site)

    def positions(self, site: str | Site | None = None) -> Tensor:
        """[rows] int64: position in the document, whether or not it was split."""
        return self._index("positions", site)

    def token_ids(self, site: str | Site | None = None) -> Tensor:
        """[rows] int64: token at the position."""
        return self._index("token_ids", site)

    def _index(self, name: str, site: str | Site | None) -> Tensor:
        return self.tensor(index_name(name, None if site is None else self._names.find(site), self._index_per_site))


class Harvest:
    """The shards that the folder had when `open_harvest` was called.

    Attributes:
        manifest: the harvest in words (`description`), fingerprints and settings (`identity`), and whether it is complete.
        shards: shards in the order of the input.
        sites: captured sites, and ``scores.NAME`` of monitors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._index_per_site: bool = self.manifest["identity"]["index_per_site"]
        entries: list[ShardEntry] = self.manifest["shards"]
        description = self.manifest.get("description", {})  # folders of earlier versions have none
        self.sites = list(entries[0].rows) if entries else list(description.get("sites", ()))
        self._names = SiteNames(self.sites, description.get("num_hidden_layers"))
        self.shards = [Shard(self.folder, entry, self._index_per_site, self._names) for entry in entries]

    def __repr__(self) -> str:
        return f"Harvest({str(self.folder)!r}, {len(self.shards)} shards of {', '.join(self.sites) or 'nothing yet'})"

    def __getitem__(self, site: str | Site) -> ShardedRows:
        """States of a site, over all shards, by any of its names. Raises KeyError if it was not captured."""
        return ShardedRows(self._names.find(site), self.shards)

    def __contains__(self, site: object) -> bool:
        return site in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def indexes(self, site: str | Site) -> Tensor:
        """[rows, top_k] int64: directions, features or tokens that a reduction kept. Raises KeyError without them."""
        return self.other("indexes", site)

    def other(self, name: str, site: str | Site) -> Tensor:
        """[rows, ...]: additional results of a reduction, by their attribute of `Activations` ("counts"). Raises KeyError
        without it."""
        return _joined([shard.other(name, site) for shard in self.shards])

    @property
    def skipped(self) -> dict[int, str]:
        """Documents that failed and were left out (`on_error="skip"`): index in the input -> the error."""
        return {int(number): error for shard in self.shards for number, error in shard.entry.skipped.items()}

    def document_ids(self, site: str | Site | None = None) -> Tensor:
        """[rows] int64: index of each row's document in the input. `site` is needed where each site has its own index."""
        return _joined([shard.document_ids(site) for shard in self.shards])

    def positions(self, site: str | Site | None = None) -> Tensor:
        """[rows] int64: position of each row in its document, whether or not it was split."""
        return _joined([shard.positions(site) for shard in self.shards])

    def token_ids(self, site: str | Site | None = None) -> Tensor:
        """[rows] int64: token of each row."""
        return _joined([shard.token_ids(site) for shard in self.shards])

    def to_parquet(self, path: str | Path) -> None:
        """Write a Parquet file: `document_ids`, `positions`, `token_ids`, and each site as lists of one length, in float32.

        A shard is a row group. The heads of a state are side by side.

        Raises:
            ValueError: sites with different positions: they have no common rows.
            ImportError: pyarrow is missing.
        """
        if self._index_per_site:
            raise ValueError(
                f"{self.folder}: its sites select different positions, and a row of a table is one position"
            )
        arrow, parquet = pyarrow("Parquet files")
        with contextlib.ExitStack() as stack:
            writer = None
            for shard in self.shards:
                columns = {name: arrow.array(getattr(shard, name)().numpy()) for name in INDEX}
                for site in self.sites:
                    rows = shard[site].float().flatten(1) if shard[site].ndim > 1 else shard[site].float()[:, None]
                    values = arrow.array(rows.numpy().reshape(-1))
                    columns[site] = arrow.FixedSizeListArray.from_arrays(values, rows.shape[1])
                table = arrow.table(columns)
                writer = writer or stack.enter_context(parquet.ParquetWriter(path, table.schema))
                writer.write_table(table)

    def verify(self) -> None:
        """Check the CRC-32 of each shard. Raises ValueError if one is damaged."""
        for shard in self.shards:
            with open(shard.path, "rb") as file:
                found = crc32_of(iter(lambda: file.read(1 << 24), b""))
            if f"{found:08x}" != shard.entry.crc32:
                raise ValueError(f"{shard.path} is damaged: its CRC-32 is {found:08x}, not {shard.entry.crc32}")


def _joined(parts: list[Tensor]) -> Tensor:
    """The index tensors of all shards, concatenated; of one shard without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def open_harvest(folder: str | Path) -> Harvest:
    """Open the folder of `LM.harvest`, during the run or afterwards. Only whole shards are read.

    Raises:
        FileNotFoundError, ValueError: the folder is not a harvest's.
    """
    return Harvest(folder)
