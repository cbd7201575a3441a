"""Gemma, Gemma 2 and Gemma 3 (text): scaled embeddings, norms with weights stored less 1, soft-caps, norms after a branch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...core.forward_batch import ForwardBatch
from ...core.model_spec import LOGITS, ModelSpec, delta_site
from ...layers.activation import softcap
from ...layers.edits.base import apply_and_capture, apply_at, apply_inner, capture_at
from ...layers.linear import Embedding
from ...layers.norm import OffsetRMSNorm
from ...layers.rope import RotaryEmbedding
from ..base import Rotation, Rotations
from .decoder import causal_output, logit_rows
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from .qwen import Qwen3Attention


class ScaledEmbedding(Embedding):
    """Embeddings times the square root of their width, which is rounded to the dtype first."""

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype, device: str) -> None:
        super().__init__(num_embeddings, embedding_dim, dtype, device)
        self.scalar_embed_scale = torch.tensor(embedding_dim**0.5).to(dtype).item()

    def of_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        return super().of_tokens(ids) * self.scalar_embed_scale


# -- Gemma ---------------------------------------------------------------------------


class GemmaAttention(LlamaAttention):
    """Gemma's attention, which is Llama's."""


class GemmaDecoderLayer(LlamaDecoderLayer):
    attention_cls, norm_cls = GemmaAttention, OffsetRMSNorm


class GemmaModel(LlamaModel):
    layer_cls, embedding_cls = GemmaDecoderLayer, ScaledEmbedding


class GemmaForCausalLM(LlamaForCausalLM):
    decoder_cls = GemmaModel


# -- Gemma 2 -------------------------------------------------------------------------


class Gemma2Attention(LlamaAttention):
    """Attention with a soft-cap of its scores."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.output_site = None  # the norm behind it has the site
        self.attn_logit_softcapping = self.cap_of(config)

    @staticmethod
    def scale_of(config: PretrainedConfig, spec: ModelSpec) -> float:
        return config.query_pre_attn_scalar**-0.5

    @staticmethod
    def cap_of(config: PretrainedConfig) -> float | None:
        return config.attn_logit_softcapping


class Gemma2MLP(LlamaMLP):
    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.output_site = None  # the norm behind it has the site

    @staticmethod
    def activation_of(config: PretrainedConfig) -> str:
        return config.hidden_activation


class Gemma2DecoderLayer(LlamaDecoderLayer):
    """``h = h + norm(attention(norm(h))); h = h + norm(mlp(norm(h)))``."""

    attention_cls: type[LlamaAttention] = Gemma2Attention
    mlp_cls, norm_cls = Gemma2MLP, OffsetRMSNorm

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        size: Any = spec.hidden_size, config.rms_norm_eps, spec.dtype, device
        self.post_attention_layernorm = OffsetRMSNorm(*size, output_site=delta_site(self._attention_add))
        self.pre_feedforward_layernorm = OffsetRMSNorm(*size)
        self.post_feedforward_layernorm = OffsetRMSNorm(*size, output_site=delta_site(self._mlp_add))

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, forward_batch: ForwardBatch, **kwargs: Any
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Runs fused unless a hook waits inside."""
        fused = self.run_fused(hidden_states, position_embeddings, forward_batch)
        if fused is not None:
            return fused
        kwargs |= {"position_embeddings": position_embeddings, "forward_batch": forward_batch}
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, weights = self.self_attn(hidden_states=hidden_states, **kwargs)
        if transformers_pass is not None:
            transformers_pass.end_attention(weights)
        hidden_states = self.post_attention_layernorm(hidden_states)
        capture_at(hidden_states, site_ops, delta_site(self._attention_add))
        hidden_states = apply_and_capture(residual + hidden_states, site_ops, self._resid_mid)
        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        capture_at(hidden_states, site_ops, delta_site(self._mlp_add))
        hidden_states = apply_at(residual + hidden_states, site_ops, self._resid_post)
        return hidden_states

    def forward_fused(
        self, h: torch.Tensor, delta: torch.Tensor | None, rotation: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the fused layer (`FusedLayer`)."""
        h, normed = self.input_layernorm.after_add(h, delta, batch.site_ops, self._input_add)
        delta = self.post_attention_layernorm.normalize(self.self_attn.forward_fused(normed, *rotation, batch=batch))
        h, normed = self.pre_feedforward_layernorm.after_add(h, delta, batch.site_ops, self._attention_add)
        return h, self.post_feedforward_layernorm.normalize(self.mlp.forward_fused(normed, batch=batch))


