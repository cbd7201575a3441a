"""`Reduction`: the values that a capture returns for a state. Define a new one as a subclass.

    Mean, Max, Last  one state of all positions          (pools.py)
    Project          dot products with directions        (spec.py)
    Features         features of a sparse autoencoder    (features.py)
    Lens             log probabilities of next tokens    (lens.py)

A reduction of rows has two halves. `sent` runs on the device, beside the model, on the rows of many requests at once. `results`
runs on the host, on all rows of one request. A pool folds the states of the positions, in order (`Pool`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ....core.model_spec import ModelSpec
from ...site import Site
from ...spec import Spec


class Readout(Protocol):
    """Parts of the model as functions of rows, which no op or trace acts on."""

    def norm(self, site: Site, rows: Tensor, gain: bool = True) -> Tensor:
        """Norm at a site, applied to rows [n, hidden] of the residual stream.

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
        rows: [positions, ...], the value under the site's name.
        others: further tensors [positions, ...], by the attribute of `Activations`.
        cut: values that a limit of the reduction left out.
    """

    rows: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
    cut: int = 0


class Reduction(Spec):
    """Result that a capture returns instead of its states."""

    on_device = True
    """Whether `sent` runs on the device. False: the states are sent, or their dot products with `probes`."""
    norm_gain = True
    """Whether the norm's gain applies at `attn_in` and `mlp_in`. False: states are normed without it."""
    of_states = False
    """Whether its rows are states, with the model's dtype and heads. False: float32 values of another width."""
    narrows = False
    """Whether states may be rounded to the dtype of `Capture` before they leave the device."""
    pools = False
    """Whether it is a `Pool`: one row of all positions, which are captured in order."""
    sums = False
    """Whether the device folds the states of a prompt (`Pool.fold_rows`), such as to their sum."""

    @property
    def joined(self) -> bool:
        """Whether it reads the states of all sites of its capture side by side, as one row. Each site has the result."""
        return False

    @property
    def probes(self) -> Tensor | None:
        """[n, width] float32: directions. Kernels of the pass store dot products with them in place of a state. None: the state."""
        return None

    def needed(self, captured: np.ndarray, prompt_len: int) -> np.ndarray:
        """Captured positions that the result needs: [positions] bool."""
        return captured

    def placed(self, positions: Tensor) -> Tensor:
        """The positions that `Activations.positions` names, of those captured."""
        return positions

    def check(self, site: Site, model: ModelSpec) -> None:
        """Raise ValueError if a model's site cannot be reduced."""

    def check_joined(self, sites: Sequence[Site], model: ModelSpec) -> None:
        """Raise ValueError if the sites of one capture cannot be reduced together."""

    def sent_width(self, width: int) -> int:
        """Values of `sent` for a state."""
        raise NotImplementedError

    @property
    def sent_dtype(self) -> torch.dtype:
        """Dtype of the values of `sent`."""
        return torch.int32

    def row_elements(self, width: int) -> int:
        """Values that `sent` holds at once for a row: the rows of one call are limited by it."""
        return width

    def read_alike(self, site: Site) -> object:
        """A key, equal for sites with the same `read` function. By default it is the site, if there is a `read`."""
        return None if type(self).read is Reduction.read else site

    def read(self, site: Site, rows: Tensor, readout: Readout) -> Tensor:
        """Input of `sent` from the rows [n, width] of a site, or of sites that are `read_alike`."""
        return rows

    def sent(self, rows: Tensor, readout: Readout) -> Tensor:
        """The values [n, sent_width] that leave the device for rows of `read`, of one or several sites."""
        raise NotImplementedError

    def results(self, values: Tensor, dtype: torch.dtype | None, states: bool) -> Reduced:
        """The result of all values [positions, sent_width] of one site and request.

        Args:
            dtype: dtype of the `Capture`; None: float32.
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
    """Inverse of `as_words`: the float32 values."""
    return words.contiguous().view(torch.float32)
