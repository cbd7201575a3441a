"""Mixtral, Qwen3-MoE, OLMoE and GLM-4.5: decoders with mixtures of experts as MLPs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec, delta_site, mlp_add
from ...layers.activation import activation, activation_module, gated
from ...layers.edits.base import apply_inner, capture_inner
from ...layers.linear import Linear, MergedLinear
from ...layers.moe import Experts, SigmoidRouter, TopKRouter
from ...layers.norm import RMSNorm, norm_heads
from ...layers.rope import RotaryEmbedding
from ..base import ResidualBranch
from ..weights.loading import WeightsError
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from .qwen import Qwen3Attention

EXPERT_WEIGHT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class SparseMoeBlock(ResidualBranch):
    """Each token goes through the experts that its router chooses."""

    name = "mlp"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        self.output_site = delta_site(mlp_add(layer_idx))
        experts, hidden, dtype = self.num_experts_of(config), spec.hidden_size, spec.dtype
        self.gate = TopKRouter(
            layer_idx, experts, hidden, config.num_experts_per_tok, self.normalises(config), dtype, self.score_dtype_of(spec),
            device,
        )  # fmt: skip
        self.experts = Experts(
            layer_idx, experts, hidden, self.intermediate_size_of(config), self.activation_of(config), dtype, device
        )

    @staticmethod
    def num_experts_of(config: PretrainedConfig) -> int:
        """Number of experts of a layer."""
        return config.num_experts

    @staticmethod
    def intermediate_size_of(config: PretrainedConfig) -> int:
        """Intermediate size of an expert."""
        return config.intermediate_size

    @staticmethod
    def normalises(config: PretrainedConfig) -> bool:
        """Whether the scores of a token add up to 1."""
        return config.norm_topk_prob

    @staticmethod
    def score_dtype_of(spec: ModelSpec) -> torch.dtype:
        """Dtype of router scores."""
        return spec.dtype

    @staticmethod
    def activation_of(config: PretrainedConfig) -> str:
        """The name of the activation function."""
        return config.hidden_act

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            hidden = hidden_states.view(-1, hidden_states.shape[-1])
            _, scores, ids = self.gate(hidden)
            self.gate.capture(ids, scores, hidden_states.dtype, batch)
            out = self.experts(hidden, ids, scores).view(hidden_states.shape)
        return self.after_ops(out, batch)

    def forward_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (x,) = inputs
        hidden = x.view(-1, x.shape[-1])
        _, scores, ids = self.gate.route(hidden, batch)
        self.gate.capture(ids, scores, x.dtype, batch)
        return self.experts.fused(hidden, ids, scores).view(x.shape)


class SparseForCausalLM(LlamaForCausalLM):
    """A decoder with experts in all layers."""

    quantised_methods, quantises = frozenset({"fp8", "compressed-tensors"}), False

    def parameters_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters with the expert weights of a layer in two tensors. Checkpoints have three for each expert."""
        sizes, waiting = {"gate_up_proj": 2 * self.num_experts, "down_proj": self.num_experts}, {}
        for name, tensor in super().parameters_of(weights):
            if (found := EXPERT_WEIGHT.fullmatch(name)) is None:
                yield name, tensor
                continue
            experts, index, kind = found[1], int(found[2]), found[3]
            merged = "down_proj" if kind == "down_proj" else "gate_up_proj"
            group = waiting.setdefault(f"{experts}.{merged}", {})
            at = 2 * index + (kind == "up_proj") if merged == "gate_up_proj" else index
            first = next(iter(group.values()))[1] if group else tensor
            alike = tensor.ndim == 2 and tensor.shape == first.shape and tensor.is_floating_point()
            alike = alike and tensor.dtype.itemsize > 1  # codes, without scales
            if index >= self.num_experts or at in group or found[2] != str(index) or not alike:
                yield name, tensor  # reported with the other tensors that do not fit
                continue
            group[at] = (name, tensor)
            if len(group) == sizes[merged]:
                parts = torch.stack([group[i][1] for i in range(len(group))])
                yield f"{experts}.{merged}", parts.view(self.num_experts, -1, parts.shape[-1])
                del waiting[f"{experts}.{merged}"]
        for merged, group in waiting.items():
            if not group:  # nothing fits, which is reported with all other tensors
                continue
            lacking = [name for name in self._expert_names(merged) if name not in {own for own, _ in group.values()}]
            raise WeightsError(
                f"{merged}: {len(lacking)} tensors are missing, or have another shape or dtype than the others: "
                f"{', '.join(lacking[:10])}"
            )

    def _expert_names(self, merged: str) -> list[str]:
        experts, _, kind = merged.rpartition(".")
        kinds = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        return [f"{experts}.{index}.{own}.weight" for index in range(self.num_experts) for own in kinds]

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer."""
        mlp: SparseMoeBlock = self.model.layers[0].mlp  # pyright: ignore
        return mlp.gate.num_experts


class MixtralMoe(SparseMoeBlock):
    """Scores add up to 1, in float32."""

    @staticmethod
    def num_experts_of(config: PretrainedConfig) -> int:
        return config.num_local_experts

    @staticmethod
    def normalises(config: PretrainedConfig) -> bool:
        return True

    @staticmethod
    def score_dtype_of(spec: ModelSpec) -> torch.dtype:
        return torch.float32


class MixtralAttention(LlamaAttention):
    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        return False, False


class MixtralDecoderLayer(LlamaDecoderLayer):
    attention_cls, mlp_cls = MixtralAttention, MixtralMoe


class MixtralModel(LlamaModel):
    layer_cls = MixtralDecoderLayer


class MixtralForCausalLM(SparseForCausalLM):
    """Mixtral (Jiang et al., 2024)."""

    decoder_cls = MixtralModel

    @classmethod
    def parameter_name(cls, name: str) -> str:
        name = name.replace(".block_sparse_moe.", ".mlp.")
        for own, usual in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = name.replace(f".{own}.weight", f".{usual}.weight")
        return name


class Qwen3MoeBlock(SparseMoeBlock):
    """Experts are smaller than the family's dense MLPs."""

    @staticmethod
    def intermediate_size_of(config: PretrainedConfig) -> int:
        return config.moe_intermediate_size


