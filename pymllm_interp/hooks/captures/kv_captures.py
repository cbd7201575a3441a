"""Captures of the cached keys and values: ``Capture("kv.5")``, [positions, 2, kv_heads, head_dim] each.

They are what transformers' `past_key_values` holds: keys after their norm and rotation. A capture reads the pool behind the pass
that computes its last position of the prompt. So positions from the prefix cache are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ...core.forward_batch import PagedKV
from ...core.model_spec import KV, ModelSpec
from ...core.unsupported import UnsupportedModelError
from ...mem_cache.memory_pool import read_rows
from ..positions import missing_of, selected, windows_of
from ..site import Site, expand
from .layer_rows import LayerCaptures, LayerRows
from .spec import Capture


def check_kv(name: str, model: ModelSpec) -> None:
    """Raise UnsupportedModelError for a model without one K and V of each position and layer.

    Args:
        name: name of the spec, for messages.
    """
    if model.has_states or model.bidirectional or model.source is not None or not model.kv_by_layer:
        raise UnsupportedModelError(
            f"{name}: {model.family.name} models have no K and V of one shape for each layer and position, which could be read or "
            "replaced"
        )


class KVCaptures(LayerCaptures[LayerRows]):
    """The keys and values that one request captures.

    Args:
        specs: captures at `kv` sites.
        longest: upper bound of the request's positions.

    Raises:
        ValueError: a layer that the model lacks or that is named in two ways. Or positions beyond the prompt, heads or a reduction.
        UnsupportedModelError: see `check_kv`.
    """

    def __init__(self, specs: Iterable[Capture], model: ModelSpec, prompt_len: int, longest: int) -> None:
        super().__init__(KV, model.num_hidden_layers, prompt_len)
        shape = 2, model.num_key_value_heads, model.head_dim
        for spec in specs:
            check_kv(spec.name, model)
            if spec.reduce is not None or spec.heads is not None:
                raise ValueError(f"{spec.name}: keys and values are captured whole: leave out reduce and heads")
            try:
                windows = windows_of(spec.positions, prompt_len, spec.missing)
                layers = [found.layer or 0 for found in expand(spec.site, model.num_hidden_layers, model.family)]
            except ValueError as error:
                raise ValueError(f"{spec.name}: {error}") from None
            dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else model.dtype
            wanted, missing = selected(windows, longest), missing_of(spec.positions, prompt_len)
            for layer in layers:
                self.want(layer, LayerRows(wanted, shape, dtype, missing, spec.stream))
        of_prompt = np.flatnonzero(self.wanted[:prompt_len])
        self._first = int(of_prompt[-1]) if len(of_prompt) else 0
        self._read = 0

    def read(self, position: int, slots: torch.Tensor, pool: PagedKV) -> None:
        """Copy the wanted rows up to `position`, the last one of a pass.

        Args:
            slots: [positions] KV slots of the request.
        """
        start, stop = self._read, position + 1
        if position < self._first or stop <= start:
            return
        self._read = stop
        for layer, own in self.layers.items():
            at = np.flatnonzero(own.wanted[start:stop]) + start
            if len(at):
                found = [
                    read_rows(stored, slots[torch.from_numpy(at).to(slots.device)].long(), own.dtype, scale)
                    for stored, scale in zip(pool.get_kv(layer), pool.scales(layer), strict=True)
                ]
                own.rows.update(zip(at.tolist(), torch.stack(found, 1).cpu().unbind(), strict=True))

    def shortfalls(self, num_positions: int) -> Iterator[tuple[Site, int, int]]:
        """Shortfalls; none before the last wanted position of the prompt, since the rows are read together."""
        return super().shortfalls(num_positions) if num_positions > self._first else iter(())
