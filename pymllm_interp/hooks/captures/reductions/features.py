"""`Features`: a capture's reduction to the active features of a sparse autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core.model_spec import ModelSpec
from ....utils.arguments import is_whole
from ...registry import reduction
from ...saes.registry import check_fits
from ...saes.sae import SAE
from ...site import Site, expand, is_several
from .reduction import Readout, Reduced, Reduction, as_words, floats


@reduction
@dataclass(frozen=True, eq=False)
class Features(Reduction):
    """The largest active features of each row, in place of the row. Active features have a value above 0 in ``sae.encode(row)``.

        Capture(sae.site, reduce=Features(sae, top_k=64))

    The site's rows are the values [positions, top_k], in descending order. `Activations.indexes` has the features' numbers.
    `Activations.counts` [positions] says how many features are active. Where fewer than `top_k` are, the values end with 0 and the
    numbers with -1. Where more are, the rest is left out, and counted in the receipt (`Captured.cut`). Of an SAE with negative
    features (`abstopk`), the largest magnitudes are taken, and values keep their sign.

    A crosscoder reads the states of all its sites at once: ``Capture("resid_post.{3,7}", ...)``. Each of the sites has the result.

    Raises:
        ValueError: no SAE and no name of one, or top_k is not from 1 to the number of its features.
    """

    sae: SAE | str
    """An SAE, or its name in `lm.saes`."""
    top_k: int = 64

    def __post_init__(self) -> None:
        sae: Any = self.sae
        if not isinstance(sae, SAE | str):
            raise ValueError(
                f"Features: sae is a {type(sae).__name__}; expected an SAE (SAE.load reads one), or a name in lm.saes"
            )
        most = sae.d_sae if isinstance(sae, SAE) else None
        holds = is_whole(self.top_k) and 1 <= self.top_k <= (most or self.top_k)
        self._check("top_k", holds, "from 1 on" if most is None else f"from 1 to {most}, the SAE's features")

    @property
    def joined(self) -> bool:
        """Whether the SAE is a crosscoder."""
        return isinstance(self.sae, SAE) and self.sae.site is not None and is_several(self.sae.site)

    @property
    def norm_gain(self) -> bool:
        """Whether the SAE reads the norm's output after the gain."""
        return self._sae.norm_gain

    @property
    def _sae(self) -> SAE:
        assert isinstance(self.sae, SAE), "a name is resolved when a request is submitted"
        return self.sae

    def check(self, site: Site, model: ModelSpec) -> None:
        if isinstance(self.sae, str):
            raise ValueError(f"{self.sae!r} is a name, and only an LM's `saes` know whose")
        sae = self.sae if self.sae.site else self.sae.at(site)
        if not self.joined and sae.site != str(site):
            raise ValueError(
                f"the SAE reads {sae.site}, and this is {site}: Capture(sae.site, ...), or sae.at({str(site)!r})"
            )
        check_fits(sae, model, "the SAE")

    def check_joined(self, sites: Sequence[Site], model: ModelSpec) -> None:
        if self.joined and list(sites) != expand(str(self._sae.site), model.num_hidden_layers, model.family):
            raise ValueError(f"the crosscoder reads {self._sae.site} together: Capture(sae.site, ...)")

    def sent_width(self, width: int) -> int:
        return 2 * self.top_k + 1

    def row_elements(self, width: int) -> int:
        return 4 * self._sae.d_sae  # `SAE.encode` holds some tensors of them at once

    def sent(self, rows: Tensor, readout: Readout) -> Tensor:
        features = self._sae.to(rows.device).encode(rows)
        signed = self._sae.architecture == "abstopk"
        values, indexes = (features.abs() if signed else features).topk(self.top_k, dim=-1)
        active = (features != 0 if signed else features > 0).sum(-1, keepdim=True)
        indexes = indexes.where(values > 0, -1)
        return as_words(
            features.gather(-1, indexes.clamp(min=0)).where(values > 0, 0) if signed else values, indexes, active
        )

    def results(self, values: Tensor, dtype: torch.dtype | None, states: bool) -> Reduced:
        counts = values[:, -1].long()
        others = {"indexes": values[:, self.top_k : -1].long(), "counts": counts}
        cut = int((counts - self.top_k).clamp(min=0).sum())
        return Reduced(floats(values[:, : self.top_k]).to(dtype or torch.float32), others, cut)

    def row_bytes(self, dtype: torch.dtype | None) -> int:
        return self.top_k * ((dtype or torch.float32).itemsize + 8) + 8
