"""The parts of a native decoder that all families share: its loops over the layers, and its head. Also MLPs without a gate.

Both forward passes of models/base.py are here and in the families' layers. They launch the same kernels at the same shapes, so
they are bit-equal (tests/models/test_models.py). Module boundaries carry [1, tokens, hidden]; the batch is flat along dim 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ...core.families import has_head_bias
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import (
    EMBED_SITE,
    LOGITS,
    ModelSpec,
    attention_add,
    delta_site,
    input_add,
    mlp_add,
    residual_site,
)
from ...layers.activation import activation, activation_module
from ...layers.edits.base import apply_and_capture, apply_inner, capture_at, residual_sum
from ...layers.linear import Linear, Product
from ...layers.norm import NormModule
from ..base import CausalLM, ProjectedBranch, Rotations, run_layers


class AuxStates(NamedTuple):
    """Static memory for the inputs of some layers, read by a draft head. Captured passes write it too."""

    layers: tuple[int, ...]
    states: torch.Tensor
    """[rows, layers * hidden]: of the rows of the last pass."""

    @classmethod
    def of(cls, layers: tuple[int, ...], rows: int, spec: ModelSpec, device: str) -> AuxStates:
        """Memory for passes of up to `rows` rows."""
        return cls(layers, torch.zeros(rows, len(layers) * spec.hidden_size, dtype=spec.dtype, device=device))

    def keep(self, layer: int, h: torch.Tensor) -> None:
        """Copy h [1, rows, hidden], the input of a layer. Longer passes leave nothing."""
        rows, width = h.shape[1:]
        if layer in self.layers and rows <= len(self.states):
            place = self.layers.index(layer) * width
            self.states[:rows, place : place + width].copy_(h[0].detach())


class DecoderLayer(nn.Module):
    """A decoder layer. A family has `forward`, module by module, and `forward_fused` (see `FusedLayer`).

    Hidden states are out of place, so that saved ones keep their values.
    """

    rotary = ""
    halved_rotation = False

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self._input_add, self._attention_add = input_add(layer_idx), attention_add(layer_idx)
        self._mlp_add = mlp_add(layer_idx)
        self._resid_mid, self._resid_post = residual_site(self._attention_add), residual_site(self._mlp_add)

    def run_fused(
        self, h: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> torch.Tensor | None:
        """The layer's output [1, tokens, hidden] as one segment; None if a hook waits inside."""
        if batch.hook_query is None or not batch.hook_query.try_fuse(self.layer_idx):
            return None
        embeddings: Any = {self.rotary: position_embeddings}
        layer: Any = self
        return run_layers((layer,), self.layer_idx, h, embeddings, batch, served=True)


