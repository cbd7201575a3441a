"""Qwen3.5 (text) and Qwen3-Next: three layers with a gated delta net, then one with attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec, delta_site
from ...layers.activation import activation, activation_module, gated
from ...layers.edits.base import apply_and_capture, apply_at, capture_at
from ...layers.linear import Linear, MergedLinear
from ...layers.norm import OffsetRMSNorm
from ...layers.rope import RotaryEmbedding
from ..base import Rotation
from .decoder import DecoderLayer
from .delta import GatedAttention, GatedDeltaNet, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from .llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from .moe import Qwen3MoeBlock, SparseForCausalLM

LINEAR = "linear_attention"
"""The type of layers with a gated delta net, in the config."""


class Qwen3_5Attention(GatedAttention):
    """See `GatedAttention`."""


class Qwen3NextAttention(GatedAttention):
    """See `GatedAttention`."""


class Qwen3_5DecoderLayer(LlamaDecoderLayer):
    """Llama's layer, with a gated delta net or an attention."""

    attention_cls = Qwen3_5Attention
    delta_cls: type[GatedDeltaNet] = Qwen3_5GatedDeltaNet
    norm_cls = OffsetRMSNorm

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        DecoderLayer.__init__(self, layer_idx)
        types = config.layer_types
        self.is_linear = types[layer_idx] == LINEAR
        if self.is_linear:
            first = 2 * types[:layer_idx].count(LINEAR)
            self.linear_attn = self.delta_cls(config, spec, layer_idx, device, first)
        else:
            self.self_attn = self.attention_cls(config, spec, layer_idx, device)
        self.mlp: Any = self.mlp_cls(config, spec, layer_idx, device)  # pyright: ignore
        self.input_layernorm = self.norm_cls(spec.hidden_size, config.rms_norm_eps, spec.dtype, device)
        self.post_attention_layernorm = self.norm_cls(spec.hidden_size, config.rms_norm_eps, spec.dtype, device)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, forward_batch: ForwardBatch, **kwargs: Any
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Runs fused where no hook waits inside."""
        fused = self.run_fused(hidden_states, position_embeddings, forward_batch)
        if fused is not None:
            return fused
        kwargs |= {"position_embeddings": position_embeddings, "forward_batch": forward_batch}
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        # `.source` names operations by their calls and assignments: as in transformers.
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        if self.is_linear:
            hidden_states = self.linear_attn(hidden_states=hidden_states)
        else:
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
        """See `FusedLayer`."""
        h, normed = self.input_layernorm.after_add(h, delta, batch.site_ops, self._input_add)
        if self.is_linear:
            delta = self.linear_attn.forward_fused(normed, batch=batch)
        else:
            delta = self.self_attn.forward_fused(normed, *rotation, batch=batch)
        h, normed = self.post_attention_layernorm.after_add(h, delta, batch.site_ops, self._attention_add)
        return h, self.mlp.forward_fused(normed, batch=batch)


class Qwen3_5TextModel(LlamaModel):
    """The decoder without its head."""

    layer_cls: type[LlamaDecoderLayer] = Qwen3_5DecoderLayer

    @staticmethod
    def rotary_of(config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> nn.Module:
        """Of the first channels of a head."""
        turned = int(spec.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        return RotaryEmbedding(config, turned, max_positions, spec.dtype, device)

    def state_layouts(self) -> list[Any]:
        """The states of all layers, as a pool numbers them."""
        nets = (layer.linear_attn for layer in self.layers if layer.is_linear)
        return [layout for net in nets for layout in net.state_layouts]  # pyright: ignore


class Qwen3_5ForCausalLM(LlamaForCausalLM):
    """The text model of Qwen3.5, with its head. Checkpoints have a head for drafts, which is not read."""

    decoder_cls = Qwen3_5TextModel
    quantised_methods, quantises = frozenset[str](), False

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__(config, spec, device, max_positions)
        self.state_layouts = self.model.state_layouts()  # pyright: ignore[reportCallIssue]

    @classmethod
    def parameter_name(cls, name: str) -> str:
        """Checkpoints of the multimodal model have the decoder as `language_model`."""
        return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return super().parameters_of(_without_drafts(weights))


def _without_drafts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint without what transformers leaves out: the head for drafts, and the part for images."""
    return ((name, tensor) for name, tensor in weights if not name.startswith(("mtp.", "model.visual.")))


# -- Qwen3-Next ------------------------------------------------------------------------


class SharedExpert(nn.Module):
    """The MLP that each token goes through, beside the experts of its choice."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str) -> None:
        super().__init__()
        hidden, intermediate, dtype = spec.hidden_size, config.shared_expert_intermediate_size, spec.dtype
        self._gate_up = MergedLinear(hidden, [intermediate] * 2, False, dtype, device)
        self.gate_proj, self.up_proj = self._gate_up.projections()
        self.down_proj = Linear(intermediate, hidden, False, dtype, device)
        self.act_fn = activation_module(config.hidden_act)
        # The fused pass has its own copy: hooks may wait at the module `act_fn`.
        self._act = [activation(config.hidden_act)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._gate_up.product(x):
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj

    def fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` without a call to a module."""
        return self.down_proj.project(gated(self._gate_up.project(x, batch), self._act[0]), batch)


class Qwen3NextSparseMoeBlock(Qwen3MoeBlock):
    """Experts, and one shared expert with a gate."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.shared_expert = SharedExpert(config, spec, device)
        self.shared_expert_gate = Linear(spec.hidden_size, 1, False, spec.dtype, device)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            hidden = hidden_states.view(-1, hidden_states.shape[-1])
            shared = self.shared_expert(hidden)
            _, scores, ids = self.gate(hidden)
            self.gate.capture(ids, scores, hidden.dtype, batch)
            chosen = self.experts(hidden, ids, scores)
            out = (chosen + F.sigmoid(self.shared_expert_gate(hidden)) * shared).view(hidden_states.shape)
        return self.after_ops(out, batch)

    def forward_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (x,) = inputs
        hidden = x.view(-1, x.shape[-1])
        shared = self.shared_expert.fused(hidden, batch)
        _, scores, ids = self.gate.route(hidden, batch)
        self.gate.capture(ids, scores, hidden.dtype, batch)
        chosen = self.experts.fused(hidden, ids, scores)
        return (chosen + F.sigmoid(self.shared_expert_gate.project(hidden, batch)) * shared).view(x.shape)


class Qwen3NextDecoderLayer(Qwen3_5DecoderLayer):
    attention_cls, delta_cls = Qwen3NextAttention, Qwen3NextGatedDeltaNet
    mlp_cls = Qwen3NextSparseMoeBlock


class Qwen3NextModel(Qwen3_5TextModel):
    layer_cls = Qwen3NextDecoderLayer


class Qwen3NextForCausalLM(SparseForCausalLM):
    """The decoder with its head. Models with some dense MLPs run by their class in transformers."""

    decoder_cls = Qwen3NextModel

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__(config, spec, device, max_positions)
        self.state_layouts = self.model.state_layouts()  # pyright: ignore[reportCallIssue]

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        return config.decoder_sparse_step == 1 and not config.mlp_only_layers and config.num_experts > 0

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return super().parameters_of(_without_drafts(weights))
