"""`Activations`: what was captured of one completion, by site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ..site import Site


class CaptureError(RuntimeError):
    """What a request was to capture is lost."""


class BySite(Mapping[str, torch.Tensor]):
    """A tensor for each site, found by any of its names: those that `Site.parse` takes, and a `Site`.

    Args:
        num_layers: of the model, for layers that are counted from its end.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._tensors: dict[str, torch.Tensor] = {}

    def _name(self, site: str | Site) -> str:
        """What the site is called here."""
        if site in self._tensors:
            return str(site)
        try:
            found = Site.parse(str(site))
        except ValueError:
            return str(site)
        if found.layer is not None and found.layer < 0:
            found = replace(found, layer=found.layer + self._num_layers)
        return str(found)

    def __getitem__(self, site: str | Site) -> torch.Tensor:
        name = self._name(site)
        if name not in self._tensors:
            raise KeyError(f"{str(site)!r} was not captured; there is {', '.join(self._tensors) or 'nothing'}")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({ {site: list(rows.shape) for site, rows in self._tensors.items()} })"


class Activations(BySite):
    """What was captured of one completion, by site: [positions, width], of `q`, `k`, `v` and `z` [positions, heads, head_dim]; on
    the CPU.

    A reduction leaves [1, width] (`mean`, `last`), or [positions, directions] (`Project`; with `top_k` the largest of them, whose
    places are in `indexes`). Sites that were captured alike share memory: keeping or saving one keeps or saves them all, a
    `clone()` does not. Nothing of other results lies there.

    Attributes:
        positions: by site, [positions] int64: of the input tokens that the rows belong to, in ascending order.
        token_ids: by site, [positions] int64: those tokens.
        indexes: by site, [positions, top_k] int64, for `Project(top_k=...)`.
        error: why the states were lost; reading any of them raises it. None where they were not.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.positions, self.token_ids, self.indexes = (BySite(num_layers) for _ in range(3))
        self.error: CaptureError | None = None

    def add(
        self,
        site: str,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        indexes: torch.Tensor | None = None,
    ) -> None:
        """Put a site's rows in, under its canonical name."""
        self._tensors[site] = rows
        self.positions._tensors[site], self.token_ids._tensors[site] = positions, token_ids
        if indexes is not None:
            self.indexes._tensors[site] = indexes

    def __getitem__(self, site: str | Site) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if not self:
            raise KeyError(
                f"{str(site)!r}: nothing was captured; a request says what it wants by capture=['resid_post.3']"
            )
        return super().__getitem__(site)


NOTHING = Activations(num_layers=0)
"""Of requests that asked for nothing."""
