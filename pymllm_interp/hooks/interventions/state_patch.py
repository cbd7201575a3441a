"""Patches of recurrent states: ``Patch("state.5", values, positions=-1)``. The values replace the state behind the prompt.

The prompt's last token was computed with the state before. So the second generated token is the first to depend on the patch.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from ...core.forward_batch import LayerStatePool
from ...core.model_spec import STATE, ModelSpec, StatePlace
from ..captures.state_captures import places_in
from ..positions import Window, windows_of
from ..site import kind_of
from ..spec import Spec
from .specs import Patch


class StatePatch(NamedTuple):
    """A patch of one layer's state, for a prompt of one length."""

    spec: Patch
    layer: int
    place: StatePlace

    def write(self, slot: int, pool: LayerStatePool) -> None:
        """Replace the state of a slot."""
        memory = pool.memory(self.place.number)
        memory[slot].copy_(self.spec.values.view(self.place.shape))


def is_state_patch(spec: Spec) -> bool:
    """Whether a spec replaces recurrent states."""
    return isinstance(spec, Patch) and kind_of(str(spec.site)) == STATE


def bind_state_patches(specs: Iterable[Patch], model: ModelSpec, prompt_len: int) -> list[StatePatch]:
    """The patches of a request, by layer. Raises ValueError: see `places_in`. Other positions than the prompt's last, or values of
    another size. So are a gate, heads, a name in place of values, and a layer that is patched twice."""
    found: dict[int, StatePatch] = {}
    for spec in specs:
        try:
            windows = windows_of(spec.positions, prompt_len)
        except ValueError as error:
            raise ValueError(f"{spec.name}: {error}") from None
        if windows not in ((Window(prompt_len - 1, prompt_len),), (Window(prompt_len - 1, None),)):
            raise ValueError(f"{spec.name}: a recurrent state is patched at the prompt's end: give positions=-1")
        if spec.when is not None or spec.heads is not None or any(spec.names()):
            raise ValueError(f"{spec.name}: a recurrent state is patched with numbers, whole, and without a gate")
        for layer, place in places_in(spec.name, spec.site, model):
            if spec.values.numel() != prod(place.shape):
                raise ValueError(
                    f"{spec.name}: values has {list(spec.values.shape)}; {STATE}.{layer} is {list(place.shape)}: give it as one "
                    "row, by .flatten()"
                )
            if layer in found:
                raise ValueError(f"{spec.name}: {STATE}.{layer} is patched twice")
            found[layer] = StatePatch(spec, layer, place)
    return [found[layer] for layer in sorted(found)]
