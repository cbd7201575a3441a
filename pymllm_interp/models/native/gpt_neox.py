"""GPT-NeoX (Pythia): attention and MLP of a layer read the same stream, and their outputs are added to it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ...core.current_pass import current_batch
from ...core.forward_batch import Delta, ForwardBatch, ParallelDelta
from ...core.model_spec import EMBED_SITE, ModelSpec, delta_site, final_norm_site
from ...layers.edits.base import apply_and_capture, apply_at, capture_at
from ...layers.fused_qkv import FusedLinear
from ...layers.linear import Embedding, Linear
from ...layers.norm import LayerNorm
from ...layers.rope import RotaryEmbedding
from ..base import Rotation
from ..transformers.parts.cache_names import CACHES
from .attention import Attention
from .decoder import MLP, Decoder, DecoderForCausalLM, DecoderLayer, causal_output, logit_rows


class GPTNeoXAttention(Attention):
    """Attention with a rotation of the first channels of a head."""

    name, last_projection, by_head = "attention", "dense", True

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, spec.head_dim**-0.5)
        hidden, bias, dtype = spec.hidden_size, config.attention_bias, spec.dtype
        self.head_size = spec.head_dim  # read by transformers' forward
        self.query_key_value = FusedLinear(hidden, 3 * hidden, bias, dtype, device)
        self.query_key_value.set_heads(spec, layer_idx, self.by_head)
        self.dense = Linear(hidden, hidden, bias, dtype, device, input_site=(layer_idx, "z"))

    def projected(self, x: torch.Tensor, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        return self.query_key_value.heads_of(self.query_key_value.capture(self.query_key_value(x), batch.site_ops))

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.query_key_value.project(x, batch).view(x.shape[1], -1, self.head_dim)


class GPTNeoXMLP(MLP):
    """GPT-NeoX's `MLP`, with one input projection."""

    last_projection = "dense_4h_to_h"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        hidden, intermediate, dtype = spec.hidden_size, spec.intermediate_size, spec.dtype
        first = Linear(hidden, intermediate, True, dtype, device)
        super().__init__(layer_idx, config.hidden_act, first)
        self.dense_h_to_4h = first
        self.dense_4h_to_h = Linear(intermediate, hidden, True, dtype, device, input_site=(layer_idx, "mlp_act"))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            hidden_states = self.dense_h_to_4h(hidden_states)
            hidden_states = self.act(hidden_states)
            out = self.dense_4h_to_h(self.apply_ops(hidden_states, batch))
        return self.after_ops(out, batch)


class GPTNeoXLayer(DecoderLayer):
    """``h = h + (mlp(norm2(h)) + attention(norm1(h)))``; without `use_parallel_residual` in the config as GPT-2's."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        self.use_parallel_residual = config.use_parallel_residual
        hidden, eps, dtype = spec.hidden_size, config.layer_norm_eps, spec.dtype
        self.input_layernorm = LayerNorm(hidden, eps, dtype, device)
        self.post_attention_layernorm = LayerNorm(hidden, eps, dtype, device)
        self.post_attention_dropout, self.post_mlp_dropout = (nn.Dropout(config.hidden_dropout) for _ in range(2))
        self.attention = GPTNeoXAttention(config, spec, layer_idx, device)
        self.mlp = GPTNeoXMLP(config, spec, layer_idx, device)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, forward_batch: ForwardBatch, **kwargs: Any
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Runs fused unless a hook waits inside."""
        fused = self.run_fused(hidden_states, position_embeddings, forward_batch)
        if fused is not None:
            return fused
        kwargs |= {"position_embeddings": position_embeddings, "forward_batch": forward_batch}
        for name in CACHES:  # this family's attention has its own name for it in transformers
            if name in kwargs:
                kwargs["layer_past"] = kwargs.pop(name)
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        attn_output, weights = self.attention(self.input_layernorm(hidden_states), **kwargs)
        if transformers_pass is not None:
            transformers_pass.end_attention(weights)
        attn_output = self.post_attention_dropout(attn_output)
        capture_at(attn_output, site_ops, delta_site(self._attention_add))
        if not self.use_parallel_residual:
            hidden_states = apply_and_capture(attn_output + hidden_states, site_ops, self._resid_mid)
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        mlp_output = self.post_mlp_dropout(mlp_output)
        capture_at(mlp_output, site_ops, delta_site(self._mlp_add))
        added = mlp_output + attn_output if self.use_parallel_residual else mlp_output
        return apply_at(added + hidden_states, site_ops, self._resid_post)

    def forward_fused(
        self, h: torch.Tensor, delta: Delta | None, rotation: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> tuple[torch.Tensor, Delta]:
        """Run the fused layer (`FusedLayer`)."""
        h, normed = self.input_layernorm.after_add(h, delta, batch.site_ops, self._input_add)
        attention = self.attention.forward_fused(normed, *rotation, batch=batch)
        if not self.use_parallel_residual:
            h, normed = self.post_attention_layernorm.after_add(h, attention, batch.site_ops, self._attention_add)
            return h, self.mlp.forward_fused(normed, batch=batch)
        mlp = self.mlp.forward_fused(self.post_attention_layernorm.normalize(h), batch=batch)
        return h, ParallelDelta(attention, mlp)


class GPTNeoXModel(Decoder):
    """The decoder without its head."""

    norm_name = "final_layer_norm"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        self.embed_in = Embedding(spec.vocab_size, spec.hidden_size, spec.dtype, device)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([GPTNeoXLayer(config, spec, i, device) for i in range(spec.num_hidden_layers)])
        final = final_norm_site(spec.num_hidden_layers)
        self.final_layer_norm = LayerNorm(
            spec.hidden_size, config.layer_norm_eps, spec.dtype, device, output_site=final
        )
        turned = int(spec.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        self.rotary_emb = RotaryEmbedding(config, turned, max_positions, spec.dtype, device)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> BaseModelOutputWithPast:
        """input_ids and position_ids [1, tokens] -> hidden states [1, tokens, hidden] after the final norm."""
        inputs_embeds = self.embed_in(input_ids)
        hidden_states = self.emb_dropout(inputs_embeds)
        capture_at(hidden_states, forward_batch.site_ops, EMBED_SITE)
        lens = {"rope_lens": forward_batch.rope_lens} if self.rotary_emb.length_dependent else {}
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids, **lens)
        hidden_states = self.through_layers(hidden_states, {"": position_embeddings}, position_ids, forward_batch)
        hidden_states = self.final_layer_norm(hidden_states)
        return self.output_of(hidden_states, forward_batch)

    def embed_fused(self, input_ids: torch.Tensor, position_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.embed_in.embed(input_ids, batch)

    def rotations(self, position_ids: torch.Tensor, batch: ForwardBatch) -> Mapping[str, tuple[torch.Tensor, ...]]:
        return {"": self.rotary_emb.rotation(position_ids, batch.rope_lens)}


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """The decoder with its head."""

    decoder_cls, decoder_name, embedding_name = GPTNeoXModel, "gpt_neox", "embed_in"
    gpt_neox: GPTNeoXModel

    @classmethod
    def parameter_name(cls, name: str) -> str:
        """Checkpoints name the head `embed_out`."""
        return name.replace("embed_out.", "lm_head.", 1) if name.startswith("embed_out.") else name

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        outputs = self.gpt_neox(input_ids=input_ids, position_ids=position_ids, forward_batch=forward_batch)
        logits = self.lm_head(logit_rows(outputs.last_hidden_state, forward_batch))
        return causal_output(logits, outputs)
