"""Declared ops and captures, inside of a forward pass.

A pass has *places*: the points where something is added to the stream and a norm reads the sum. Place 0 is the embedding,
place ``2 * i + 1`` follows layer i's attention, place ``2 * i + 2`` its MLP. Each has two *sites*, what is added and the sum::

    site 2 * place          attn_out.i, mlp_out.i
    site 2 * place + 1      embed (resid_pre.0), resid_mid.i, resid_post.i (resid_pre.i+1)
    site 4 * layers + 2     final_norm: what the head reads

Behind them come the *inner* sites, of which each layer has q, k, v, z and mlp_act, and last the logits. They are no part of the
stream, and take kernels of their own; `SiteOps.inner` says at which kinds there may be something in a pass.

`SiteOps` is what a pass asks of them: codes.py reads them from device tables, host_ops.py has them as functions. Both act
in the same order: on what is added, on the sum, then the norm. At each site the ops come first, and a capture takes what the
model goes on with. Where nothing stands in between they are one call (`edited`); a module whose output a trace may change has the
ops inside (`apply_at`), and the pass takes the state behind it (`capture_at`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ...config import INNER_SITES

if TYPE_CHECKING:
    from ...core.forward_batch import ForwardBatch


def delta_site(place: int) -> int:
    """Of what is added at a place."""
    return 2 * place


def residual_site(place: int) -> int:
    """Of the sum at a place."""
    return 2 * place + 1


def final_norm_site(num_layers: int) -> int:
    """Of what the head reads."""
    return 4 * num_layers + 2


INNER = INNER_SITES
"""Kinds of inner sites that each layer has."""
LOGITS = "logits"


def inner_site(num_layers: int, layer: int, kind: str) -> int:
    """Of an inner kind in a layer, or of the logits."""
    first = final_norm_site(num_layers) + 1
    return first + len(INNER) * num_layers if kind == LOGITS else first + len(INNER) * layer + INNER.index(kind)


def num_sites(num_layers: int) -> int:
    """Of a model with so many layers, without the logits, which are no part of a captured pass."""
    return inner_site(num_layers, 0, LOGITS)


class SiteOps(Protocol):
    """What a forward pass asks of what its requests declared."""

    num_layers: int
    final_site: int
    """The final norm's."""
    inner: frozenset[str]
    """Kinds of inner sites at which there may be ops or captures."""

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        """`value` [1, tokens, width] after the ops at `site`; itself where there are none, else fresh memory."""
        ...

    def capture(self, site: int, value: torch.Tensor) -> None:
        """Capture `value` [1, tokens, width], what the model goes on with, for the requests that want it at `site`."""
        ...

    def add_rms_norm(
        self, place: int, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm.add_rms_norm` with the ops and captures of the place's two sites, at the last place of the final norm too."""
        ...


class SiteModule(nn.Module):
    """A module whose output is a site, and whose `.inputs` are those of transformers' module: it gets the batch beside them.

    Attributes:
        batch: of the next call, and no other: a trace may call the module again for its own ends.
    """

    batch: ForwardBatch | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "batch":  # a dozen times a layer: a module's own looks at it as a parameter and as a module first
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def take_batch(self) -> ForwardBatch | None:
        """The batch of this call; None where it is a trace's own, which leaves it to the pass's."""
        batch = self.batch
        if batch is None or (batch.hook_query is not None and batch.hook_query.is_own_call()):
            return None
        self.batch = None
        return batch

    def take_edits(self) -> SiteOps | None:
        """The ops for this call."""
        batch = self.take_batch()
        return None if batch is None else batch.site_ops


def apply_at(value: torch.Tensor, edits: SiteOps | None, site: int) -> torch.Tensor:
    """`value` after the ops at `site`, where there may be any."""
    return value if edits is None else edits.at(site, value)


def apply_inner(value: torch.Tensor, edits: SiteOps | None, layer: int, kind: str) -> torch.Tensor:
    """`apply_at` an inner site; value [1, tokens, width]."""
    if edits is None or kind not in edits.inner:
        return value
    return edits.at(inner_site(edits.num_layers, layer, kind), value)


def capture_inner(value: torch.Tensor, edits: SiteOps | None, layer: int, kind: str) -> None:
    """`capture_at` an inner site."""
    if edits is not None and kind in edits.inner:
        edits.capture(inner_site(edits.num_layers, layer, kind), value)


def capture_at(value: torch.Tensor, edits: SiteOps | None, site: int) -> None:
    """Capture `value` at `site`, where anybody may want it."""
    if edits is not None:
        edits.capture(site, value)


def edited(value: torch.Tensor, edits: SiteOps | None, site: int) -> torch.Tensor:
    """`value` after the ops at `site`, captured: for passes in which nothing stands between the two."""
    value = apply_at(value, edits, site)
    capture_at(value, edits, site)
    return value


def total(
    h: torch.Tensor, delta: torch.Tensor | None, edits: SiteOps | None, place: int, served: bool = False
) -> torch.Tensor:
    """The hidden state that a fused layer left in two parts, `edited` at the place where they are added.

    Without a delta it is whole, and has passed its place.

    Args:
        served: a trace sees the sum next, and the capture comes behind it.
    """
    if delta is None:
        return h
    at_sum = apply_at if served else edited
    return at_sum(h + edited(delta, edits, delta_site(place)), edits, residual_site(place))
