"""`WholeLayers`: decoder layers in which no block waits, computed by vLLM's own layers in the pass of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn

from ....core.model_spec import input_add
from ....layers.edits.base import residual_sum
from ..stage import RankStage

KERNELS = ("SiluAndMul", "GeluAndMul", "RotaryEmbedding")
"""Modules of vLLM with a CUDA kernel, which run by torch's operations where vLLM compiles its model."""


class WholeLayers:
    """Consecutive layers of vLLM's model in a pass of a tree. A `core.forward_batch.LayersElsewhere`.

    vLLM's layers rotate by positions, and the tree's by cosines and sines. So they run only where a `rotary_emb` made the
    rotations of the pass, and no block edited them.

    On all ranks they apply declared ops and captures by their taps (taps.py), as in steps without blocks.

    Args:
        layers: vLLM's.
        add: makes a function of all ranks, see `BlockTree`.
        stage: stage of the rank.

    Attributes:
        can_run: whether vLLM's layers take and return the stream as the pair (hidden states, residual).
    """

    def __init__(
        self, layers: Sequence[nn.Module], add: Callable[[Any], Callable[..., torch.Tensor]], stage: RankStage
    ) -> None:
        self._stage, self.can_run = stage, all(map(_takes_pairs, layers))
        self._layers, self._call = layers, add(self._through)
        self._kernels = list(dict(kernel for layer in layers for kernel in _kernels_of(layer)).items())
        self._made: list[tuple[torch.Tensor, int, tuple[torch.Tensor, ...], tuple[int, ...]]] = []

    def watch(self, rotary: nn.Module) -> None:
        """Remember the rotations that a `rotary_emb` of the tree makes, and their positions."""
        rotary.__class__ = _watched_class(type(rotary))
        object.__setattr__(rotary, "_made_by", self._made.append)

    def end_pass(self) -> None:
        """Forget the rotations of a pass."""
        self._made.clear()

    def __call__(
        self, start: int, stop: int, h: torch.Tensor, rotations: Mapping[str, tuple[torch.Tensor, ...]], served: bool
    ) -> torch.Tensor | None:
        """h [1, tokens, hidden] through vLLM's layers; None if a block has edited the rotations."""
        sources = [self._source_of(found) for found in rotations.values()]
        positions = sources[0] if sources else None
        if positions is None or any(source is not positions for source in sources):
            return None
        return self._call(h[0], positions.reshape(-1), start, stop, served)[None]

    def _source_of(self, rotation: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """The positions [1, tokens] that a rotation was made of; None: of none, or of several rows, or edited."""
        for positions, version, made, versions in self._made:
            if all(one is other for one, other in zip(made, rotation, strict=True)):
                unedited = versions == tuple(one._version for one in rotation) and positions._version == version
                return positions if unedited and len(positions) == 1 else None
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
        with _by_kernels(self._kernels), self._stage.taps.within_layers(self._stage.step is None):
            for layer in self._layers[start:stop]:
                hidden, residual = layer(positions=positions, hidden_states=hidden, residual=residual)
        ops = self._stage.ops_of_pass(len(hidden))
        with torch.inference_mode(False):  # the sum is one that a block may edit
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
    before = [module.__dict__["_forward_method"] for module, _ in kernels]
    for module, method in kernels:
        module.__dict__["_forward_method"] = method  # torch's modules take ten times as long to set an attribute
    try:
        yield
    finally:
        for (module, _), method in zip(kernels, before, strict=True):
            module.__dict__["_forward_method"] = method


@cache
def _watched_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a rotary embedding's class that reports its rotations."""

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = super(watched, self).forward(x, position_ids, *args, **kwargs)
        self._made_by((position_ids, position_ids._version, made, tuple(one._version for one in made)))
        return made

    watched: Any = type(base.__name__, (base,), {"forward": forward})
    return watched
