"""Declared ops on the residual stream, inside of a forward pass.

A pass has *places*: the points where something is added to the stream and a norm reads the sum. Place 0 is the embedding,
place ``2 * i + 1`` follows layer i's attention, place ``2 * i + 2`` its MLP. Each has two *sites*, what is added and the sum::

    site 2 * place          attn_out.i, mlp_out.i
    site 2 * place + 1      embed (resid_pre.0), resid_mid.i, resid_post.i (resid_pre.i+1)
    site 4 * layers + 2     final_norm: what the head reads

`Edits` is what a pass asks of them: table_edits.py reads the ops from device tables, host_edits.py has them as functions. Both act
in the same order: on what is added, on the sum, then the norm.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


def added_site(place: int) -> int:
    """Of what is added at a place."""
    return 2 * place


def stream_site(place: int) -> int:
    """Of the sum at a place."""
    return 2 * place + 1


def final_norm_site(num_layers: int) -> int:
    """Of what the head reads."""
    return 4 * num_layers + 2


def num_sites(num_layers: int) -> int:
    """Of a model with so many layers."""
    return 4 * num_layers + 3


class Edits(Protocol):
    """What a forward pass asks of the declared ops of its requests."""

    final_site: int
    """The final norm's."""

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        """`value` [1, tokens, width] after the ops at `site`; itself where there are none, else fresh memory."""
        ...

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm.add_rms_norm` with the ops of the place's two sites; at the last place with those of the final norm too."""
        ...


class Edited(nn.Module):
    """A module whose output is a site, and whose `.inputs` are those of transformers' module: it gets its ops beside them.

    Attributes:
        edits: for the next call, and no other: a trace may call the module again for its own ends.
    """

    edits: Edits | None = None

    def take_edits(self) -> Edits | None:
        """The ops for this call."""
        edits = self.edits
        if edits is not None:
            self.edits = None
        return edits


def edited(value: torch.Tensor, edits: Edits | None, site: int) -> torch.Tensor:
    """`value` after the ops at `site`, where there may be any."""
    return value if edits is None else edits.at(site, value)


def total(h: torch.Tensor, delta: torch.Tensor | None, edits: Edits | None, place: int) -> torch.Tensor:
    """The hidden state that a fused layer left in two parts, with the ops of the place where they are added.

    Without a delta it is whole, and has passed its place.
    """
    if delta is None:
        return h
    return edited(h + edited(delta, edits, added_site(place)), edits, stream_site(place))
