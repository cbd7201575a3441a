"""Products of active features' decoder rows with gradients, position by position.

A gradient row meets the features of its own position only. Positions with about equally many features are one batched product::

    [positions, features of each, hidden] @ [positions, hidden, batch]

So no copy of the gradient for each feature is made: that would be the largest tensor of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ELEMENTS = 1 << 27
"""Elements of gathered decoder rows at once."""


class PositionBuckets:
    """Active features of one SAE, by the number of those that share their position.

    Args:
        positions: [n] int64, ascending.
    """

    def __init__(self, positions: Tensor) -> None:
        at, counts = torch.unique_consecutive(positions, return_counts=True)
        firsts = counts.cumsum(0) - counts
        self._buckets: list[tuple[Tensor, Tensor, Tensor]] = []  # positions [m], first feature [m], number [m]
        widths = torch.ceil(torch.log2(counts.double())).to(torch.int64)
        for width in widths.unique().tolist():
            own = widths == width
            self._buckets.append((at[own], firsts[own], counts[own]))

    def add_products(self, grad: Tensor, found: Any, decoder: Callable[[Tensor], Tensor], out: Tensor) -> None:
        """Add ``value * decoder row . gradient`` of each feature to its column of `out` [batch, n or more].

        Args:
            grad: [batch, rows, hidden]; features beyond the rows stay as they are.
            found: the `ActiveFeatures`.
            decoder: rows [n, hidden] of features [n].
        """
        for at, firsts, counts in self._buckets:
            inside = at < grad.shape[1]
            at, firsts, counts = at[inside], firsts[inside], counts[inside]
            if not len(at):
                continue
            width = int(counts.max())
            step = max(1, ELEMENTS // (width * grad.shape[2]))
            for part in range(0, len(at), step):
                self._add(
                    grad,
                    found,
                    decoder,
                    out,
                    at[part : part + step],
                    firsts[part : part + step],
                    counts[part : part + step],
                    width,
                )

    @staticmethod
    def _add(
        grad: Tensor, found: Any, decoder: Callable[[Tensor], Tensor], out: Tensor, at: Tensor, firsts: Tensor, counts: Tensor,
        width: int,
    ) -> None:  # fmt: skip
        offsets = torch.arange(width, device=at.device)
        real = offsets < counts[:, None]
        columns = torch.where(real, firsts[:, None] + offsets, firsts[:, None])
        rows = decoder(found.features[columns.flatten()]).to(grad.dtype).unflatten(0, columns.shape)
        products = torch.einsum("pwh,bph->bpw", rows, grad[:, at]).float() * found.values[columns]
        columns = columns[real]
        out[:, columns] += products[:, real]
