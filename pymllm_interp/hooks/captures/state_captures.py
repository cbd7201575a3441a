"""Captures of recurrent states: ``Capture("state.5", positions=[3, -1])``.

A layer with a recurrent state has one for the whole sequence so far, not one for each position. So a chunk of the prompt ends at
each captured position, and the state is read there, behind the pass. The result is [positions, *shape], as the layer's code in
transformers keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from ...core.model_spec import STATE, ModelSpec, StatePlace
from ...core.unsupported import UnsupportedModelError
from ..positions import missing_of, selected, windows_of
from ..site import Site, expand
from .activations import Activations
from .spec import Capture


def is_state(site: Site | str) -> bool:
    """Whether a site, or a pattern of sites, is of recurrent states."""
    return str(site).partition(".")[0] == STATE


def places_in(name: str, site: Site | str, model: ModelSpec) -> list[tuple[int, StatePlace]]:
    """(layer, where its state is) of the layers that a site names. ``state.*`` leaves out the layers without a state.

    Args:
        name: of the spec, for messages.

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


class _Wanted(NamedTuple):
    """The wanted states of a layer, and those that came.

    Attributes:
        positions: [longest] bool.
        rows: position -> [*shape], on the CPU.
    """

    place: StatePlace
    positions: np.ndarray
    dtype: torch.dtype
    missing: int
    rows: dict[int, torch.Tensor]


class StateCaptures:
    """The recurrent states that one request captures.

    Args:
        specs: at `state` sites.
        longest: upper bound of the request's positions.

    Raises:
        ValueError: see `places_in`; a layer that is named twice, later positions, or a reduction.
        UnsupportedModelError: see `places_in`.
    """

    def __init__(self, specs: Iterable[Capture], model: ModelSpec, prompt_len: int, longest: int) -> None:
        self._layers: dict[int, _Wanted] = {}
        self.num_layers, self._prompt_len = model.num_hidden_layers, prompt_len
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
                if layer in self._layers:
                    raise ValueError(
                        f"{STATE}.{layer} is captured twice: name it once, with all positions that you want"
                    )
                self._layers[layer] = _Wanted(place, selected(windows, longest), dtype, missing, {})

    @property
    def num_bytes(self) -> int:
        """Upper bound of the results' bytes."""
        return sum(
            int(own.positions.sum()) * prod(own.place.shape) * own.dtype.itemsize for own in self._layers.values()
        )

    @property
    def wanted(self) -> np.ndarray:
        """[longest] bool, by position: whether a state is captured behind it."""
        return np.logical_or.reduce([own.positions for own in self._layers.values()])

    def due(self, position: int) -> list[tuple[int, StatePlace]]:
        """(layer, place) of each state that is to be read behind a position, and was not yet."""
        return [
            (layer, own.place)
            for layer, own in self._layers.items()
            if position < len(own.positions) and own.positions[position] and position not in own.rows
        ]

    def keep(self, layer: int, position: int, state: torch.Tensor) -> None:
        """Keep a copy of a layer's state [*shape] behind a position."""
        own = self._layers[layer]
        own.rows[position] = state.detach().to("cpu", own.dtype, copy=True)

    def counts(self, num_positions: int) -> list[tuple[str, int, int, int, int]]:
        """(site, rows of the prompt, rows of generated tokens, missing positions, 0) of the first `num_positions` positions."""
        return [
            (
                f"{STATE}.{layer}",
                int(own.positions[: min(self._prompt_len, num_positions)].sum()),
                int(own.positions[self._prompt_len : num_positions].sum()),
                own.missing,
                0,
            )
            for layer, own in sorted(self._layers.items())
        ]

    def shortfalls(self, num_positions: int) -> Iterator[tuple[Site, int, int]]:
        """(site, delivered rows, expected rows) of each layer with too few rows of the first `num_positions` positions."""
        for layer, own in sorted(self._layers.items()):
            delivered, expected = len(_before(own.rows, num_positions)), int(own.positions[:num_positions].sum())
            if delivered < expected:
                yield Site(STATE, layer), delivered, expected

    def add_to(self, found: Activations, token_ids: Sequence[int]) -> None:
        """Add the states behind a request's positions to its activations."""
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        for layer, own in sorted(self._layers.items()):
            at = _before(own.rows, len(tokens))
            states = torch.stack([own.rows[p] for p in at]) if at else torch.zeros(0, *own.place.shape, dtype=own.dtype)
            positions = torch.tensor(at, dtype=torch.int64)
            found.add(f"{STATE}.{layer}", states, positions, tokens[positions])


def _before(rows: dict[int, torch.Tensor], stop: int) -> list[int]:
    return sorted(position for position in rows if position < stop)
