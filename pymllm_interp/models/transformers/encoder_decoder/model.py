"""T5, BART and Whisper by their own classes: the encoder runs once a request, the decoder as any other.

    model = EncoderDecoderModel(served, decoder_spec)

In a request's first pass the encoder runs before the decoder, for one request at a time. Cross keys and values of all decoder
layers are written to a separate pool. Blocks see the encoder's modules there, with all positions of its input.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ....core.current_pass import inner_pass
from ....core.forward_batch import ForwardBatch, PartQuery, part_batch
from ....core.model_spec import ModelSpec
from ....core.pass_parts import EncoderInput, PassEncoder
from .. import site_ends
from ..position_rules import serve_distances
from ..transformers_model import TransformersModel
from .cross_attention import CrossCache, CrossLayer


class DecoderView(nn.Module):
    """The decoder of a model with its head, as a causal language model. It has the whole model's modules but the encoder.

    Args:
        whole: the transformers model.
        layers: its cross-attention layers.
    """

    base_model: Any

    def __init__(self, whole: PreTrainedModel, layers: list[CrossLayer]) -> None:
        super().__init__()
        self._modules, self._whole, self._layers = whole._modules, [whole], layers
        decoder: Any = whole.get_decoder()
        self.config, self.hidden_size = decoder.config, whole.config.d_model
        vars(self)["base_model"], self._encoder = decoder, [whole.get_encoder()]  # no children: the whole model's are

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        memo = {*(memo or ()), *self._encoder[0].modules()}
        return super().named_modules(memo, prefix, remove_duplicate)

    def get_input_embeddings(self) -> nn.Module:
        """The decoder's embedding."""
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head."""
        return self._whole[0].get_output_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        """The whole model's forward, with an encoder output that no module reads."""
        like = next(self.base_model.parameters())
        whole: Any = self._whole[0]
        return whole(
            encoder_outputs=BaseModelOutput(like.new_zeros(1, 1, self.hidden_size)),  # pyright: ignore[reportArgumentType]
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            past_key_values=CrossCache(past_key_values, self._layers, like),
            use_cache=True,  # else cross-attention modules look for no cache
        )


class EncoderDecoderModel(TransformersModel):
    """An encoder-decoder model.

    Attributes:
        cross_layers: its cross-attention layers.
    """

    def __init__(self, served: PreTrainedModel, declared: ModelSpec) -> None:
        assert declared.source is not None
        self.cross_layers, modules = cross_layers_of(served, declared)
        serve_distances(served.get_decoder())
        _own_attention(served.get_encoder())
        super().__init__(DecoderView(served, self.cross_layers), declared)  # pyright: ignore[reportArgumentType]
        self.config, self.why_no_graphs = served.config, "its attention reads encoder outputs, which differ in length"
        self._encoder = [served.get_encoder()]
        self._cross_modules = modules
        self.blank_input = _blank_input(served.config, declared.source)
        paths = {module: path for path, module in served.named_modules()}
        self.encoder_path = paths[self._encoder[0]]
        encoder = replace(declared.source, dtype=self.spec.dtype)
        self.spec = replace(self.spec, source=encoder, cuts_edges=False)
        site_ends.install_part(served, self._encoder[0].get_input_embeddings(), encoder)

    def _run(
        self, served: Any, input_ids: torch.Tensor, position_ids: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        if batch.cross is not None and batch.cross.encoders:
            self._encode(batch)
        return super()._run(served, input_ids, position_ids, batch)

    def logits_of(self, h: torch.Tensor) -> torch.Tensor:
        config: Any = self.config
        scaled = h * config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else h
        logits = super().logits_of(scaled)
        bias = self._buffers.get("final_logits_bias")
        return logits if bias is None else logits + bias[0]

    def _encode(self, batch: ForwardBatch) -> None:
        """Run the encoders of a pass, and write their cross keys and values."""
        assert batch.cross is not None
        query = batch.hook_query if isinstance(batch.hook_query, PartQuery) else None
        spans = [] if query is None else query.rows_inside(self.encoder_path)
        if batch.fresh_kv_only:
            batch.cross.fresh = {}
        for run in batch.cross.encoders:
            start, size = batch.batch_groups[run.request]
            span, rows = ((start, size) if (start, size) in spans else None), run.input.length
            part = nullcontext() if query is None else query.serve_part(self.encoder_path, span=span, num_rows=rows)
            served = query if span is not None else None  # else modules would take the pass for a call of a block
            with part, inner_pass(part_batch(rows, batch.input_ids.device, run.site_ops, served)):
                self._write(run, self._encoded(run), batch)

    def _encoded(self, run: PassEncoder) -> torch.Tensor:
        """The encoder's output [1, positions, hidden]."""
        values, like = run.input.values, next(self.parameters())
        values = values.to(like.device, like.dtype if values.is_floating_point() else None)[None]
        return self._encoder[0](**{run.input.kind: values})[0]

    def _write(self, run: PassEncoder, h: torch.Tensor, batch: ForwardBatch) -> None:
        family, cross = self.spec.family, batch.cross
        assert cross is not None
        fresh = []
        for (layer, heads, size), module in zip(self.cross_layers, self._cross_modules, strict=True):
            keys, values = (
                _unhooked(getattr(module, name), h)[0].unflatten(-1, (heads, size))
                for name in (family.k_proj, family.v_proj)
            )
            fresh.append((keys, values))
            if cross.fresh is None:
                cross.pool.kv.set_kv(layer, run.slots, keys, values)
        if cross.fresh is not None:
            cross.fresh[run.request] = fresh


def cross_layers_of(model: PreTrainedModel, spec: ModelSpec) -> tuple[list[CrossLayer], list[nn.Module]]:
    """The cross-attention layers of a model, and their modules, which get `cross_layer`."""
    family, layers, modules = spec.family, list[CrossLayer](), list[nn.Module]()
    for index in range(len(model.get_submodule(family.layers))):  # pyright: ignore[reportArgumentType]
        module: Any = model.get_submodule(f"{family.layers}.{index}.{family.cross_attention}")
        heads = getattr(module, "num_heads", None) or module.n_heads
        width = getattr(module, family.k_proj).weight.shape[0]
        module.cross_layer = CrossLayer(index, heads, width // heads)
        layers.append(module.cross_layer)
        modules.append(module)
    return layers, modules


def _blank_input(config: Any, encoder: ModelSpec) -> EncoderInput:
    """One token, or audio of full length: all audio has one length."""
    if not encoder.family.hears:
        return EncoderInput.of(torch.zeros(1, dtype=torch.int64), 1)
    return EncoderInput.of(torch.zeros(config.num_mel_bins, 2 * encoder.context_len), encoder.context_len)


def _own_attention(encoder: Any) -> None:
    """Give the encoder's modules a config of their own: they keep transformers' eager attention and its masks."""
    config = copy(encoder.config)
    config._attn_implementation_internal = "eager"
    for module in encoder.modules():
        if hasattr(module, "config"):
            module.config = config


def _unhooked(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """Output of a projection, without a visit: blocks see the rows of the decoder in its layer."""
    function = type(module).forward
    return function(module, h)
