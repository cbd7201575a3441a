"""The contract between the runner and a model, and the parts of it that all decoders share.

A model has two forward passes over the same kernels. `forward` calls every module, under the names and with the tensors of
the family's transformers class: hooks see this pass. `forward_fused` calls no module: passes without hooks run it. Between
hooks, `forward` runs fused code too, as graph segments (`ForwardBatch.run_segment`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..attention.attention_backend import RadixAttention
from ..core.current_pass import current_pass
from ..core.forward_batch import ForwardBatch, HookQuery, Registers
from ..core.model_spec import ModelSpec, input_add
from ..core.pass_parts import EncoderInput
from ..layers.edits.base import apply_at, residual_sum
from ..layers.linear import Linear, Product
from ..layers.rope import rotation_of
from ..mem_cache.state_pool import StateLayout

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [1, tokens, channels that are rotated]."""
Rotations = Mapping[str, Rotation | tuple[()]]
"""Rotations by the `rotary` of layers; empty tuples in families without rotations."""


class CausalLM(nn.Module, ABC):
    """A decoder with a language modelling head, as the runner calls it.

    Attributes:
        config: the model's transformers config.
        spec: the model's facts.
        lm_head: [..., hidden] -> [..., vocab].
        fuses_ops: the fused pass calls no module, and declared ops are part of its kernels.
        why_no_graphs: reason that passes cannot be captured in CUDA graphs, or None.
        largest_step: requests and token rows of a step at most; None: as configured.
        state_layouts: the states of layers without KV that a request has.
        num_index_layers: layers of the KV pool that hold keys of indexers, behind the attention layers.
        tower: computes the states of images; None: the model reads text only.
        cross_layers: (index, heads, head size) of layers that attend to an encoder's output.
        blank_input: short input of the encoder, for steps before the first request; None: the model has no encoder.
        kv_scales: the checkpoint's scales of an FP8 cache, of K and of V by layer.
    """

    config: PretrainedConfig
    spec: ModelSpec
    lm_head: Linear
    fuses_ops = True
    why_no_graphs: str | None = None
    largest_step: tuple[int, int] | None = None
    state_layouts: Sequence[StateLayout] = ()
    num_index_layers = 0
    tower: Any = None
    cross_layers: Sequence[tuple[int, int, int]] = ()
    blank_input: EncoderInput | None = None
    kv_scales: Mapping[int, tuple[float, float]] = MappingProxyType({})

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        """Run `forward` as the thread's current pass. `forward_batch` is a keyword; hooks see all arguments in their order.
        Raises RuntimeError: a pass runs on this thread already."""
        with current_pass(kwargs["forward_batch"]):
            return super().__call__(*args, **kwargs)

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        """The pass module by module.

        Args:
            input_ids, position_ids: [1, tokens] int64.

        Returns:
            logits [1, logit rows, vocab] of the rows in `forward_batch.logits_indices`. `forward_batch.hidden_states` is set
            if `return_hidden_states` is.
        """

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The logits of `forward`, bit for bit, without a call to a module. A pass that ends early has none."""
        h = self.decoder_fused(input_ids, position_ids, forward_batch)
        return self.head_fused(h, forward_batch) if forward_batch.depth is None else self.no_logits(h)

    def no_logits(self, like: torch.Tensor) -> torch.Tensor:
        """The logits [1, 0, vocab] of a pass that ends before the head, on the device of `like`."""
        return torch.empty(1, 0, self.spec.num_logits, dtype=self.spec.dtype, device=like.device)

    @abstractmethod
    def decoder_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The part of `forward_fused` before the head: hidden states [1, tokens, hidden] after the final norm.

        With `ForwardBatch.depth` it ends after that layer, and returns its output.
        """

    @abstractmethod
    def head_fused(self, h: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """The logits [1, logit rows, vocab] of the hidden states of `decoder_fused`."""

    def logits_of(self, h: torch.Tensor) -> torch.Tensor:
        """Only the head: [..., hidden] -> [..., vocab]."""
        return self.lm_head(h)

    def attention_layers(self) -> list[RadixAttention]:
        """The attention of each layer, in order."""
        found = [getattr(module, "attn", None) for module in self.modules()]
        return [layer for layer in found if isinstance(layer, RadixAttention)]


class ResidualBranch(nn.Module, ABC):
    """An attention or an MLP: its output is added to the residual stream.

    Attributes:
        name: attribute of the decoder layer.
        output_site: the site of its output. None: a norm follows, and its output is added.
    """

    name: str
    output_site: int | None = None
    _last_path = ""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    @abstractmethod
    def forward_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` without a call to a module, and without the ops at its output: [1, tokens, hidden]."""

    def run_segments(self, batch: ForwardBatch, **inputs: torch.Tensor) -> torch.Tensor | None:
        """`forward` as graph segments, without the ops at its output.

        Args:
            inputs: the inputs of `forward_fused`, in order, by register name.

        Returns:
            [1, tokens, hidden]; None if a hook waits inside: run module by module.
        """
        hook_query, layer = batch.hook_query, self.layer_idx
        if hook_query is None:
            return None

        def whole(**inputs: torch.Tensor) -> Registers:
            return {"delta": self.forward_fused(*inputs.values(), batch=batch)}

        if hook_query.try_fuse(layer, self.name):
            return batch.run_segment((self.name, layer), whole, **inputs)["delta"]
        if (out := self._run_parts(batch, hook_query, inputs)) is not None:
            return out
        if batch.segments is not None:
            hook_query.runs_eagerly(layer, self.name, but=self._last_path)
        return None

    def _run_parts(
        self, batch: ForwardBatch, hook_query: HookQuery, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """`run_segments` when a hook waits inside; None: it cannot."""
        return None

    def after_ops(self, out: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        """The branch's output after the ops at its site, if it has one."""
        return out if batch is None or self.output_site is None else apply_at(out, batch.site_ops, self.output_site)


class ProjectedBranch(ResidualBranch):
    """A branch that ends with one projection.

    Attributes:
        last_projection: attribute of the branch.
        inner_kind: kind of the inner site between the two parts of the branch, the input of `last_projection`.
    """

    last_projection: str
    inner_kind: str

    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self._last_path = f"{self.name}.{self.last_projection}"

    @abstractmethod
    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The input of the last projection [1, tokens, width], after its ops, without a call to a module."""

    def forward_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        inner = self.inner_fused(*inputs, batch=batch)
        last: Product = getattr(self, self.last_projection)
        return last.project(inner, batch)

    def _run_parts(
        self, batch: ForwardBatch, hook_query: HookQuery, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Run the part before the last projection as one segment, if a hook waits there."""

        def inner(**inputs: torch.Tensor) -> Registers:
            return {self.inner_kind: self.inner_fused(*inputs.values(), batch=batch)}

        if not hook_query.try_fuse(self.layer_idx, self.name, but=self._last_path):
            return None
        registers = batch.run_segment((self.inner_kind, self.layer_idx), inner, **inputs)
        return getattr(self, self.last_projection)(registers[self.inner_kind])


class FusedLayer(Protocol):
    """A decoder layer, as the fused pass calls it.

    Attributes:
        rotary: names the rotation that its attention takes, in families that have several.
        halved_rotation: see `rotation_of`.
    """

    rotary: str
    halved_rotation: bool

    def forward_fused(
        self, h: torch.Tensor, delta: Any, rotation: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> tuple[torch.Tensor, Any]:
        """(h, delta) -> (h, delta): the hidden state is the `residual_sum` of both.

        Args:
            delta: a `Delta`; None for the first layer.
            rotation: cosines and signed sines (`layers.rope.rotation`); empty in families without a rotation.
        """
        ...


def run_layers(
    layers: Sequence[FusedLayer],
    first: int,
    h: torch.Tensor,
    position_embeddings: Rotations,
    batch: ForwardBatch,
    served: bool,
) -> torch.Tensor:
    """Run decoder layers as one graph segment, or as one for each layer (`GraphSegments.by_layer`).

    Args:
        layers: consecutive layers.
        h: [1, tokens, hidden].
        position_embeddings: the rotations of the layers' `rotary`.
        served: a hook waits at the output of the last one.

    Returns:
        the hidden state [1, tokens, hidden] after the last layer.
    """
    end = first + len(layers)
    if batch.layers_elsewhere is not None:
        out = batch.layers_elsewhere(first, end, h, position_embeddings, served)
        if out is not None:
            return out
    halved = layers[0].halved_rotation
    rotations = {kind: rotation_of(batch, *found, halved=halved) for kind, found in position_embeddings.items()}
    names = [
        f"{name}{kind}" for kind, found in rotations.items() for name, _ in zip(("cos", "sin"), found, strict=False)
    ]
    inputs = dict(zip(names, chain(*rotations.values()), strict=True))

    def run_part(
        part: Sequence[FusedLayer], stop: int, served: bool, h: torch.Tensor, **inputs: torch.Tensor
    ) -> Registers:
        parts, delta = iter(inputs.values()), None
        turns = {kind: tuple(islice(parts, len(found))) for kind, found in rotations.items()}
        for layer in part:
            h, delta = layer.forward_fused(h, delta, turns[layer.rotary], batch)
        return {"h": residual_sum(h, delta, batch.site_ops, input_add(stop), served)}

    by_layer = batch.segments is not None and batch.segments.by_layer
    size = 1 if by_layer else len(layers)
    for start in range(first, end, size):
        stop = start + size
        seen = served and stop == end
        run = partial(run_part, layers[start - first : stop - first], stop, seen)
        h = batch.run_segment(("layers", start, stop, seen), run, stop < end, h=h, **inputs)["h"]
    return h
