"""`LayerVectors`: a spec's vectors by layer, until the layers of its sites are known."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core.limits import MAX_NAMED
from ..site import Site
from .files import checked_vector


@dataclass(frozen=True, eq=False, repr=False)
class LayerVectors:
    """Vectors by layer: a tensor [layers, ...] for the layers that a pattern selects, in their order, or {layer: tensor}."""

    vectors: Tensor | dict[int, Tensor]
    made_for: str = ""
    """Fingerprint of the model that they were made with; "" if not recorded."""

    @classmethod
    def of(cls, vectors: Mapping[Any, Any], who: str, dims: Sequence[int]) -> LayerVectors:
        """Check {layer: vector}. Raises ValueError: no layers, a layer that is not an integer, or an error of `checked_vector`."""
        if len(vectors) > MAX_NAMED:
            raise ValueError(f"{who}: vectors of {len(vectors)} layers; at most {MAX_NAMED}")
        wrong = [layer for layer in vectors if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0]
        if wrong or not vectors:
            raise ValueError(
                f"{who}: {type(vectors).__name__} is not a tensor of numbers, nor vectors by layer, {{0: vector, ...}}: its keys "
                f"are {list(vectors)[:5]}"
            )
        checked = {layer: checked_vector(vector, f"{who}[{layer}]", dims) for layer, vector in vectors.items()}
        return cls(checked, getattr(vectors, "model_fingerprint", ""))

    def at(self, sites: Sequence[Site]) -> dict[int, Tensor]:
        """layer -> its vector. Raises ValueError: not one row for each of the sites, or sites without layers."""
        if isinstance(self.vectors, dict):
            return self.vectors
        if len(self.vectors) != len(sites):
            raise ValueError(
                f"vectors of shape {list(self.vectors.shape)} are for {len(self.vectors)} layers; the sites have {len(sites)}"
            )
        return {site.layer or 0: vector for site, vector in zip(sites, self.vectors, strict=True)}

    @property
    def fingerprint(self) -> str:
        """Hash of the vectors."""
        parts = self.vectors.items() if isinstance(self.vectors, dict) else [("rows", self.vectors)]
        hashed = [(name, list(part.shape), hashlib.sha256(part.numpy().tobytes()).hexdigest()) for name, part in parts]
        return hashlib.sha256(repr(hashed).encode()).hexdigest()

    def __repr__(self) -> str:
        layers = list(self.vectors) if isinstance(self.vectors, dict) else len(self.vectors)
        return f"vectors of the layers {layers}" if isinstance(layers, list) else f"vectors of {layers} layers"
