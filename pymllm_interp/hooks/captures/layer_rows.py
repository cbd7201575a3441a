"""`LayerCaptures`: captured values of a layer that are not rows of a record: attention patterns, recurrent states, K and V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch

from ..site import Site
from .activations import Activations
from .by_site import SitePiece


class LayerRows:
    """The wanted positions of a layer, and their values.

    Args:
        wanted: [longest] bool, by position.
        shape: shape of a position's value, at most.
        missing: positions that the prompt does not have.
        stream: `Capture.stream`.

    Attributes:
        rows: position -> its value, on the CPU.
    """

    def __init__(
        self, wanted: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype, missing: int, stream: bool
    ) -> None:
        self.wanted, self.shape, self.dtype, self.missing, self.stream = wanted, shape, dtype, missing, stream
        self.size = prod(shape)
        self.rows: dict[int, torch.Tensor] = {}

    def is_like(self, other: LayerRows) -> bool:
        """Whether the same is wanted."""
        own, others = ((one.dtype, one.missing, one.stream) for one in (self, other))
        return own == others and np.array_equal(self.wanted, other.wanted)

    def before(self, stop: int) -> list[int]:
        """Positions before `stop` that came, ascending."""
        return sorted(position for position in self.rows if position < stop)

    def result(self, at: Sequence[int], num_positions: int) -> torch.Tensor:
        """[positions, *shape], the values at these of the first `num_positions` positions."""
        return torch.stack([self.rows[p] for p in at]) if at else torch.zeros(0, *self.shape, dtype=self.dtype)


Rows = TypeVar("Rows", bound=LayerRows)


class LayerCaptures(Generic[Rows]):
    """The values of one kind that one request captures.

    Attributes:
        layers: layer number -> values.
    """

    def __init__(self, kind: str, num_layers: int, prompt_len: int) -> None:
        self.kind, self.num_layers, self.prompt_len = kind, num_layers, prompt_len
        self.layers: dict[int, Rows] = {}

    def want(self, layer: int, rows: Rows) -> None:
        """Capture a layer, or nothing more if it is captured in the same way. Raises ValueError: it is captured in another."""
        known = self.layers.setdefault(layer, rows)
        if not known.is_like(rows):
            raise ValueError(
                f"{self.kind}.{layer} is captured twice, with different positions, dtype or stream: name it once, with all "
                "positions that you want"
            )

    @property
    def order(self) -> list[str]:
        """Names of the sites, by layer."""
        return [str(site) for site, _ in self._by_site()]

    @property
    def pooled_sites(self) -> list[str]:
        """No site: each position has a row."""
        return []

    lens_sites = pooled_sites

    @property
    def streamed_bytes(self) -> int:
        """Upper bound of the bytes of a position's rows in a stream."""
        return sum(own.size * own.dtype.itemsize for own in self.layers.values() if own.stream)

    @property
    def num_bytes(self) -> int:
        """Upper bound of the results' bytes."""
        return sum(int(own.wanted.sum()) * own.size * own.dtype.itemsize for own in self.layers.values())

    @property
    def wanted(self) -> np.ndarray:
        """[longest] bool, by position: whether it is captured at some layer."""
        return np.logical_or.reduce([own.wanted for own in self.layers.values()])

    def counts(self, num_positions: int) -> list[tuple[str, int, int, int, int]]:
        """(site, rows of the prompt, rows of generated tokens, missing positions, 0) of the first `num_positions` positions."""
        prompt = min(self.prompt_len, num_positions)
        return [
            (
                str(site),
                int(own.wanted[:prompt].sum()),
                int(own.wanted[self.prompt_len : num_positions].sum()),
                own.missing,
                0,
            )
            for site, own in self._by_site()
        ]

    def shortfalls(self, num_positions: int) -> Iterator[tuple[Site, int, int]]:
        """(site, delivered rows, expected rows) of each layer with too few rows of the first `num_positions` positions."""
        for site, own in self._by_site():
            delivered, expected = len(own.before(num_positions)), int(own.wanted[:num_positions].sum())
            if delivered < expected:
                yield site, delivered, expected

    def add_to(self, found: Activations, token_ids: Sequence[int]) -> None:
        """Add the values of a request's positions to its activations."""
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        for site, own in self._by_site():
            positions = torch.tensor(at := own.before(len(tokens)), dtype=torch.int64)
            found.add(str(site), own.result(at, len(tokens)), positions, tokens[positions])

    def rows_since(self, start: int, stop: int, token_ids: Sequence[int]) -> list[SitePiece]:
        """Rows of the layers that stream; see `CapturedRows.rows_since`."""
        tokens, pieces = torch.tensor(token_ids, dtype=torch.int64), list[SitePiece]()
        for site, own in self._by_site():
            at = np.flatnonzero(own.wanted[start:stop]) + start if own.stream else ()
            if found := [position for position in map(int, at) if position in own.rows]:
                positions = torch.tensor(found, dtype=torch.int64)
                rows = own.result(found, found[-1] + 1)
                pieces.append(SitePiece((str(site),), rows, positions, tokens[positions - start], {}))
        return pieces

    def _by_site(self) -> Iterator[tuple[Site, Rows]]:
        return ((Site(self.kind, layer), own) for layer, own in sorted(self.layers.items()))
