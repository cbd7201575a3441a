"""`Reduction`: what a capture returns of a state, in place of the state. A new one is a subclass.

    Project     dot products with directions        (spec.py)
    Features    features of a sparse autoencoder    (features.py)
    Lens        log probabilities of next tokens    (lens.py)

A reduction has two halves: `sent` runs on the device, beside the model, on the rows of many requests at once; `results` runs on the
host, on all rows of one request. Reductions whose rows depend on each other ("mean", "last") are not of this class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.model_spec import ModelSpec
from ..site import Site
from ..spec import Spec


class Readout(Protocol):
    """Parts of the model as functions of rows, which no op or trace acts on."""

    def norm(self, site: Site, rows: Tensor, gain: bool = True) -> Tensor:
        """What a norm makes of the stream's rows [n, hidden].

        Args:
            site: `attn_in`, `mlp_in` or `final_norm`: the norm's output.
            gain: False: without the norm's gain and bias.
        """
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [n, vocab] of rows [n, hidden] of `final_norm`, after the soft-cap."""
        ...


@dataclass
class Reduced:
    """The result of a reduction at one site.

    Attributes:
        rows: [positions, ...], what the site's name gives.
        others: further tensors [positions, ...], by the attribute of `Activations`.
        cut: values that a limit of the reduction left out.
    """

    rows: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
    cut: int = 0


class Reduction(Spec):
    """A reduction of each captured row."""

    on_device = True
    """Whether `sent` runs on the device. False: the states are sent, or their dot products with `probes`."""
    norm_gain = True
    """At `attn_in` and `mlp_in`: whether it reads the norm's output. False: the normed state before the gain multiplies it."""

    @property
    def probes(self) -> Tensor | None:
        """[n, width] float32: directions whose dot products kernels of the pass store in place of a state; None for none."""
        return None

    def check(self, site: Site, model: ModelSpec) -> None:
        """Raise ValueError where a model's site cannot be reduced."""

    def sent_width(self, width: int) -> int:
        """Values of `sent` for a state."""
        raise NotImplementedError

    @property
    def sent_dtype(self) -> torch.dtype:
        """Of the values of `sent`."""
        return torch.int32

    def row_elements(self, width: int) -> int:
        """Values that `sent` holds at once for a row: the rows of one call are limited by it."""
        return width

    def read(self, site: Site, rows: Tensor, readout: Readout) -> Tensor:
        """What `sent` reads of the rows [n, width] of one site."""
        return rows

    def sent(self, rows: Tensor, readout: Readout) -> Tensor:
        """The values [n, sent_width] that leave the device for rows of `read`, of one or several sites."""
        raise NotImplementedError

    def results(self, values: Tensor, dtype: torch.dtype | None, states: bool) -> Reduced:
        """The result of all values [positions, sent_width] of one site and request.

        Args:
            dtype: of `Capture`; None: float32.
            states: the values are whole states, which nothing on the device reduced.
        """
        raise NotImplementedError

    def row_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of a row of the result, for a harvest's size."""
        raise NotImplementedError


def as_words(*values: Tensor) -> Tensor:
    """Values [n, ...] side by side as int32: floats keep their bits as float32, whole numbers their value."""
    words = [v.float().view(torch.int32) if v.is_floating_point() else v.to(torch.int32) for v in values]
    return torch.cat(words, -1)


def floats(words: Tensor) -> Tensor:
    """The floats of `as_words`."""
    return words.contiguous().view(torch.float32)


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


def read_all(pending: Sequence[tuple[Reading, Site, Tensor, Tensor]]) -> None:
    """Write the values of states of many requests: one call for each key."""
    by_key: dict[Any, list[tuple[Reading, Site, Tensor, Tensor]]] = {}
    for entry in pending:
        by_key.setdefault(entry[0].key, []).append(entry)
    for entries in by_key.values():
        values = entries[0][0]([(site, states) for _, site, states, _ in entries])
        torch._foreach_copy_([target for *_, target in entries], values)
