"""Llama; the base of the families in mistral.py, qwen.py and gemma.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import EMBED_SITE, ModelSpec, delta_site, final_norm_site, mlp_add
from ...layers.activation import activation, activation_module, gated
from ...layers.edits.base import apply_and_capture, apply_at, apply_inner, capture_at, capture_inner
from ...layers.linear import Embedding, Linear, MergedLinear
from ...layers.norm import RMSNorm
from ...layers.rope import RotaryEmbedding
from ..base import ProjectedBranch, ResidualBranch, Rotation, Rotations
from .attention import Attention
from .cpu_layer import decode_layer
from .decoder import Decoder, DecoderForCausalLM, DecoderLayer, causal_output, logit_rows


class LlamaAttention(Attention):
    """Attention with a projection each for q, k and v, computed as one product."""

    name, last_projection = "self_attn", "o_proj"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, self.scale_of(config, spec), self.cap_of(config))
        qkv_bias, o_bias = self.biases(config)
        sizes = self.sizes_of(spec)
        sites = [(layer_idx, kind) for kind in "qkv"]
        self._qkv = MergedLinear(spec.hidden_size, sizes, qkv_bias, spec.dtype, device, output_sites=sites)
        self.q_proj, self.k_proj, self.v_proj = self._qkv.projections()
        self.o_proj = Linear(spec.width("z"), spec.hidden_size, o_bias, spec.dtype, device, input_site=(layer_idx, "z"))

    @staticmethod
    def sizes_of(spec: ModelSpec) -> list[int]:
        """Outputs of the projections for q, k and v."""
        return [spec.width(kind) for kind in "qkv"]

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        """Whether q, k and v have a bias, and whether o has one."""
        return config.attention_bias, config.attention_bias

    @staticmethod
    def scale_of(config: PretrainedConfig, spec: ModelSpec) -> float:
        """Scale of attention scores."""
        return spec.head_dim**-0.5

    @staticmethod
    def cap_of(config: PretrainedConfig) -> float | None:
        """Soft cap of attention scores, or None."""
        return None

    def projected(self, x: torch.Tensor, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        with self._qkv.product(x):
            q = self.normed(self._captured(self.q_proj(x), "q", batch), "q_norm")
            k = self.normed(self._captured(self.k_proj(x), "k", batch), "k_norm")
            v = self._captured(self.v_proj(x), "v", batch)
        return q, k, v.reshape(v.shape[1], -1, self.head_dim)

    def _captured(self, projected: torch.Tensor, kind: str, batch: ForwardBatch) -> torch.Tensor:
        capture_inner(projected, batch.site_ops, self.layer_idx, kind)
        return projected

    def normed(self, projected: torch.Tensor, norm: str) -> torch.Tensor:
        """[1, tokens, heads * head_dim] -> [tokens, heads, head_dim], through the module `norm` in families that have it."""
        return projected.reshape(projected.shape[1], -1, self.head_dim)

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._qkv.project(x, batch).view(x.shape[1], -1, self.head_dim)


class LlamaMLP(ProjectedBranch):
    """The gated MLP (Shazeer, 2020): ``down(act(gate(x)) * up(x))``."""

    name, last_projection, inner_kind = "mlp", "down_proj", "mlp_act"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        bias, dtype = getattr(config, "mlp_bias", False), spec.dtype
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        self.output_site = delta_site(mlp_add(layer_idx))
        self._gate_up = MergedLinear(hidden, [intermediate] * 2, bias, dtype, device)
        self.gate_proj, self.up_proj = self._gate_up.projections()
        self.down_proj = Linear(intermediate, hidden, bias, dtype, device, input_site=(layer_idx, "mlp_act"))
        self.act_fn = activation_module(self.activation_of(config))
        # The fused pass has its own copy: hooks may wait at the module `act_fn`.
        self._act = [activation(self.activation_of(config))]

    @staticmethod
    def activation_of(config: PretrainedConfig) -> str:
        """The name of the activation function."""
        return config.hidden_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=x)
        if out is None:
            with self._gate_up.product(x):
                # `.source` names operations by their calls and assignments: as in transformers.
                down_proj = self.down_proj(self._apply_ops(self.act_fn(self.gate_proj(x)) * self.up_proj(x), batch))
            out = down_proj
        return self.after_ops(out, batch)

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden]."""
        (x,) = inputs
        return self._apply_ops(gated(self._gate_up.project(x, batch), self._act[0]), batch)

    def _apply_ops(self, act: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        return act if batch is None else apply_inner(act, batch.site_ops, self.layer_idx, "mlp_act")


class LlamaDecoderLayer(DecoderLayer):
    """``h = h + attention(norm(h)); h = h + mlp(norm(h))``."""

    attention_cls: type[LlamaAttention] = LlamaAttention
    mlp_cls: Callable[..., ResidualBranch] = LlamaMLP
    norm_cls: type[RMSNorm] = RMSNorm

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        self.self_attn = self.attention_cls(config, spec, layer_idx, device)
        self.mlp: Any = self.mlp_cls(config, spec, layer_idx, device)  # pyright: ignore
        self.input_layernorm = self.norm_cls(spec.hidden_size, config.rms_norm_eps, spec.dtype, device)
        self.post_attention_layernorm = self.norm_cls(spec.hidden_size, config.rms_norm_eps, spec.dtype, device)
        dense = isinstance(self.mlp, LlamaMLP) and self.mlp.activation_of(config) == "silu"
        self.in_one_call = dense and self.norm_cls is RMSNorm

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, forward_batch: ForwardBatch, **kwargs: Any
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Runs fused unless a hook waits inside."""
        fused = self.run_fused(hidden_states, position_embeddings, forward_batch)
        if fused is not None:
            return fused
        kwargs |= {"position_embeddings": position_embeddings, "forward_batch": forward_batch}
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        # `.source` names operations by their calls and assignments: as in transformers.
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, weights = self.self_attn(hidden_states=hidden_states, **kwargs)
        if transformers_pass is not None:
            transformers_pass.end_attention(weights)
        capture_at(hidden_states, site_ops, delta_site(self._attention_add))
        hidden_states = apply_and_capture(residual + hidden_states, site_ops, self._resid_mid)
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        capture_at(hidden_states, site_ops, delta_site(self._mlp_add))
        hidden_states = apply_at(residual + hidden_states, site_ops, self._resid_post)
        return hidden_states

    def forward_fused(
        self, h: torch.Tensor, delta: torch.Tensor | None, rotation: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the fused layer (`FusedLayer`). The next norm's kernel adds h and delta."""
        cos, sin = rotation
        if h.is_cpu and (out := decode_layer(self, h, delta, cos, sin, batch)) is not None:
            return out
        h, normed = self.input_layernorm.after_add(h, delta, batch.site_ops, self._input_add)
        delta = self.self_attn.forward_fused(normed, cos, sin, batch=batch)
        h, normed = self.post_attention_layernorm.after_add(h, delta, batch.site_ops, self._attention_add)
        return h, self.mlp.forward_fused(normed, batch=batch)


class LlamaModel(Decoder):
    """The decoder without its head."""

    layer_cls: type[LlamaDecoderLayer] = LlamaDecoderLayer
    embedding_cls: type[Embedding] = Embedding

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        self.embed_tokens = self.embedding_cls(spec.vocab_size, spec.hidden_size, spec.dtype, device)
        self.layers = nn.ModuleList([self.layer_cls(config, spec, i, device) for i in range(spec.num_hidden_layers)])
        self.norm = self.layer_cls.norm_cls(
            spec.hidden_size,
            config.rms_norm_eps,
            spec.dtype,
            device,
            output_site=final_norm_site(spec.num_hidden_layers),
        )
        self.rotary_emb: Any = self.rotary_of(config, spec, device, max_positions)

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        """The module that makes the position embeddings."""
        return RotaryEmbedding(config, spec.head_dim, max_positions, spec.dtype, device)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> BaseModelOutputWithPast:
        """input_ids and position_ids [1, tokens] -> hidden states [1, tokens, hidden] after the final norm."""
        h = self.embed_tokens(input_ids)
        capture_at(h, forward_batch.site_ops, EMBED_SITE)
        rotary = self.position_embeddings(h, position_ids, forward_batch)
        h = self.through_layers(h, rotary, position_ids, forward_batch)
        h = self.norm(h)
        return self.output_of(h, forward_batch)

    def position_embeddings(self, h: torch.Tensor, position_ids: torch.Tensor, batch: ForwardBatch) -> Rotations:
        """The rotations of each `rotary` of the layers, from the module."""
        lens = {"rope_lens": batch.rope_lens} if self.rotary_emb.length_dependent else {}
        return {"": self.rotary_emb(h, position_ids=position_ids, **lens)}

    def embed_fused(self, input_ids: torch.Tensor, position_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.embed_tokens.embed(input_ids, batch)

    def rotations(self, position_ids: torch.Tensor, batch: ForwardBatch) -> Mapping[str, tuple[torch.Tensor, ...]]:
        return {"": self.rotary_emb.rotation(position_ids, batch.rope_lens)}


class LlamaForCausalLM(DecoderForCausalLM):
    """The decoder with its head."""

    decoder_cls: Any = LlamaModel
    model: LlamaModel

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids=input_ids, position_ids=position_ids, forward_batch=forward_batch)
        logits = self.lm_head(logit_rows(outputs.last_hidden_state, forward_batch))
        return causal_output(logits, outputs)


class MistralAttention(LlamaAttention):
    """Llama's attention without biases."""

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        return False, False


class MistralDecoderLayer(LlamaDecoderLayer):
    attention_cls = MistralAttention


class MistralModel(LlamaModel):
    layer_cls = MistralDecoderLayer


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases. Its sliding window comes from the model's spec."""

    decoder_cls = MistralModel
