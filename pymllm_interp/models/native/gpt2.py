"""GPT-2: LayerNorms with biases, learned positions, one projection for q, k and v, weights as `Conv1D` keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import EMBED_SITE, ModelSpec, delta_site, final_norm_site
from ...layers.edits.base import apply_and_capture, apply_at, capture_at
from ...layers.fused_qkv import Conv1D, FusedConv1D
from ...layers.linear import Embedding
from ...layers.norm import LayerNorm
from .attention import Attention
from .decoder import MLP, Decoder, DecoderForCausalLM, DecoderLayer, causal_output, logit_rows


class GPT2Attention(Attention):
    """Attention without a rotation, with one projection for q, k and v."""

    name, last_projection = "attn", "c_proj"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        scaling = spec.head_dim**-0.5 if config.scale_attn_weights else 1.0
        scaling /= layer_idx + 1 if config.scale_attn_by_inverse_layer_idx else 1
        super().__init__(config, spec, layer_idx, scaling)
        hidden = self.split_size = spec.hidden_size
        self.reorder_and_upcast_attn = False  # read by transformers' forward; kernels compute scores in float32
        self.c_attn = FusedConv1D(3 * hidden, hidden, spec.dtype, device)
        self.c_attn.set_heads(spec, layer_idx, by_head=False)
        self.c_proj = Conv1D(hidden, hidden, spec.dtype, device, input_site=(layer_idx, "z"))
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.attn_pdrop), nn.Dropout(config.resid_pdrop)

    def projected(self, x: torch.Tensor, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        q, k, v = self.c_attn.heads_of(self.c_attn.capture(self.c_attn(x), batch.site_ops))
        return q.contiguous(), k, v

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.c_attn.project(x, batch).view(x.shape[1], -1, self.head_dim)

    def last(self, z: torch.Tensor) -> torch.Tensor:
        return self.resid_dropout(self.c_proj(z))


class GPT2MLP(MLP):
    """GPT-2's `MLP`, with one input projection."""

    last_projection = "c_proj"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        first = Conv1D(intermediate, hidden, spec.dtype, device)
        super().__init__(layer_idx, config.activation_function, first)
        self.c_fc = first
        self.c_proj = Conv1D(hidden, intermediate, spec.dtype, device, input_site=(layer_idx, "mlp_act"))
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            hidden_states = self.c_fc(hidden_states)
            hidden_states = self.act(hidden_states)
            hidden_states = self.c_proj(self.apply_ops(hidden_states, batch))
            out = self.dropout(hidden_states)
        return self.after_ops(out, batch)


class GPT2Block(DecoderLayer):
    """``h = h + attention(norm(h)); h = h + mlp(norm(h))``."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        self.ln_1 = LayerNorm(spec.hidden_size, config.layer_norm_epsilon, spec.dtype, device)
        self.attn = GPT2Attention(config, spec, layer_idx, device)
        self.ln_2 = LayerNorm(spec.hidden_size, config.layer_norm_epsilon, spec.dtype, device)
        self.mlp = GPT2MLP(config, spec, layer_idx, device)

    def forward(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch, **kwargs: Any) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Runs fused unless a hook waits inside."""
        fused = self.run_fused(hidden_states, (), forward_batch)
        if fused is not None:
            return fused
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output, weights = self.attn(hidden_states, forward_batch=forward_batch, **kwargs)
        if transformers_pass is not None:
            transformers_pass.end_attention(weights)
        capture_at(attn_output, site_ops, delta_site(self._attention_add))
        hidden_states = apply_and_capture(attn_output + residual, site_ops, self._resid_mid)
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        feed_forward_hidden_states = self.mlp(hidden_states)
        capture_at(feed_forward_hidden_states, site_ops, delta_site(self._mlp_add))
        hidden_states = apply_at(residual + feed_forward_hidden_states, site_ops, self._resid_post)
        return hidden_states

    def forward_fused(
        self, h: torch.Tensor, delta: torch.Tensor | None, rotation: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the fused layer (`FusedLayer`)."""
        h, normed = self.ln_1.after_add(h, delta, batch.site_ops, self._input_add)
        delta = self.attn.forward_fused(normed, batch=batch)
        h, normed = self.ln_2.after_add(h, delta, batch.site_ops, self._attention_add)
        return h, self.mlp.forward_fused(normed, batch=batch)


class GPT2Model(Decoder):
    """The decoder without its head. The stream begins with the sum of token and position embeddings."""

    layers_name, norm_name = "h", "ln_f"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        hidden, dtype = spec.hidden_size, spec.dtype
        self.wte = Embedding(spec.vocab_size, hidden, dtype, device, has_site=False)
        self.wpe = Embedding(config.max_position_embeddings, hidden, dtype, device, has_site=False)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([GPT2Block(config, spec, i, device) for i in range(spec.num_hidden_layers)])
        final = final_norm_site(spec.num_hidden_layers)
        self.ln_f = LayerNorm(hidden, config.layer_norm_epsilon, dtype, device, output_site=final)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> BaseModelOutputWithPast:
        """input_ids and position_ids [1, tokens] -> hidden states [1, tokens, hidden] after the final norm."""
        inputs_embeds = self.wte(input_ids)
        position_embeds = self.wpe(position_ids)
        hidden_states = inputs_embeds + position_embeds
        hidden_states = self.drop(hidden_states)
        hidden_states = apply_and_capture(hidden_states, forward_batch.site_ops, EMBED_SITE)
        hidden_states = self.through_layers(hidden_states, {"": ()}, position_ids, forward_batch)
        hidden_states = self.ln_f(hidden_states)
        return self.output_of(hidden_states, forward_batch)

    def embed_fused(self, input_ids: torch.Tensor, position_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.wte.embed(input_ids, batch) + self.wpe.embed(position_ids)

    def rotations(self, position_ids: torch.Tensor, batch: ForwardBatch) -> Mapping[str, tuple[torch.Tensor, ...]]:
        return {"": ()}


class GPT2LMHeadModel(DecoderForCausalLM):
    """The decoder with its head."""

    decoder_cls, decoder_name, embedding_name = GPT2Model, "transformer", "wte"
    transformer: GPT2Model

    @classmethod
    def parameter_name(cls, name: str) -> str:
        """Checkpoints of the decoder without a head have names without "transformer."."""
        return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        transformer_outputs = self.transformer(
            input_ids=input_ids, position_ids=position_ids, forward_batch=forward_batch
        )
        logits = self.lm_head(logit_rows(transformer_outputs.last_hidden_state, forward_batch))
        return causal_output(logits, transformer_outputs)
