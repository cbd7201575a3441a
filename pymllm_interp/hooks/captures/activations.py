"""`Activations`: the captured states of one completion, by site."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

from ..site import Site
from .by_site import BySite, SitePiece, SiteTensors

FORMAT = "pymllm-interp activations 1"
OTHERS = ("indexes", "counts", "token_log_probs", "token_ranks")
"""Further tensors of a site, made by reductions: attributes of `Activations`."""
PREFIXES = ("positions", "token_ids", *OTHERS)
"""Prefixes of such tensors in a file: ``positions.resid_post.3``."""


class CaptureError(RuntimeError):
    """The captured states of a request are lost."""


class Activations(BySite):
    """Captured states of one completion, by site, on the CPU.

    A tensor has shape [positions, width]; `q`, `k`, `v` and `z` have [positions, heads, head_dim]. With `reduce="mean"`,
    "max" or "last" it has [1, width], with `Project` [positions, directions] or [positions, top_k]. With `Features` and `Lens` it
    has [positions, top_k].

    Each tensor is contiguous, in separate memory without states of other requests. Equal captures of several sites share one
    tensor until the first read of a site copies its rows.

        activations.stack("resid_post")           # [layers, positions, hidden]; activations.layers("resid_post")
        activations.indexes.stack("resid_post")   # [layers, positions, top_k]; so have all attributes that are by site
        activations.save("out.safetensors")       # Activations.load reads it

    Attributes:
        positions: site -> [positions] int64: positions of the rows among the input tokens, in ascending order.
        token_ids: site -> [positions] int64: the tokens at these positions.
        indexes: site -> [positions, top_k] int64: the directions that `Project(top_k=...)` kept, the features of
            `Features`, the tokens of `Lens`.
        counts: site -> [positions] int64: the number of active features (`Features`).
        token_log_probs: site -> [positions, tokens]: log probabilities of the tokens that `Lens(tokens=...)` looks up.
        token_ranks: site -> [positions, tokens] int64: the number of tokens that are more likely.
        error: reason that the states are lost, or None. Reading any of them raises it.
    """

    def __init__(
        self,
        num_layers: int,
        pieces: Sequence[SitePiece] = (),
        order: tuple[str, ...] = (),
        error: CaptureError | None = None,
    ) -> None:
        positions = BySite(num_layers)
        super().__init__(num_layers, positions)
        self.positions, self.token_ids = positions, BySite(num_layers, positions)
        self.error = error
        self._own = own = SiteTensors(pieces, order)
        self._undivided = self.positions._undivided = self.token_ids._undivided = own
        self._found, self.positions._found, self.token_ids._found = own.rows, own.positions, own.token_ids

    def as_pieces(self) -> tuple[int, Sequence[SitePiece], tuple[str, ...], CaptureError | None]:
        """The constructor's arguments. Nothing is copied."""
        own = self._own
        pieces, order = own.pieces, own.order  # another thread may divide them meanwhile
        if not pieces:
            order = tuple(self._tensors)
            pieces = [
                SitePiece((site,), rows, own.positions[site], own.token_ids[site], self.others(site))
                for site, rows in self._tensors.items()
            ]
        return self._num_layers, pieces, order, self.error

    def _further(self, name: str) -> BySite:
        found = BySite(self._num_layers, self.positions)
        found._undivided, found._found = self._own, self._own.others.setdefault(name, {})
        return found

    # Most requests have none of these.

    @cached_property
    def indexes(self) -> BySite:
        return self._further("indexes")

    @cached_property
    def counts(self) -> BySite:
        return self._further("counts")

    @cached_property
    def token_log_probs(self) -> BySite:
        return self._further("token_log_probs")

    @cached_property
    def token_ranks(self) -> BySite:
        return self._further("token_ranks")

    def add(
        self,
        site: str,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        others: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Add a site under its canonical name.

        Args:
            others: tensors by name, of `OTHERS`.
        """
        self._tensors[site] = rows
        self.positions._tensors[site], self.token_ids._tensors[site] = positions, token_ids
        for name, tensor in (others or {}).items():
            self._own.others.setdefault(name, {})[site] = tensor

    def others(self, site: str) -> dict[str, torch.Tensor]:
        """The further tensors of a site, by attribute."""
        return {name: found[site] for name in OTHERS if self and site in (found := self._own.others.get(name, {}))}

    def __getitem__(self, site: str | Site | tuple) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if not self:
            raise KeyError(f"{str(site)!r}: nothing was captured; pass capture=['resid_post.3'] with the request")
        rows, name = super().__getitem__(site), self._name(site)
        if not _is_own(rows):
            rows = self._tensors[name] = rows.clone(memory_format=torch.contiguous_format)
        return rows

    def as_arrived(self, site: str | Site) -> torch.Tensor:
        """The rows of a site without a copy: they may share memory with other sites, and need not be contiguous."""
        return super().__getitem__(site)

    @property
    def hidden_states(self) -> tuple[torch.Tensor, ...] | None:
        """transformers' tuple of the layers' inputs, and the final norm's output: [1, positions, hidden] each.

        None unless all of them were captured (``output_hidden_states=True``).
        """
        sites = [f"resid_pre.{layer}" for layer in range(self._num_layers)]
        return None if "final_norm" not in self else self._all([*sites, "final_norm"], lambda rows: rows[None])

    @property
    def attentions(self) -> tuple[torch.Tensor, ...] | None:
        """transformers' tuple of each layer's attention weights: [1, heads, positions, keys] each.

        None unless all of them were captured (``output_attentions=True``).
        """
        sites = [f"pattern.{layer}" for layer in range(self._num_layers)]
        return self._all(sites, lambda rows: rows.transpose(0, 1)[None])

    @property
    def routed_experts(self) -> torch.Tensor | None:
        """vLLM's ids of the experts of each position, [positions, layers with experts, chosen] int32.

        None unless they were captured (``return_routed_experts=True``).
        """
        sites = [site for layer in range(self._num_layers) if (site := f"experts.{layer}") in self]
        return torch.stack([self[site][:, 0].to(torch.int32) for site in sites], 1) if sites else None

    def _all(self, sites: list[str], shaped: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """The rows of all sites, or None."""
        return tuple(shaped(self[site]) for site in sites) if sites and all(site in self for site in sites) else None

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: a tensor for each site, and its `positions`, `token_ids` and so on.

        Raises:
            ValueError: the name says another format, which its readers would expect.
        """
        if Path(path).suffix != ".safetensors":
            raise ValueError(f"{path}: states are saved as .safetensors")
        tensors, metadata = self._content()
        save_file(tensors, path, metadata)

    def to_bytes(self) -> bytes:
        """The content of a file of `save`."""
        return save(*self._content())

    def _content(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Tensors and metadata of a file."""
        tensors = {site: self[site] for site in self}
        for prefix in PREFIXES:
            tensors |= {f"{prefix}.{site}": values.clone() for site, values in getattr(self, prefix).items()}
        return tensors, {"format": FORMAT, "sites": json.dumps(list(self)), "num_layers": str(self._num_layers)}

    @classmethod
    def load(cls, path: str | Path) -> Activations:
        """Read a file of `save`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another file, or a damaged one.
        """
        try:
            with safe_open(path, framework="pt") as file:
                return cls._of(file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}, str(path))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file, or it is damaged ({error})") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Activations:
        """Read the result of `to_bytes`.

        Raises:
            ValueError: other bytes, or damaged ones.
        """
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(f"these bytes are not of a safetensors file, or they are damaged ({error})") from error
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return cls._of(header.get("__metadata__", {}), tensors, "this file")

    @classmethod
    def _of(cls, metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor], what: str) -> Activations:
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{what} was not written by Activations.save: its format is {metadata.get('format')!r}")
        found = cls(int(metadata["num_layers"]))
        for site in json.loads(metadata["sites"]):
            positions, tokens = (tensors[f"{prefix}.{site}"] for prefix in PREFIXES[:2])
            others = {name: tensors[key] for name in OTHERS if (key := f"{name}.{site}") in tensors}
            found.add(site, tensors[site], positions, tokens, others)
        return found

    def __getstate__(self) -> dict[str, Any]:
        if self.error is None:
            for site in self:
                self[site]  # a pickle holds the whole memory of a tensor
        return self.__dict__


def lost(error: CaptureError) -> Activations:
    """The activations of a request with lost states: reading any raises `error`."""
    return Activations(num_layers=0, error=error)


def _is_own(rows: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, and its memory holds nothing else."""
    return rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.nbytes


NOTHING = Activations(num_layers=0)
"""The activations of requests without captures."""
