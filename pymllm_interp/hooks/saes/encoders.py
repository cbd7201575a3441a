"""`Encoders`: the SAEs that passes with device tables encode, and where each token row's results are.

A kernel computes one feature of a plain SAE from a state. It cannot where all features or another site's state decide. So the pass
encodes such SAEs where they read, for all token rows at once. The memory of a row (`TokenRows.features`) then has the features that
its request wants, and for `Reconstruct` the reconstruction. Kernels at the site that is written load them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...core.model_spec import LOGITS, NUMBERED_SITES, ModelSpec, site_index
from ...kernels.edit_codes import FEATURE_COLUMNS
from ..captures.reductions.reduction import Readout
from ..site import NORMED, expand, is_several, stream_of
from .sae import SAE

CHUNK = 1 << 25
"""Features that one encoding holds: they bound its rows."""
FEATURE = (1 << 32) - 1
"""Bits of an entry of `OpTables.wanted` with a feature's number. The encoder's number is above."""


def read_of(
    sae: SAE, site: str, model: ModelSpec, readout: Readout | None
) -> tuple[int, Callable[[Tensor], Tensor] | None]:
    """(number of the site with the states that an SAE at `site` encodes, the norm of these states or None).
    Raises ValueError: a site without a number, or the norm of such a site."""
    (found,) = expand(site, model.num_hidden_layers, model.family)
    if found.kind not in NORMED:
        return site_index(found, model.num_hidden_layers), None
    number = site_index(stream_of(found, model), model.num_hidden_layers)
    return number, _no_norm if readout is None else partial(readout.norm, found, gain=sae.norm_gain)


def _no_norm(rows: Tensor) -> Tensor:
    raise AssertionError("hooks that were bound without the model run no pass")


@dataclass(frozen=True, eq=False)
class SAEEncoder:
    """An SAE that passes encode.

    Attributes:
        number: its number among the engine's.
        site: number of the site that it reads.
        sites_out: numbers of the sites that it writes.
        norm: norm of the states there; None for none.
        column: first column of its reconstruction in a row's memory; None: it is not reconstructed.
    """

    sae: SAE
    number: int
    site: int
    sites_out: tuple[int, ...]
    norm: Callable[[Tensor], Tensor] | None
    column: int | None = None

    @property
    def after(self) -> bool:
        """Whether it reads the state after the ops at the site. An autoencoder reads the state before them."""
        return self.sae.transcoder

    def behind(self, columns: int) -> SAEEncoder:
        """The encoder with its reconstruction behind further columns."""
        return self if self.column is None else replace(self, column=self.column + columns)

    def entry(self, feature: int | None) -> int:
        """The entry of `OpTables.wanted` for a feature; None: for the factor of the output, `SAE.output_scale`."""
        return (self.number << 32) + (self.sae.d_sae if feature is None else feature)

    @torch.no_grad()
    def read(self, states: Tensor, wanted: Tensor, memory: Tensor) -> None:
        """Write the features that rows want, and reconstructions.

        Args:
            states: [tokens, width].
            wanted: [tokens, FEATURE_COLUMNS] int64, rows of `OpTables.wanted`.
            memory: [tokens, columns] float32, written to.
        """
        rows = max(1, CHUNK // self.sae.d_sae)
        for x, of_rows, target in zip(*(tensor.split(rows) for tensor in (states, wanted, memory)), strict=True):
            x = x if self.norm is None else self.norm(x)
            found, scale = self.sae.encode_float32(x), self.sae.output_scale(x)
            feature = of_rows & FEATURE
            values = torch.where(
                feature < self.sae.d_sae, found.gather(1, feature.clamp(max=self.sae.d_sae - 1)), scale
            )
            kept = target[:, :FEATURE_COLUMNS]
            kept.copy_(torch.where(of_rows >> 32 == self.number, values, kept))
            if self.column is not None:
                target[:, self.column : self.column + self.sae.d_out] = self.sae.reconstruct(x, found)


class Encoders:
    """The encoders of an engine. SAEs that no op could set anything for are left out.

    Args:
        saes: the SAEs that the engine was built with, by name.
        model: its sites.
        readout: its norms; None without a model.
        reconstruct: names of SAEs that `Reconstruct` may take.

    Attributes:
        by_site: encoders by the number of the site that they read.
        sites: numbers of all sites that they read or write.
        columns: width of a row's memory; 0 without encoders.
    """

    def __init__(
        self,
        saes: Mapping[str, SAE],
        model: ModelSpec | None,
        readout: Readout | None = None,
        reconstruct: Sequence[str] = (),
    ) -> None:
        self.by_site: dict[int, list[SAEEncoder]] = {}
        if unknown := [name for name in reconstruct if name not in saes]:
            raise ValueError(
                f"reconstruct={list(reconstruct)}: saes has no {unknown[0]!r}; it has {', '.join(saes) or 'none'}"
            )
        rebuilt = {id(saes[name]) for name in reconstruct}
        across = 0  # columns used by transcoders
        own = dict[int, int]()  # site -> columns used by autoencoders, which are loaded where they are made
        for sae in {id(sae): sae for sae in saes.values()}.values():
            assert model is not None, "SAEs have sites"
            if not (sae.encodes_whole or id(sae) in rebuilt) or (sites := _sites_of(sae, model, readout)) is None:
                continue
            site, norm, sites_out = sites
            column = None
            if id(sae) in rebuilt and sae.transcoder:
                column, across = across, across + sae.d_out
            elif id(sae) in rebuilt:
                column = own.get(site, 0)
                own[site] = column + sae.d_out
            number = sum(map(len, self.by_site.values()))
            self.by_site.setdefault(site, []).append(SAEEncoder(sae, number, site, sites_out, norm, column))
        for found in self.by_site.values():
            found[:] = [encoder.behind(FEATURE_COLUMNS + (0 if encoder.after else across)) for encoder in found]
        self.columns = FEATURE_COLUMNS + across + max(own.values(), default=0)
        self.sites = frozenset(self.by_site) | {site for found in self.all for site in found.sites_out}
        self.columns *= bool(self.by_site)

    def __bool__(self) -> bool:
        return bool(self.by_site)

    @property
    def all(self) -> list[SAEEncoder]:
        """All encoders."""
        return [encoder for found in self.by_site.values() for encoder in found]

    def of(self, sae: SAE, site: int) -> SAEEncoder | None:
        """The encoder of an SAE, or of an equal one, that writes a site; None without one."""
        for encoder in self.all:
            if site in encoder.sites_out and (encoder.sae is sae or encoder.sae.fingerprint == sae.fingerprint):
                encoder.sae.refresh()
                return encoder
        return None


NO_ENCODERS = Encoders({}, None)


def _sites_of(
    sae: SAE, model: ModelSpec, readout: Readout | None
) -> tuple[int, Callable[[Tensor], Tensor] | None, tuple[int, ...]] | None:
    """(number of the site that is read, its norm, numbers of the written sites); None if no op can act."""
    written = sae.site_out if sae.transcoder else sae.site
    if sae.site is None or written is None or is_several(sae.site) or sae.pursuit is not None:
        return None
    sites = expand(written, model.num_hidden_layers, model.family)
    if sites[0].kind not in NUMBERED_SITES or sites[0].kind == LOGITS:
        return None
    try:
        site, norm = read_of(sae, sae.site, model, readout)
    except ValueError:  # the norm's input is no site
        return None
    return site, norm, tuple(site_index(out, model.num_hidden_layers) for out in sites)