class Decoder(nn.Module):
    """A decoder without its head: embeddings, layers, final norm.

    Attributes:
        layers_name, norm_name: attributes of the list of layers, and of the final norm.
        aux: keeps the inputs of some layers; None: nothing reads them.
    """

    layers_name, norm_name = "layers", "norm"
    aux: AuxStates | None = None

    @abstractmethod
    def embed_fused(self, input_ids: torch.Tensor, position_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The stream [1, tokens, hidden] before the first layer, without ops and without a call to a module."""

    @abstractmethod
    def rotations(self, position_ids: torch.Tensor, batch: ForwardBatch) -> Mapping[str, tuple[torch.Tensor, ...]]:
        """The rotation of each `rotary` of the layers, without a call to a module."""

    def through_layers(
        self, h: torch.Tensor, position_embeddings: Rotations, position_ids: torch.Tensor, batch: ForwardBatch,
        span: tuple[int, int | None] = (0, None),
    ) -> torch.Tensor:  # fmt: skip
        """The layers one by one, or several as one segment between hooks: [1, tokens, hidden] -> the same.

        Args:
            span: (first layer, end); None: the last layer.
        """
        site_ops, hook_query, transformers_pass = batch.site_ops, batch.hook_query, batch.transformers_pass
        all_layers: Any = getattr(self, self.layers_name)
        (i, stop), aux = span, self.aux
        num_layers = len(all_layers) if stop is None else stop
        read = () if aux is None else aux.layers
        while i < num_layers:
            first, waits = i, "within"
            if aux is not None:
                aux.keep(i, h)
            if hook_query is not None:
                i, waits = hook_query.first_hook(
                    i, min((layer for layer in read if i < layer < num_layers), default=num_layers)
                )
            at_output = waits == "at output"
            if first < i or at_output:
                layers: Any = list(islice(all_layers, first, i + at_output))  # a slice would be a new module
                h = run_layers(layers, first, h, position_embeddings, batch, served=at_output)
            if i < num_layers and waits != "nowhere":
                layer = all_layers[i]
                kwargs = {"position_ids": position_ids, "forward_batch": batch}
                if embeddings := position_embeddings[layer.rotary]:
                    kwargs["position_embeddings"] = embeddings
                if transformers_pass is not None:
                    kwargs |= transformers_pass.layer_inputs(i, h)
                h = layer(h, **kwargs) if not at_output else hook_query.at_output(i, h)  # pyright: ignore[reportOptionalMemberAccess]
                i += 1
                capture_at(h, site_ops, residual_site(input_add(i)))
        if aux is not None:
            aux.keep(num_layers, h)
        return h

    def output_of(self, h: torch.Tensor, batch: ForwardBatch) -> BaseModelOutputWithPast:
        """Output of `forward` for the hidden states [1, tokens, hidden] after the final norm."""
        if batch.site_ops is not None:
            batch.site_ops.capture(batch.site_ops.final_site, h)
        collected: Any = {} if batch.transformers_pass is None else batch.transformers_pass.end_layers(h)
        return BaseModelOutputWithPast(last_hidden_state=h, **collected)  # pyright: ignore[reportArgumentType]

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The hidden states of `forward`, without a call to a module; the last layer's, if the pass ends early."""
        site_ops, depth, delta = forward_batch.site_ops, forward_batch.depth, None
        meanwhile = forward_batch.meanwhile
        h = apply_and_capture(self.embed_fused(input_ids, position_ids, forward_batch), site_ops, EMBED_SITE)
        rotations = self.rotations(position_ids, forward_batch)
        layers: Any = getattr(self, self.layers_name)
        norm: NormModule = getattr(self, self.norm_name)
        for i, layer in enumerate(islice(layers, depth)):
            if self.aux is not None and i in self.aux.layers:
                h, delta = residual_sum(h, delta, site_ops, input_add(i)), None
                self.aux.keep(i, h)
            h, delta = layer.forward_fused(h, delta, rotations[layer.rotary], forward_batch)
            if meanwhile is not None:
                meanwhile()
        if depth is not None:
            return residual_sum(h, delta, site_ops, input_add(depth))
        return norm.after_add(h, delta, site_ops, input_add(len(layers)))[1]


class DecoderForCausalLM(CausalLM):
    """A decoder with its head.

    Args:
        config: the family's transformers config.
        spec: `ModelSpec.of` the config.
        max_positions: positions of the longest sequence to serve.

    Attributes:
        decoder_cls, decoder_name: the decoder's class, and the attribute that holds it.
        embedding_name: the decoder's attribute with the weight of a tied head.
        quantised_methods: formats of quantised weights that are read.
        quantises: whether weights can be quantised at load.
    """

    decoder_cls: Any
    decoder_name, embedding_name = "model", "embed_tokens"
    quantised_methods = frozenset({"fp8", "compressed-tensors", "awq", "gptq"})
    quantises = True

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        decoder = self.decoder_cls(config, spec, device, max_positions)
        setattr(self, self.decoder_name, decoder)
        bias = has_head_bias(config)
        self.lm_head = Linear(spec.hidden_size, spec.num_logits, bias, spec.dtype, device, output_site=(0, LOGITS))
        if config.tie_word_embeddings and spec.num_labels is None:
            self.lm_head.weight = getattr(decoder, self.embedding_name).weight
            self.lm_head.bind()
        self.eval()  # dropout

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        """Whether this class implements the config."""
        return True

    @classmethod
    def parameter_name(cls, name: str) -> str:
        """The name of a checkpoint's tensor in the module tree."""
        return name

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a checkpoint, by their names in the module tree."""
        return ((self.parameter_name(name), tensor) for name, tensor in weights)

    def decoder_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return getattr(self, self.decoder_name).forward_fused(input_ids, position_ids, forward_batch)

    def head_fused(self, h: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        return self.lm_head.project(logit_rows(h, forward_batch), forward_batch)


def causal_output(logits: Any, outputs: BaseModelOutputWithPast) -> CausalLMOutputWithPast:
    """Output of a model with its head."""
    return CausalLMOutputWithPast(logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


def logit_rows(h: Any, batch: ForwardBatch) -> torch.Tensor:
    """The rows of h [1, tokens, hidden] that the head runs on. Stores the hidden states if the batch asks for them."""
    if batch.return_hidden_states:
        batch.hidden_states = h[0, : batch.num_request_tokens]
    return h if batch.logits_indices is None else h[:, batch.logits_indices]


class MLP(ProjectedBranch):
    """The base of the families' MLPs. Each family has its own `forward`.

    Args:
        act: the name of the activation function.
        first: the first projection. A family holds it under its own name, too.
    """

    name, inner_kind = "mlp", "mlp_act"

    def __init__(self, layer_idx: int, act: str, first: Product) -> None:
        super().__init__(layer_idx)
        self.output_site = delta_site(mlp_add(layer_idx))
        self.act = activation_module(act)
        # The fused pass has its own copies: hooks may wait at the modules.
        self._parts = first, activation(act)

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden]."""
        (x,), (first, act) = inputs, self._parts
        return self.apply_ops(act(first.project(x, batch)), batch)

    def apply_ops(self, act: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        """The neurons after their ops."""
        return act if batch is None else apply_inner(act, batch.site_ops, self.layer_idx, "mlp_act")
