"""Qwen3.5 (text) and Qwen3-Next: three layers with a gated delta net, then one with attention, which has a gate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import skip_init
from transformers import PretrainedConfig

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec, attention_add, delta_site
from ...layers.delta import DeltaSizes, DeltaStates, DeltaWeights, GatedRMSNorm, mix
from ...layers.delta_by_token import mix_by_token
from ...layers.dispatch import triton_kernels_for
from ...layers.edits.base import apply_and_capture, apply_at, apply_inner, capture_at
from ...layers.invariant import invariant_device, sigmoid_of_mode
from ...layers.linear import Linear, MergedLinear
from ...layers.norm import OffsetRMSNorm, rms_norm
from ...layers.rope import RotaryEmbedding
from ...mem_cache.state_pool import StateLayout, recurrent_places
from ..base import ProjectedBranch, Rotation
from .decoder import DecoderLayer
from .llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from .moe import Qwen3MoeBlock, SharedExpert, SparseForCausalLM
from .qwen import Qwen3Attention

LINEAR = "linear_attention"
"""The type of layers with a gated delta net, in the config."""
OF_CONVOLUTION = ("silu", "swish")
"""Names of the activation function behind the convolution. With `hidden_act`, transformers changes it in the MLPs and here."""


class Projected(NamedTuple):
    """The projections of a gated delta net, of each token."""

    # fmt: off
    mixed: torch.Tensor  # [tokens, channels], q, k and v before the convolution
    gate:  torch.Tensor  # [tokens, heads, dim], `z` of transformers
    b:     torch.Tensor  # [tokens, heads]
    a:     torch.Tensor  # [tokens, heads]
    # fmt: on


class GatedDeltaNet(ProjectedBranch):
    """The gated delta rule, with a norm and a gate behind it.

    `norm` gets [tokens, heads, dim], for the rows of the pass. In transformers, heads and tokens are one dim.

    Attributes:
        state_layouts: layouts of the states of the convolution and of the delta rule.
        first_state: number of the first of them in the pool.
    """

    name, last_projection, inner_kind = "linear_attn", "out_proj", "delta_out"

    def __init__(
        self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str, first_state: int
    ) -> None:
        super().__init__(layer_idx)
        self.output_site = delta_site(attention_add(layer_idx))
        self.sizes = sizes = DeltaSizes(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        channels, taps, dtype = sizes.channels, config.linear_conv_kernel_dim, spec.dtype
        conv: Any = {"groups": channels, "padding": taps - 1, "bias": False, "device": device, "dtype": dtype}
        self.conv1d: Any = skip_init(nn.Conv1d, channels, channels, taps, **conv)  # passes read its weight only
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads, dtype=dtype, device=device), False)
        self.A_log = nn.Parameter(torch.empty(sizes.heads, dtype=dtype, device=device), False)
        self.make_projections(spec.hidden_size, dtype, device)
        self.norm = GatedRMSNorm(sizes.dim, config.rms_norm_eps, dtype, device)
        self.out_proj = Linear(sizes.values, spec.hidden_size, False, dtype, device)
        self.first_state = first_state
        self._mix = mix if invariant_device() is None else mix_by_token
        self.state_layouts = (
            StateLayout("conv", (taps - 1, channels), dtype, layer_idx),
            StateLayout("recurrent", (sizes.heads, sizes.key_dim, sizes.dim), torch.float32, layer_idx),
        )

    @abstractmethod
    def make_projections(self, hidden: int, dtype: torch.dtype, device: str) -> None:
        """Set the modules that read the layer's input."""

    @abstractmethod
    def projected(self, x: torch.Tensor) -> Projected:
        """Projections of x [1, tokens, hidden], module by module."""

    @abstractmethod
    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> Projected:
        """`projected` without a call to a module; views of one product."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Outside of a pass, the tokens are one sequence."""
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            projected = self.projected(hidden_states)
            core_attn_out = self.norm(self._mixed(projected, batch), projected.gate)
            out = self.out_proj(core_attn_out.reshape(1, -1, self.sizes.values))
        return self.after_ops(out, batch)

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden]."""
        projected = self.projected_fused(inputs[0], batch)
        return self.norm.normalize(self._mixed(projected, batch), projected.gate).view(1, -1, self.sizes.values)

    def _mixed(self, projected: Projected, batch: ForwardBatch | None) -> torch.Tensor:
        """[tokens, heads, dim] behind the delta rule. Reads and writes the states of the pass's requests."""
        pool = None if batch is None or batch.fresh_kv_only else batch.state_pool
        first, states = self.first_state, None
        if pool is not None:
            states = DeltaStates(pool.memory(first), pool.memory(first + 1))
        weights = DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias)
        return self._mix(projected.mixed, projected.b, projected.a, weights, self.sizes, states, batch)


