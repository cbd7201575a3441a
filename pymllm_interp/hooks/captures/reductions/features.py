"""`Features`: a capture's reduction to the active features of a sparse autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core.model_spec import ModelSpec
from ....utils.arguments import is_whole
from ...registry import reduction
from ...saes.registry import check_fits
from ...saes.sae import SAE
from ...site import Site
from .reduction import Readout, Reduced, Reduction, as_words, floats


@reduction
@dataclass(frozen=True, eq=False)
class Features(Reduction):
    """The largest active features of each row, in place of the row. Active features have a value above 0 in ``sae.encode(row)``.

        Capture(sae.site, reduce=Features(sae, top_k=64))

    The site's rows are the values [positions, top_k], in descending order. `Activations.indexes` has the features' numbers.
    `Activations.counts` [positions] says how many features are active. Where fewer than `top_k` are, the values end with 0 and the
    numbers with -1. Where more are, the rest is left out, and counted in the receipt (`Captured.cut`).

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
        if self.sae.site is not None and self.sae.site != str(site):
            raise ValueError(
                f"the SAE reads {self.sae.site}, and this is {site}: Capture(sae.site, ...), or sae.at({str(site)!r})"
            )
        check_fits(self.sae if self.sae.site else self.sae.at(site), model, "the SAE")

    def sent_width(self, width: int) -> int:
        return 2 * self.top_k + 1

    def row_elements(self, width: int) -> int:
        return 4 * self._sae.d_sae  # `SAE.encode` holds some tensors of them at once

    def sent(self, rows: Tensor, readout: Readout) -> Tensor:
        features = self._sae.to(rows.device).encode(rows)
        values, indexes = features.topk(self.top_k, dim=-1)
        return as_words(values, indexes.where(values > 0, -1), (features > 0).sum(-1, keepdim=True))

    def results(self, values: Tensor, dtype: torch.dtype | None, states: bool) -> Reduced:
        counts = values[:, -1].long()
        others = {"indexes": values[:, self.top_k : -1].long(), "counts": counts}
        cut = int((counts - self.top_k).clamp(min=0).sum())
        return Reduced(floats(values[:, : self.top_k]).to(dtype or torch.float32), others, cut)

    def row_bytes(self, dtype: torch.dtype | None) -> int:
        return self.top_k * ((dtype or torch.float32).itemsize + 8) + 8
