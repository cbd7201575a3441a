"""Captures of recurrent states: ``Capture("state.5", positions=[3, -1])``.

A layer with a recurrent state has one for the whole sequence so far, not one for each position. So a chunk of the prompt ends at
each captured position, and the state is read there, behind the pass. The result is [positions, *shape], as the layer's code in
transformers keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...core.model_spec import STATE, ModelSpec, StatePlace
from ...core.unsupported import UnsupportedModelError
from ..positions import missing_of, selected, windows_of
from ..site import Site, expand
from .layer_rows import LayerCaptures, LayerRows
from .spec import Capture


def places_in(name: str, site: Site | str, model: ModelSpec) -> list[tuple[int, StatePlace]]:
    """(layer, where its state is) of the layers that a site names. ``state.*`` leaves out the layers without a state.

    Args:
        name: name of the spec, for messages.

    Raises:
        UnsupportedModelError: no layer of the model has a recurrent state.
        ValueError: a layer that the model lacks, or a named one without a recurrent state.
    """
    if not any(model.states):
        raise UnsupportedModelError(f"{name}: the layers of {model.family.name} models have no recurrent state")
    try:
        layers = [found.layer or 0 for found in expand(site, model.num_hidden_layers, model.family)]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    found = [(layer, place) for layer in layers if (place := model.states[layer]) is not None]
    if len(found) < len(layers) and not str(site).endswith(".*"):
        have = [layer for layer, place in enumerate(model.states) if place is not None]
        raise ValueError(
            f"{name}: a named layer has no recurrent state; the layers {have} have one, and {STATE}.* means these"
        )
    return found


class StateCaptures(LayerCaptures[LayerRows]):
    """The recurrent states that one request captures.

    Args:
        specs: captures at `state` sites.
        longest: upper bound of the request's positions.

    Raises:
        ValueError: see `places_in`; a layer that is named in two ways, later positions, or a reduction.
        UnsupportedModelError: see `places_in`.
    """

    def __init__(self, specs: Iterable[Capture], model: ModelSpec, prompt_len: int, longest: int) -> None:
        super().__init__(STATE, model.num_hidden_layers, prompt_len)
        self._places: dict[int, StatePlace] = {}
        for spec in specs:
            if spec.reduce is not None or spec.heads is not None:
                raise ValueError(f"{spec.name}: recurrent states are captured whole: leave out reduce and heads")
            try:
                windows = windows_of(spec.positions, prompt_len, spec.missing)
            except ValueError as error:
                raise ValueError(f"{spec.name}: {error}") from None
            dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else torch.float32
            missing = missing_of(spec.positions, prompt_len)
            for layer, place in places_in(spec.name, spec.site, model):
                self._places[layer] = place
                self.want(layer, LayerRows(selected(windows, longest), place.shape, dtype, missing, spec.stream))

    def due(self, position: int) -> list[tuple[int, StatePlace]]:
        """(layer, place) of each state that is to be read behind a position, and was not yet."""
        return [
            (layer, self._places[layer])
            for layer, own in self.layers.items()
            if position < len(own.wanted) and own.wanted[position] and position not in own.rows
        ]

    def keep(self, layer: int, position: int, state: torch.Tensor) -> None:
        """Keep a copy of a layer's state [*shape] behind a position."""
        own = self.layers[layer]
        own.rows[position] = state.detach().to("cpu", own.dtype, copy=True)
