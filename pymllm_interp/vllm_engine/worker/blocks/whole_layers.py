"""`WholeLayers`: decoder layers in which no block waits, computed by vLLM's own layers in the pass of a tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn

from ....core.forward_batch import CachedRotation, ForwardBatch, Registers
from ....core.model_spec import input_add
from ....layers.edits.base import residual_sum
from ..stage import RankStage

KERNELS = ("SiluAndMul", "GeluAndMul", "RotaryEmbedding")
"""Modules of vLLM with a CUDA kernel, which run by torch's operations where vLLM compiles its model."""


class WholeLayers:
    """Consecutive layers of vLLM's model as the graph segments of a pass. A `core.forward_batch.GraphSegments`.

    vLLM's layers rotate by positions, and the tree's by cosines and sines. So they run only where a `rotary_emb` made the
    rotations of the segment, and no block edited them.

    On all ranks they apply declared ops and captures by their taps (taps.py), as in steps without blocks.

    Args:
        layers: vLLM's.
        add: makes a function of all ranks, see `BlockTree`.
        stage: stage of the rank.

    Attributes:
        can_run: whether vLLM's layers take and return the stream as the pair (hidden states, residual).
    """

    by_layer = False

    def __init__(
        self, layers: Sequence[nn.Module], add: Callable[[Any], Callable[..., torch.Tensor]], stage: RankStage
    ) -> None:
        self._stage, self.can_run = stage, all(map(_takes_pairs, layers))
        self._layers, self._call = layers, add(self._through)
        self._kernels = list(dict(kernel for layer in layers for kernel in _kernels_of(layer)).items())
        self._made: list[tuple[torch.Tensor, int, tuple[torch.Tensor, ...], tuple[int, ...]]] = []
        self._batch: ForwardBatch | None = None

    def watch(self, rotary: nn.Module) -> None:
        """Remember the rotations that a `rotary_emb` of the tree makes, and their positions."""
        rotary.__class__ = _watched_class(type(rotary))
        object.__setattr__(rotary, "_made_by", self._made.append)

    @contextmanager
    def of_pass(self, batch: ForwardBatch) -> Iterator[None]:
        """Be the segments of a pass."""
        batch.segments, self._batch = self, batch
        try:
            yield
        finally:
            self._batch = None
            self._made.clear()

    def run(self, key: Hashable, segment: Callable[..., Registers], inputs: Registers, chained: bool, /) -> Registers:
        """Run a segment by vLLM's layers, or as it is."""
        if isinstance(key, tuple) and key[0] == "layers" and (positions := self._positions_of(inputs)) is not None:
            return {"h": self._call(inputs["h"][0], positions, *key[1:])[None]}
        return segment(**inputs)

    def _positions_of(self, inputs: Registers) -> torch.Tensor | None:
        """The positions [tokens] that the rotations of a segment were made of; None: of none, or of several, or edited."""
        assert self._batch is not None, "a pass runs"
        cached = self._batch.rotations.values()
        rotations = [found for found in cached if any(found.rotation[0] is tensor for tensor in inputs.values())]
        made = [self._source_of(found) for found in rotations]
        if not made or made[0] is None or any(positions is not made[0] for positions in made):
            return None
        return made[0].reshape(-1)

    def _source_of(self, found: CachedRotation) -> torch.Tensor | None:
        for positions, version, (cos, sin), versions in self._made:
            if found.cos is cos and found.sin is sin:
                unedited = found.versions == versions and positions._version == version and len(positions) == 1
                return positions if unedited else None
        return None

    def _through(
        self, rows: torch.Tensor, positions: torch.Tensor, start: int, stop: int, served: bool
    ) -> torch.Tensor:
        """h [tokens, hidden] through the layers from `start` to `stop`.

        Args:
            served: a block waits for the outcome. The pass captures it behind the block.
        """
        hidden: torch.Tensor = rows.clone()  # layers write to it
        # Behind the first layer, norms add. This one adds nothing, by the kernel of a step without blocks.
        residual: Any = torch.zeros_like(hidden) if start else None
        with _by_kernels(self._kernels), self._stage.taps.within_layers():
            for layer in self._layers[start:stop]:
                hidden, residual = layer(positions=positions, hidden_states=hidden, residual=residual)
        ops = self._stage.ops_of_pass(len(hidden))
        return residual_sum(residual[None], hidden[None], ops, input_add(stop), served)[0]


def _takes_pairs(layer: nn.Module) -> bool:
    """Whether a layer of vLLM is called with the stream as a pair."""
    for cls in type(layer).__mro__:
        names = signature(vars(cls)["forward"]).parameters if "forward" in vars(cls) else ()
        if "positions" in names:
            return {"hidden_states", "residual"} <= set(names)
    return False


def _kernels_of(layer: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(module, method) of modules that have a CUDA kernel and run without it."""
    if not any(parameter.is_cuda for parameter in layer.parameters()):
        return
    for module in layer.modules():
        own: Any = module
        if any(cls.__name__ in KERNELS for cls in type(own).__mro__) and own._forward_method != own.forward_cuda:
            yield own, own.forward_cuda


@contextmanager
def _by_kernels(kernels: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Have modules run by their CUDA kernels."""
    before = [module._forward_method for module, _ in kernels]
    for module, method in kernels:
        module._forward_method = method
    try:
        yield
    finally:
        for (module, _), method in zip(kernels, before, strict=True):
            module._forward_method = method


@cache
def _watched_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a rotary embedding's class that reports its rotations."""

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = super(watched, self).forward(x, position_ids, *args, **kwargs)
        self._made_by((position_ids, position_ids._version, made, tuple(one._version for one in made)))
        return made

    watched: Any = type(base.__name__, (base,), {"forward": forward})
    return watched
