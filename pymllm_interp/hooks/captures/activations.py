"""`Activations`: the captured states of one completion, by site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ..site import Site


class CaptureError(RuntimeError):
    """The captured states of a request are lost."""


class BySite(Mapping[str, torch.Tensor]):
    """A tensor for each site. A key is any name that `Site.parse` takes, or a `Site`.

    Args:
        num_layers: of the model, to resolve negative layers.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._tensors: dict[str, torch.Tensor] = {}

    def _name(self, site: str | Site) -> str:
        """The canonical name of a site."""
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
    """Captured states of one completion, by site, on the CPU.

    A tensor has shape [positions, width]; `q`, `k`, `v` and `z` have [positions, heads, head_dim]. With `reduce="mean"` and
    `reduce="last"` it has [1, width], with `Project` [positions, directions] or [positions, top_k].

    Sites that were captured alike share memory: keeping or saving the tensor of one keeps or saves all. A `clone()` does not.
    This memory holds no states of other requests.

    Attributes:
        positions: by site, [positions] int64: positions of the rows among the input tokens, in ascending order.
        token_ids: by site, [positions] int64: the tokens at these positions.
        indexes: by site, [positions, top_k] int64: the directions that `Project(top_k=...)` kept.
        error: why the states are lost; reading any of them raises it. None where they are not.
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
        """Add a site under its canonical name."""
        self._tensors[site] = rows
        self.positions._tensors[site], self.token_ids._tensors[site] = positions, token_ids
        if indexes is not None:
            self.indexes._tensors[site] = indexes

    def __getitem__(self, site: str | Site) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if not self:
            raise KeyError(f"{str(site)!r}: nothing was captured; pass capture=['resid_post.3'] with the request")
        return super().__getitem__(site)


NOTHING = Activations(num_layers=0)
"""The activations of requests without captures."""
