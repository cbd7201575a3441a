"""`Reading`: what the device makes of captured states before they leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..site import Site
from .reduction import Readout, Reduction
from .spec import Capture


class Reading:
    """What is made of captured states before they leave the device: the norm of `attn_in` and `mlp_in`, and a reduction.

    Args:
        normed: the sites are outputs of norms, and the states those of the stream.
        reduction: that runs on the device; None for none.
        readout: of the model.
        width: of a state.
        dtype: of the values that are sent, without a reduction.

    Attributes:
        width: values sent for a state.
        dtype: of these values.
        reduces: there is a reduction.
        key: equal for readings that one call can serve.
    """

    MAX_ELEMENTS = 1 << 25
    """Values that one call holds at once (`Reduction.row_elements`)."""

    def __init__(
        self,
        normed: bool,
        reduction: Reduction | None,
        readout: Readout,
        width: int,
        dtype: torch.dtype,
        gain: bool = True,
    ) -> None:
        self._normed, self._reduction, self._readout, self._gain = normed, reduction, readout, gain
        self.width = width if reduction is None else reduction.sent_width(width)
        self.dtype = dtype if reduction is None else reduction.sent_dtype
        self._rows = max(1, self.MAX_ELEMENTS // (width if reduction is None else reduction.row_elements(width)))
        self.reduces = reduction is not None
        self.key = normed, gain, self.dtype, None if reduction is None else reduction.fingerprint

    @torch.no_grad()
    def __call__(self, parts: Sequence[tuple[Site, Tensor]]) -> list[Tensor]:
        """The values [n, width] of each part: a site, and states [n, width of a state]."""
        by_site: dict[Site, list[int]] = {}
        for i, (site, _) in enumerate(parts):
            by_site.setdefault(site, []).append(i)
        order = [i for found in by_site.values() for i in found]
        rows = [self._of_site(site, torch.cat([parts[i][1] for i in found])) for site, found in by_site.items()]
        together = torch.cat(rows) if len(rows) > 1 else rows[0]
        if self._reduction is not None:
            sent = [self._reduction.sent(some, self._readout) for some in together.split(self._rows)]
            together = torch.cat(sent) if len(sent) > 1 else sent[0]
        pieces: Any = dict(zip(order, together.to(self.dtype).split([len(parts[i][1]) for i in order]), strict=True))
        return [pieces[i] for i in range(len(parts))]

    def _of_site(self, site: Site, rows: Tensor) -> Tensor:
        if self._normed:
            rows = self._readout.norm(site, rows, self._gain)
        return rows if self._reduction is None else self._reduction.read(site, rows, self._readout)


Pending = tuple[Reading, Site, Tensor, Tensor]
"""States [n, width] of a site that wait for a reading, and where its values [n, width] go."""


def read_all(pending: Sequence[Pending]) -> None:
    """Write the values of states of many requests: one call for each key."""
    by_key: dict[Any, list[Pending]] = {}
    for entry in pending:
        by_key.setdefault(entry[0].key, []).append(entry)
    for entries in by_key.values():
        values = entries[0][0]([(site, states) for _, site, states, _ in entries])
        torch._foreach_copy_([target for *_, target in entries], values)


def reading_of(spec: Capture, normed: bool, width: int, dtype: torch.dtype, readout: Readout | None) -> Reading | None:
    """What the device makes of the states of a capture; None for nothing."""
    reduction = spec.reduce if isinstance(spec.reduce, Reduction) else None
    on_device = reduction if reduction is not None and reduction.on_device else None
    if not normed and on_device is None:
        return None
    assert readout is not None, "captures of this kind need the model"
    sent = dtype
    if isinstance(spec.dtype, torch.dtype) and spec.reduce in (None, "last") and spec.dtype.itemsize < dtype.itemsize:
        sent = spec.dtype
    return Reading(normed, on_device, readout, width, sent, reduction is None or reduction.norm_gain)