class Qwen3_5GatedDeltaNet(GatedDeltaNet):
    """Four projections, computed as one product: q, k and v together, the gate, b, and a."""

    def make_projections(self, hidden: int, dtype: torch.dtype, device: str) -> None:
        sizes = self.sizes
        widths = [sizes.channels, sizes.values, sizes.heads, sizes.heads]
        self._in = MergedLinear(hidden, widths, False, dtype, device)
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = self._in.projections()

    def projected(self, x: torch.Tensor) -> Projected:
        with self._in.product(x):
            parts = [part(x)[0] for part in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)]
        return self._split(*parts)

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> Projected:
        return self._split(*self._in.project(x, batch)[0].split(self._in.sizes, dim=-1))

    def _split(self, mixed: torch.Tensor, gate: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Projected:
        return Projected(mixed, gate.unflatten(-1, (self.sizes.heads, self.sizes.dim)), b, a)


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    """Two projections, one of them for b and a. Each head of keys has its q, k, v and gate side by side."""

    def make_projections(self, hidden: int, dtype: torch.dtype, device: str) -> None:
        sizes = self.sizes
        self._in = MergedLinear(hidden, [sizes.channels + sizes.values, 2 * sizes.heads], False, dtype, device)
        self.in_proj_qkvz, self.in_proj_ba = self._in.projections()

    def projected(self, x: torch.Tensor) -> Projected:
        with self._in.product(x):
            return self._split(self.in_proj_qkvz(x)[0], self.in_proj_ba(x)[0])

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> Projected:
        return self._split(*self._in.project(x, batch)[0].split(self._in.sizes, dim=-1))

    def _split(self, qkvz: torch.Tensor, ba: torch.Tensor) -> Projected:
        sizes = self.sizes
        each = sizes.heads // sizes.key_heads
        widths = [sizes.key_dim, sizes.key_dim, each * sizes.dim, each * sizes.dim]
        q, k, v, gate = qkvz.unflatten(-1, (sizes.key_heads, -1)).split(widths, dim=-1)
        b, a = ba.unflatten(-1, (sizes.key_heads, -1)).split([each, each], dim=-1)
        mixed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=-1)
        gate = gate.reshape(len(gate), sizes.heads, sizes.dim)
        return Projected(mixed, gate, b.reshape(len(b), -1), a.reshape(len(a), -1))


