"""gpt-oss: attention with sinks, and mixtures of experts with biases and clamped gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch, Registers
from ...core.model_spec import ModelSpec, delta_site, mlp_add
from ...layers.edits.base import apply_and_capture, apply_at, capture_at
from ...layers.moe import CLAMP_ALPHA, CLAMP_LIMIT, ClampedExperts, LogitRouter
from ...layers.norm import OnceRMSNorm
from ...layers.rope import HalvedRotaryEmbedding
from ..base import ResidualBranch, Rotation
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class GptOssAttention(LlamaAttention):
    """Llama's attention with a sink for each head."""

    halved_rotation = True

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=spec.dtype, device=device), False)
        self.attn = replace(self.attn, sinks=self.sinks.detach())


class GptOssMLP(ResidualBranch):
    """Experts. The module's output is ``(out [1, tokens, hidden], scores [tokens, top_k])``."""

    name = "mlp"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        self.output_site = delta_site(mlp_add(layer_idx))
        experts, hidden = config.num_local_experts, spec.hidden_size
        self.router = LogitRouter(layer_idx, experts, hidden, config.num_experts_per_tok, spec.dtype, device)
        self.experts = ClampedExperts(layer_idx, experts, hidden, spec.intermediate_size, spec.dtype, device)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = current_batch()
        if batch is not None and batch.hook_query is not None and batch.hook_query.try_fuse(self.layer_idx, self.name):
            run = batch.run_segment((self.name, self.layer_idx), self._registers, x=hidden_states)
            return self.after_ops(run["delta"], batch), run["scores"]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, scores, ids = self.router(x)
        self.router.capture(ids, scores, x.dtype, batch)
        out = self.experts(x, ids, scores).view(hidden_states.shape)
        if batch is not None and batch.hook_query is not None and batch.segments is not None:
            batch.hook_query.runs_eagerly(self.layer_idx, self.name, but="")
        return self.after_ops(out, batch), scores

    def _registers(self, x: torch.Tensor) -> Registers:
        batch = current_batch()
        assert batch is not None, "a pass runs"
        out, scores = self._routed(x, batch)
        return {"delta": out, "scores": scores}

    def forward_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (x,) = inputs
        return self._routed(x, batch)[0]

    def _routed(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x.view(-1, x.shape[-1])
        _, scores, ids = self.router.route(hidden, batch)
        self.router.capture(ids, scores, x.dtype, batch)
        return self.experts.fused(hidden, ids, scores).view(x.shape), scores


class GptOssDecoderLayer(LlamaDecoderLayer):
    attention_cls, mlp_cls, norm_cls = GptOssAttention, GptOssMLP, OnceRMSNorm
    halved_rotation = True

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
        capture_at(hidden_states, site_ops, delta_site(self._attention_add))
        hidden_states = apply_and_capture(residual + hidden_states, site_ops, self._resid_mid)
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, _ = self.mlp(hidden_states)
        capture_at(hidden_states, site_ops, delta_site(self._mlp_add))
        hidden_states = apply_at(residual + hidden_states, site_ops, self._resid_post)
        return hidden_states


class GptOssModel(LlamaModel):
    """The decoder without its head."""

    layer_cls = GptOssDecoderLayer

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        return HalvedRotaryEmbedding(config, spec.head_dim, max_positions, spec.dtype, device)


class GptOssForCausalLM(LlamaForCausalLM):
    """OpenAI, 2025. Sinks scale attention by its log-sum-exp (`RadixAttention.sinks`)."""

    decoder_cls = GptOssModel
    quantised_methods, quantises = frozenset({"mxfp4"}), False

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        alpha, limit = getattr(config, "swiglu_alpha", CLAMP_ALPHA), getattr(config, "swiglu_limit", CLAMP_LIMIT)
        return (alpha, limit) == (CLAMP_ALPHA, CLAMP_LIMIT)
