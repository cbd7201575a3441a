"""`BySite`: a tensor for each captured site.

Sites with equal positions are columns of one tensor, a `SitePiece`, which is divided at the first read. So activations with
hundreds of sites are made, and travel between processes, in a few operations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch

from ...core.model_spec import OF_PASSES, PATTERN, STATE
from ...utils.tables import Shown, Table
from ..site import Site, part_of

SHORT_NAMES = {"post": "mlp_act"}
"""TransformerLens' short names of kinds -> kind of site."""


class SitePiece(NamedTuple):
    """Sites with equal positions. Their rows are columns of one tensor.

    Attributes:
        sites: sites in the order of the columns.
        rows: [positions, sites * width]; of one site, its rows as they are.
        positions, token_ids: [positions] int64.
        others: further tensors of one site, by name.
    """

    sites: tuple[str, ...]
    rows: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    others: Mapping[str, torch.Tensor]

    def columns(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(site, rows) of each site: views."""
        if len(self.sites) == 1:
            yield self.sites[0], self.rows
            return
        # Not by `unbind`: autograd does not allow in-place operations on its outputs.
        yield from zip(self.sites, self.rows.unsafe_split(self.rows.shape[1] // len(self.sites), 1), strict=True)


class SiteTensors:
    """The rows, positions and token ids of sites, and pieces of which no site was read yet. Thread-safe.

    Attributes:
        pieces: not divided yet.
        others: name -> site -> a further tensor.
    """

    _dividing = threading.Lock()

    def __init__(self, pieces: Sequence[SitePiece] = (), order: tuple[str, ...] = ()) -> None:
        self.pieces, self.order = pieces, order
        self.rows: dict[str, torch.Tensor] = {}
        self.positions: dict[str, torch.Tensor] = {}
        self.token_ids: dict[str, torch.Tensor] = {}
        self.others: dict[str, dict[str, torch.Tensor]] = {}

    def divide(self) -> None:
        """Make tensors by site of the pieces."""
        with self._dividing:
            if not self.pieces:  # another thread has
                return
            found = {site: (rows, piece) for piece in self.pieces for site, rows in piece.columns()}
            for site in self.order:
                rows, piece = found[site]
                self.positions[site], self.token_ids[site] = piece.positions, piece.token_ids
                for name, tensor in piece.others.items():
                    self.others.setdefault(name, {})[site] = tensor
                self.rows[site] = rows
            self.pieces = ()


class BySite(Mapping[str, torch.Tensor], Shown):
    """A tensor for each site. A key is any name that `Site.parse` takes, a `Site`, or ("resid_post", 3).

    Args:
        num_layers: number of layers of the model, to resolve negative layers.
        positions: site -> positions of the tensors' rows; None if unknown.
    """

    def __init__(self, num_layers: int, positions: BySite | None = None) -> None:
        self._num_layers, self._rows_at = num_layers, positions
        self._found: dict[str, torch.Tensor] = {}
        self._undivided: SiteTensors | None = None

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        if self._undivided is not None and self._undivided.pieces:
            self._undivided.divide()
        return self._found

    def _name(self, site: str | Site | tuple) -> str:
        """The canonical name of a site, or of TransformerLens' ("resid_post", 3)."""
        if isinstance(site, tuple):
            kind, layer, *_ = (*site, None)
            kind = SHORT_NAMES.get(str(kind), str(kind))
            site = kind if layer is None else f"{kind}.{layer}"
        if site in self._tensors:
            return str(site)
        try:
            found = Site.parse(str(site))
        except ValueError:
            return str(site)
        if part_of(str(found)):  # a part has its own number of layers
            return str(found)
        if found.layer is not None and found.layer < 0:
            found = replace(found, layer=found.layer + self._num_layers)
        return str(found)

    def __getitem__(self, site: str | Site | tuple) -> torch.Tensor:
        name = self._name(site)
        if name not in self._tensors:
            site = name if isinstance(site, tuple) else site
            raise KeyError(
                f"{str(site)!r} was not captured{_reason(str(site), name)}; there is {self._kinds() or 'nothing'}"
            )
        return self._tensors[name]

    def _kinds(self) -> str:
        """Kinds of sites with their layers: "embed, resid_post.{0..29}"."""
        layers: dict[str, list[int]] = {}
        for name in self._tensors:
            kind, layer = _parts(name)
            layers.setdefault(kind, []).extend(layer)
        return ", ".join(f"{kind}{_selector(found)}" for kind, found in layers.items())

    def layers(self, kind: str) -> list[int]:
        """The layers of a kind of site that are here, ascending."""
        return sorted(found.layer for found in map(Site.parse, self) if found.kind == kind and found.layer is not None)

    def stack(self, kind: str) -> torch.Tensor:
        """The tensors of all layers of a kind, [layers, positions, ...], in the order of `layers`.

        Raises:
            KeyError: no layer of this kind was captured.
            ValueError: layers were captured at different positions, or as different values.
        """
        sites = [f"{kind}.{layer}" for layer in self.layers(kind)]
        if not sites:
            return self[f"{kind}.*"]  # raises, and lists the known keys
        found = [self[site] for site in sites]
        for site, rows in zip(sites, found, strict=True):
            at = self._rows_at
            alike = at is None or torch.equal(at[site], at[sites[0]])
            if rows.shape != found[0].shape or rows.dtype != found[0].dtype or not alike:
                raise ValueError(
                    f"{site} and {sites[0]} were captured at different positions, or differently: no stack of them"
                )
        return torch.stack(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        """Kinds of sites with their layers and shapes: ``Activations(resid_post.{0..29} [5, 576], logits [1, 49152])``."""
        layers: dict[tuple[str, str], list[int]] = {}
        for name, rows in self._tensors.items():
            kind, layer = _parts(name)
            layers.setdefault((kind, str(list(rows.shape))), []).extend(layer)
        parts = [f"{kind}{_selector(found)} {shape}" for (kind, shape), found in layers.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    def table(self) -> Table:
        """Shape, dtype, mean and standard deviation of each site's values."""
        rows = [
            (name, list(x.shape), str(x.dtype)[6:], *_moments(x))
            for name, x in zip(self, self._tensors.values(), strict=True)
        ]
        error = getattr(self, "error", None)
        title = f"{type(self).__name__}: {len(self)} site{'' if len(self) == 1 else 's'}"
        return Table(title if error is None else f"{title}; {error}", ("site", "shape", "dtype", "mean", "std"), rows)


def _parts(name: str) -> tuple[str, list[int]]:
    """(kind, [layer], or [] without one) of a canonical name."""
    kind, _, layer = name.rpartition(".")
    return (kind, [int(layer)]) if layer.isdecimal() else (name, [])


def _reason(given: str, name: str) -> str:
    """Reason that a key is missing, with the capture to request. "": the site was not requested.

    Args:
        name: canonical name, if it is a site's.
    """
    kind = name.partition(".")[0]
    if kind in OF_PASSES:
        what = {PATTERN: "attention patterns", STATE: "recurrent states"}.get(kind, "keys and values")
        return f": {what} are captured by lm.generate(prompt, capture=[{name!r}])"
    if not {"*", "{"} & set(given):  # patterns of sites are not keys
        try:
            Site.parse(given)
        except ValueError as error:
            return f": {error}"
    return ""


def _selector(layers: Sequence[int]) -> str:
    """Layers as a pattern has them: ".3", ".{0..2,5}"; "" for none."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(layers)), lambda entry: entry[1] - entry[0])]
    parts = [f"{run[0][1]}..{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
    if not parts:
        return ""
    return f".{parts[0]}" if len(layers) == 1 else f".{{{','.join(parts)}}}"


def _moments(x: torch.Tensor) -> tuple[str, str]:
    """Mean and standard deviation of all values, in words."""
    x = x.double()
    return (f"{x.mean():.4g}", f"{x.std(correction=0):.4g}") if x.numel() else ("", "")