class GatedAttention(Qwen3Attention):
    """Attention with a gate for each channel of z. `q_proj` gives each head of q, and its gate behind it."""

    norm_cls = OffsetRMSNorm

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self._sigmoid = sigmoid_of_mode()

    @staticmethod
    def sizes_of(spec: ModelSpec) -> list[int]:
        q, k, v = Qwen3Attention.sizes_of(spec)
        return [2 * q, k, v]

    def heads_output(self, x: torch.Tensor, rotation: Sequence[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        tokens, size = x.shape[1], self.head_dim
        with self._qkv.product(x):
            query, gate = self.q_proj(x).view(1, tokens, -1, 2 * size).chunk(2, dim=-1)
            q = self.q_norm(query.contiguous())[0]
            k = self.k_norm(self.k_proj(x).view(1, tokens, -1, size))[0]
            v = self.v_proj(x).view(tokens, -1, size)
        return self._opened(self.attend(q, k, v, rotation, batch), gate[0])

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden], and the cosines and signed sines of a `rotation`."""
        x, *rotation = inputs
        product = self._qkv.project(x, batch)[0]
        gate = product[:, : self._qkv.sizes[0]].unflatten(-1, (self.num_heads, 2, self.head_dim))[:, :, 1]
        z = self._opened(self.attend_fused(self._split(product), rotation, batch), gate)
        return apply_inner(z, batch.site_ops, self.layer_idx, "z")

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._split(self._qkv.project(x, batch)[0])

    def _split(self, product: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + 2 * kv_heads, head_dim], q and k normalised."""
        q_norm, k_norm, heads, kv_heads = self.q_norm, self.k_norm, self.num_heads, self.num_kv_heads
        if triton_kernels_for(product) is not None:
            from ...kernels import triton_delta

            return triton_delta.split_gated(
                product, q_norm.weight, k_norm.weight, heads, kv_heads, q_norm.eps, q_norm.kind
            )
        parts = product.unflatten(-1, (-1, self.head_dim)).split([2 * heads, kv_heads, kv_heads], dim=1)
        q, k = (
            rms_norm(part.contiguous(), norm.weight, norm.eps, norm.kind)
            for part, norm in ((parts[0][:, ::2], q_norm), (parts[1], k_norm))
        )
        return torch.cat((q, k, parts[2]), dim=1)

    def _opened(self, z: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """z [1, tokens, heads * head_dim] times the sigmoid of gate [tokens, heads, head_dim]."""
        if triton_kernels_for(z) is not None:
            from ...kernels import triton_delta

            return triton_delta.open_gate(z[0], gate).unsqueeze(0)
        return z * self._sigmoid(gate.contiguous()).flatten(1)


class Qwen3_5Attention(GatedAttention):
    """Qwen3.5's `GatedAttention`."""


class Qwen3NextAttention(GatedAttention):
    """Qwen3-Next's `GatedAttention`."""


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
        """[1, tokens, hidden] -> the same. Runs fused unless a hook waits inside."""
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
        """Run the fused layer (`FusedLayer`)."""
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
        """Rotary embedding of the first channels of a head."""
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
        self.spec = replace(spec, states=recurrent_places(self.state_layouts, spec.num_hidden_layers))

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        return config.get_text_config().hidden_act in OF_CONVOLUTION

    @classmethod
    def parameter_name(cls, name: str) -> str:
        """Checkpoints of the multimodal model have the decoder as `language_model`."""
        return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return super().parameters_of(_without_drafts(weights))


def _without_drafts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's weights except those that transformers omits: the head for drafts, and the image encoder."""
    return ((name, tensor) for name, tensor in weights if not name.startswith(("mtp.", "model.visual.")))


# -- Qwen3-Next ------------------------------------------------------------------------


class Qwen3NextSparseMoeBlock(Qwen3MoeBlock):
    """Experts, and one shared expert with a gate."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.shared_expert = SharedExpert(config, spec, config.shared_expert_intermediate_size, device)
        self.shared_expert_gate = Linear(spec.hidden_size, 1, False, spec.dtype, device)
        self._sigmoid = sigmoid_of_mode()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            hidden = hidden_states.view(-1, hidden_states.shape[-1])
            shared = self.shared_expert(hidden)
            _, scores, ids = self.gate(hidden)
            self.gate.capture(ids, scores, hidden.dtype, batch)
            chosen = self.experts(hidden, ids, scores)
            out = (chosen + self._sigmoid(self.shared_expert_gate(hidden)) * shared).view(hidden_states.shape)
        return self.after_ops(out, batch)

    def forward_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (x,) = inputs
        hidden = x.view(-1, x.shape[-1])
        shared = self.shared_expert.fused(hidden, batch)
        _, scores, ids = self.gate.route(hidden, batch)
        self.gate.capture(ids, scores, hidden.dtype, batch)
        chosen = self.experts.fused(hidden, ids, scores)
        return (chosen + self._sigmoid(self.shared_expert_gate.project(hidden, batch)) * shared).view(x.shape)


class Qwen3NextDecoderLayer(Qwen3_5DecoderLayer):
    attention_cls, delta_cls = Qwen3NextAttention, Qwen3NextGatedDeltaNet
    mlp_cls = Qwen3NextSparseMoeBlock


class Qwen3NextModel(Qwen3_5TextModel):
    layer_cls = Qwen3NextDecoderLayer


class Qwen3NextForCausalLM(SparseForCausalLM):
    """The decoder with its head. Models with some dense MLPs run by their class in transformers."""

    decoder_cls = Qwen3NextModel
    quantised_methods = frozenset[str]()

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__(config, spec, device, max_positions)
        self.state_layouts = self.model.state_layouts()  # pyright: ignore[reportCallIssue]
        self.spec = replace(spec, states=recurrent_places(self.state_layouts, spec.num_hidden_layers))

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        sparse = config.decoder_sparse_step == 1 and not config.mlp_only_layers and config.num_experts > 0
        return sparse and config.hidden_act in OF_CONVOLUTION

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return super().parameters_of(_without_drafts(weights))
