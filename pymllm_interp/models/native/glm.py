"""GLM-4.5: mixtures of experts with a sigmoid router and shared experts, after some dense layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ...layers.activation import activation, activation_module, gated
from ...layers.edits.base import apply_inner, capture_inner
from ...layers.linear import Linear, MergedLinear
from ...layers.moe import SigmoidRouter
from ...layers.norm import RMSNorm, norm_heads
from ...layers.rope import RotaryEmbedding
from ..base import ResidualBranch
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from .moe import SparseForCausalLM, SparseMoeBlock


class Glm4MoeAttention(LlamaAttention):
    """With `use_qk_norm` each head of q and k is normalised. A part of a head's channels is rotated."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.use_qk_norm = config.use_qk_norm
        if self.use_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, spec.dtype, device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, spec.dtype, device)

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        return config.attention_bias, False

    def projected(self, x: torch.Tensor, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        """The norms come behind all projections, as in transformers."""
        q, k, v = super().projected(x, batch)
        return (self.q_norm(q[None])[0], self.k_norm(k[None])[0], v) if self.use_qk_norm else (q, k, v)

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        qkv = super().projected_fused(x, batch)
        if not self.use_qk_norm:
            return qkv
        return norm_heads(
            qkv, self.q_norm.weight, self.k_norm.weight, self.num_kv_heads, self.q_norm.eps, self.q_norm.kind
        )


class SharedExperts(nn.Module):
    """The gated MLP that all tokens go through, beside their experts. Its output is the site `shared_out`."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__()
        self.layer_idx, hidden = layer_idx, spec.hidden_size
        size = config.moe_intermediate_size * config.n_shared_experts
        self._gate_up = MergedLinear(hidden, [size] * 2, False, spec.dtype, device)
        self.gate_proj, self.up_proj = self._gate_up.projections()
        self.down_proj = Linear(size, hidden, False, spec.dtype, device)
        self.act_fn = activation_module(config.hidden_act)
        # The fused pass has its own copy: hooks may wait at the module `act_fn`.
        self._act = [activation(config.hidden_act)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        with self._gate_up.product(x):
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj if batch is None else apply_inner(down_proj, batch.site_ops, self.layer_idx, "shared_out")

    def fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` without a call to a module."""
        out = self.down_proj.project(gated(self._gate_up.project(x, batch), self._act[0]), batch)
        return apply_inner(out, batch.site_ops, self.layer_idx, "shared_out")


class Glm4MoeMoE(SparseMoeBlock):
    """The chosen experts, and the shared ones."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.gate = SigmoidRouter(
            layer_idx, config.n_routed_experts, spec.hidden_size, config.num_experts_per_tok, config.norm_topk_prob, spec.dtype,
            device, config.n_group, config.topk_group, config.routed_scaling_factor,
        )  # fmt: skip
        self.shared_experts = SharedExperts(config, spec, layer_idx, device)

    @staticmethod
    def num_experts_of(config: PretrainedConfig) -> int:
        return config.n_routed_experts

    @staticmethod
    def intermediate_size_of(config: PretrainedConfig) -> int:
        return config.moe_intermediate_size

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            _, scores, ids = self.gate(hidden_states)
            self.gate.capture(ids, scores, hidden_states.dtype, batch)
            out = self.experts(hidden_states.view(-1, hidden_states.shape[-1]), ids, scores).view(hidden_states.shape)
            out = out + self._captured(self.shared_experts(hidden_states), batch)
        return self.after_ops(out, batch)

    def forward_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (x,) = inputs
        return super().forward_fused(x, batch=batch) + self._captured(self.shared_experts.fused(x, batch), batch)

    def _captured(self, shared: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        if batch is not None:
            capture_inner(shared, batch.site_ops, self.layer_idx, "shared_out")
        return shared


class Glm4MoeDecoderLayer(LlamaDecoderLayer):
    attention_cls = Glm4MoeAttention

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.in_one_call = False  # it rotates whole heads

    @staticmethod
    def mlp_cls(config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> ResidualBranch:
        """The MLP of a layer."""
        cls: Any = LlamaMLP if layer_idx < config.first_k_dense_replace else Glm4MoeMoE
        return cls(config, spec, layer_idx, device)


class Glm4MoeModel(LlamaModel):
    """The decoder without its head."""

    layer_cls = Glm4MoeDecoderLayer

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        turned = int(spec.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        return RotaryEmbedding(config, turned, max_positions, spec.dtype, device)


class Glm4MoeForCausalLM(SparseForCausalLM):
    """Zeng et al., 2025. The layers of a checkpoint that predict further tokens are left out."""

    decoder_cls = Glm4MoeModel

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        return config.first_k_dense_replace < config.num_hidden_layers

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Without the layers behind the last one."""
        layers = range(self.spec.num_hidden_layers)
        known = ((name, tensor) for name, tensor in weights if _layer_of(name) in layers or _layer_of(name) is None)
        return super().parameters_of(known)

    @property
    def num_experts(self) -> int:
        return self.config.n_routed_experts


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdigit() else None
