"""Captures: a request's hidden states at declared sites, as they come, and as one tensor a site at its end.

outs = lm.generate(prompts, params, capture=["resid_post.*", Capture("mlp_out.{3,4}", positions=[-1])])
outs[0].activations["resid_post.12"]            # [positions, hidden]
outs[0].activations.positions["resid_post.12"]  # [positions] int64, and .token_ids
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .intervention import Capture, Project, Window, rows_in
from .site import Site


class Activations(Mapping[str, torch.Tensor]):
    """What was captured of one completion, by site: [positions, width], on the CPU.

    A reduction leaves [1, width] (`mean`, `last`), or [positions, directions] (`Project`; with `top_k` the largest of them, whose
    places are in `indexes`).

    Attributes:
        positions: by site, [positions] int64: of the input tokens that the rows belong to, in ascending order.
        token_ids: by site, [positions] int64: those tokens.
        indexes: by site, [positions, top_k] int64, for `Project(top_k=...)`.
    """

    def __init__(self) -> None:
        self._rows: dict[str, torch.Tensor] = {}
        self.positions: dict[str, torch.Tensor] = {}
        self.token_ids: dict[str, torch.Tensor] = {}
        self.indexes: dict[str, torch.Tensor] = {}

    def add(self, site: str, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Put a site's rows in."""
        self._rows[site], self.positions[site], self.token_ids[site] = rows, positions, token_ids

    def __getitem__(self, site: str) -> torch.Tensor:
        if site not in self._rows:
            raise KeyError(f"{site!r} was not captured; there is {', '.join(self._rows) or 'nothing'}")
        return self._rows[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Activations({ {site: list(rows.shape) for site, rows in self._rows.items()} })"


class Tap:
    """A capture at one site of one request: keeps the rows at its positions, each once, however often it is computed."""

    def __init__(self, spec: Capture, site: Site, windows: tuple[Window, ...], width: int) -> None:
        self.spec, self.site, self.windows, self._width = spec, site, windows, width
        self._next = 0
        self._rows: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []

    def take(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Copy what is asked for out of rows [n, width] at positions [n], ascending."""
        wanted = rows_in(self.windows, positions) & (positions >= self._next)
        if wanted.any():
            taken = rows.detach()[wanted]  # a copy
            self._rows.append(taken if self.spec.dtype is None else taken.to(self.spec.dtype))
            self._positions.append(positions[wanted])
            self._next = int(positions[-1]) + 1

    def finish(self, token_ids: list[int], found: Activations) -> None:
        """Write the result, of the positions of `token_ids`: a row that was computed after the request's end is left out."""
        site = str(self.site)
        rows = torch.cat(self._rows or [torch.zeros(0, self._width)])
        positions = torch.cat(self._positions or [torch.zeros(0, dtype=torch.int64)])
        kept = positions < len(token_ids)
        rows, positions = rows[kept], positions[kept]
        tokens = torch.tensor(token_ids, dtype=torch.int64)[positions]
        if len(rows):
            rows, indexes = _reduced(rows, self.spec.reduce)
            if indexes is not None:
                found.indexes[site] = indexes
            if self.spec.reduce == "last":
                positions, tokens = positions[-1:], tokens[-1:]
        found.add(site, rows, positions, tokens)


def _reduced(rows: torch.Tensor, reduce: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows after a capture's reduction, in float32 inside; and the places of the largest projections."""
    if reduce == "mean":
        return rows.float().mean(0, keepdim=True).to(rows.dtype), None
    if reduce == "last":
        return rows[-1:], None
    if isinstance(reduce, Project):
        dots = rows.float() @ reduce.directions.T
        if reduce.top_k is None:
            return dots, None
        best = dots.topk(reduce.top_k, dim=-1)
        return best.values, best.indices
    return rows, None


def num_rows(windows: tuple[Window, ...], longest: int) -> int:
    """Positions of the windows in a request of at most `longest`."""
    return int(rows_in(windows, torch.arange(longest)).sum())