class Gemma2Model(GemmaModel):
    """The decoder without its head."""

    layer_cls: type[LlamaDecoderLayer] = Gemma2DecoderLayer


class Gemma2ForCausalLM(LlamaForCausalLM):
    """The decoder with its head; the logits have a soft-cap. Ops at the logits come after it."""

    decoder_cls = Gemma2Model

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__(config, spec, device, max_positions)
        self.lm_head.output_site = None

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids=input_ids, position_ids=position_ids, forward_batch=forward_batch)
        logits = self.lm_head(logit_rows(outputs.last_hidden_state, forward_batch))
        return causal_output(self._capped(logits, forward_batch), outputs)

    def head_fused(self, h: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        return self._capped(super().head_fused(h, forward_batch), forward_batch)

    def _capped(self, logits: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        text: Any = self.config.get_text_config()
        cap = None if self.spec.num_labels is not None else text.final_logit_softcapping
        return apply_inner(logits if cap is None else softcap(logits, cap), batch.site_ops, 0, LOGITS)


# -- Gemma 3 -------------------------------------------------------------------------


class Gemma3Attention(Qwen3Attention):
    """Attention with norms on each head of q and k, which get [1, tokens, heads, head_dim] as Qwen3's do."""

    norm_cls = OffsetRMSNorm

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.output_site = None  # the norm behind it has the site

    @staticmethod
    def scale_of(config: PretrainedConfig, spec: ModelSpec) -> float:
        return config.query_pre_attn_scalar**-0.5

    def projected(self, x: torch.Tensor, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        q, k, v = super().projected(x, batch)
        return self.q_norm(q.unsqueeze(0))[0], self.k_norm(k.unsqueeze(0))[0], v

    def normed(self, projected: torch.Tensor, norm: str) -> torch.Tensor:
        """The projection without a norm. transformers calls this family's norms after all projections."""
        return LlamaAttention.normed(self, projected, norm)


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    """Gemma 2's layer, with a separate rotation for layers with a sliding window."""

    attention_cls = Gemma3Attention

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.rotary = config.layer_types[layer_idx]


class Gemma3RotaryEmbedding(nn.Module):
    """A `RotaryEmbedding` for each type of layers."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        self.of_type: dict[str, RotaryEmbedding] = {}
        for layer_type in dict.fromkeys(config.layer_types):
            own = copy.copy(config)
            own.rope_parameters = config.rope_parameters[layer_type]
            self.of_type[layer_type] = RotaryEmbedding(own, spec.head_dim, max_positions, spec.dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str,
        rope_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, tokens, head_dim] of a type of layers."""
        return self.of_type[layer_type](x, position_ids, rope_lens)


class Gemma3TextModel(GemmaModel):
    """The decoder without its head."""

    layer_cls: type[LlamaDecoderLayer] = Gemma3DecoderLayer

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        return Gemma3RotaryEmbedding(config, spec, device, max_positions)

    def position_embeddings(self, h: torch.Tensor, position_ids: torch.Tensor, batch: ForwardBatch) -> Rotations:
        rotary, lens = self.rotary_emb, {} if batch.rope_lens is None else {"rope_lens": batch.rope_lens}
        return {kind: rotary(h, position_ids, kind, **lens) for kind in rotary.of_type}

    def rotations(self, position_ids: torch.Tensor, batch: ForwardBatch) -> Mapping[str, tuple[torch.Tensor, ...]]:
        of_type = self.rotary_emb.of_type
        return {kind: rotary.rotation(position_ids, batch.rope_lens) for kind, rotary in of_type.items()}


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """The decoder with its head."""

    decoder_cls = Gemma3TextModel