class Qwen3MoeDecoderLayer(LlamaDecoderLayer):
    attention_cls, mlp_cls = Qwen3Attention, Qwen3MoeBlock


class Qwen3MoeModel(LlamaModel):
    layer_cls = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(SparseForCausalLM):
    """Yang et al., 2025. Models with some dense MLPs run by their class in transformers."""

    decoder_cls = Qwen3MoeModel

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        return config.decoder_sparse_step == 1 and not config.mlp_only_layers and config.num_experts > 0


class OlmoeAttention(LlamaAttention):
    """q and k are normalised before they are split into heads."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        self.q_norm, self.k_norm = (RMSNorm(spec.width(kind), config.rms_norm_eps, spec.dtype, device) for kind in "qk")

    def normed(self, projected: torch.Tensor, norm: str) -> torch.Tensor:
        return super().normed(getattr(self, norm)(projected), norm)

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        qkv = super().projected_fused(x, batch)
        parts = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = (
            norm.normalize(part.reshape(len(part), -1)).view(part.shape)
            for norm, part in zip((self.q_norm, self.k_norm), parts, strict=False)
        )
        return torch.cat((q, k, parts[2]), dim=1)


class OlmoeDecoderLayer(LlamaDecoderLayer):
    attention_cls, mlp_cls = OlmoeAttention, SparseMoeBlock


class OlmoeModel(LlamaModel):
    layer_cls = OlmoeDecoderLayer


class OlmoeForCausalLM(SparseForCausalLM):
    """Muennighoff et al., 2024. Models that clamp q, k and v run by their class in transformers."""

    decoder_cls = OlmoeModel

    @classmethod
    def implements(cls, config: PretrainedConfig) -> bool:
        return config.clip_qkv is None


# -- GLM-4.5 -------------------------------------------------------------------------


class Glm4MoeAttention(LlamaAttention):
    """GLM-4.5's attention. `use_qk_norm` normalises each head of q and k; a part of a head's channels is rotated."""

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


class SharedExpert(nn.Module):
    """A gated MLP that all tokens go through, beside their experts.

    Args:
        size: neurons.
    """

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, size: int, device: str) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self._gate_up = MergedLinear(hidden, [size] * 2, False, spec.dtype, device)
        self.gate_proj, self.up_proj = self._gate_up.projections()
        self.down_proj = Linear(size, hidden, False, spec.dtype, device)
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


class SharedExperts(SharedExpert):
    """GLM-4.5's, as one MLP. Its output is the site `shared_out`."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, config.moe_intermediate_size * config.n_shared_experts, device)
        self.layer_idx = layer_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        # `.source` names operations by their assignments: as in transformers.
        with self._gate_up.product(x):
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj if batch is None else apply_inner(down_proj, batch.site_ops, self.layer_idx, "shared_out")

    def fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return apply_inner(super().fused(x, batch), batch.site_ops, self.layer_idx, "shared_out")


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
        """Parameters of the model's layers. Checkpoints have further ones after the last."""
        layers = range(self.spec.num_hidden_layers)
        known = ((name, tensor) for name, tensor in weights if _layer_of(name) in layers or _layer_of(name) is None)
        return super().parameters_of(known)

    @property
    def num_experts(self) -> int:
        return self.config.n_routed_experts


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdigit() else None
